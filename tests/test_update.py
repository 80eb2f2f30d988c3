"""One update by hand: log-probabilities are the parameters, so that each token's gradient shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tropism.measurements.step_metrics import Sums
from tropism.objective.settings import Objective
from tropism.types import Completion, MicroBatch, Prompt, Rollout, RolloutBatch
from tropism.update import accumulate_gradients, prepare

LIMIT = 10
LOSSES = ["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "sapo"]
EIGHT = [6, 3, 5, 1, 5, 6, 4, 5]
"""Lengths of eight completions that can be cut into parts of four."""


class TensorPolicy:
    """Stands where the model is; row b, position t has ``logprobs[b, t]`` for its parameter."""

    device = torch.device("cpu")
    can_pack = False

    def __init__(self, num_rows: int, *, pad_token_id: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pad_token_id = pad_token_id
        self.logprobs = (-torch.rand(num_rows, LIMIT, generator=generator)).requires_grad_()
        self.reference_logprobs = self.logprobs.detach().clone()
        self._shows_reference = False

    @contextmanager
    def reference(self) -> Iterator[None]:
        self._shows_reference = True
        yield
        self._shows_reference = False

    def completion_logprobs(self, part: MicroBatch, **_: Any) -> tuple[Tensor, Tensor]:
        source = self.reference_logprobs if self._shows_reference else self.logprobs
        rows = source[part.rows, : part.mask.shape[1]] * part.mask
        return rows, torch.zeros_like(rows)


def batch_of(
    lengths: Sequence[int],
    advantages: Sequence[float],
    *,
    group_size: int,
    cut: Sequence[int] = (),
    last_token: int = 3,
) -> RolloutBatch:
    """Completions 1, 1, ..., ``last_token``; those in ``cut`` ended at the limit."""
    completions = [
        Completion(
            (*[1] * (length - 1), last_token),
            "",
            torch.zeros(length),
            "length" if row in cut else "stop",
        )
        for row, length in enumerate(lengths)
    ]
    groups = [completions[i : i + group_size] for i in range(0, len(lengths), group_size)]
    values = torch.tensor(advantages)
    return RolloutBatch(
        rollout=0,
        rollouts=[
            Rollout(Prompt(id=str(i), task="t", text="x"), (7, 8), tuple(group))
            for i, group in enumerate(groups)
        ],
        components={},
        rewards=torch.zeros(len(lengths)),
        advantages=values,
        zero_variance=(values.view(-1, group_size) == 0).all(dim=1),
    )


def update(
    batch: RolloutBatch,
    *,
    max_tokens: int = 1000,
    policy: TensorPolicy | None = None,
    **options: Any,
) -> tuple[Sums, Tensor, int]:
    """Sums, the gradient of every token [B, LIMIT], and the number of micro-batches."""
    policy = policy or TensorPolicy(len(batch.completions))
    objective = Objective(**options)
    prepared = prepare(
        batch,
        policy,  # type: ignore[arg-type]
        objective,
        max_completion_length=LIMIT,
        temperature=1.0,
        max_tokens=max_tokens,
    )
    sums = accumulate_gradients(
        prepared,
        policy,  # type: ignore[arg-type]
        objective,
        temperature=1.0,
        backward=torch.Tensor.backward,
    )
    gradient = policy.logprobs.grad
    return (
        sums,
        torch.zeros_like(policy.logprobs) if gradient is None else gradient,
        len(prepared.micro_batches),
    )


@pytest.mark.fault(1)
@pytest.mark.parametrize("max_tokens", [1000, 1])
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("grpo", (-1 + 1) / 2),
        ("dapo", (-2 + 6) / 8),
        ("dr_grpo", (-2 + 6) / (2 * LIMIT)),
        ("bnpo", (-2 + 6) / 8),
        ("gspo", (-1 + 1) / 2),
    ],
)
def test_the_loss_on_policy(loss: str, expected: float, max_tokens: int) -> None:
    batch = batch_of([2, 6], [1.0, -1.0], group_size=2)
    sums, _, num_parts = update(batch, loss=loss, max_tokens=max_tokens)
    assert num_parts == (2 if max_tokens == 1 else 1)
    assert sums.loss == pytest.approx(expected, abs=1e-7)


@pytest.mark.fault(2)
def test_two_parts_of_two_have_the_denominator_of_all_four() -> None:
    # dapo: every token of the rollout weighs the same, 1 / 16.
    batch = batch_of([2, 6, 3, 5], [1.0, -1.0, 0.5, -0.5], group_size=4)
    _, gradient, num_parts = update(batch, loss="dapo", max_tokens=2 * (2 + 6))
    assert num_parts == 2
    for row, (length, advantage) in enumerate([(2, 1.0), (6, -1.0), (3, 0.5), (5, -0.5)]):
        torch.testing.assert_close(gradient[row, :length], torch.full((length,), -advantage / 16))
        assert (gradient[row, length:] == 0).all()


@pytest.mark.fault(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_however_memory_cuts_the_samples_the_gradient_is_the_same(loss: str) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = batch_of(EIGHT, torch.randn(8, generator=generator).tolist(), group_size=8)
    found = {
        num_parts: gradient
        for max_tokens in (1000, 4 * (2 + 6), 1)
        for _, gradient, num_parts in [update(batch, loss=loss, beta=0.1, max_tokens=max_tokens)]
    }
    assert found.keys() == {1, 2, 8}  # 1x8, 2x4, 8x1
    assert found[1].abs().sum() > 0
    torch.testing.assert_close(found[2], found[1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found[8], found[1], rtol=1e-6, atol=1e-9)


@pytest.mark.fault(3)
def test_a_group_without_signal_feels_the_kl_alone_and_nothing_where_there_is_none() -> None:
    lengths, advantages = [2, 4, 3, 1], [0.0, 0.0, 1.0, -1.0]
    batch = batch_of(lengths, advantages, group_size=2)
    _, gradient, num_parts = update(batch, loss="dapo")
    assert num_parts == 1  # the first group is in no forward; its 6 tokens are in the denominator
    assert (gradient[:2] == 0).all()
    torch.testing.assert_close(gradient[2, :3], torch.full((3,), -1.0 / 10))

    policy = TensorPolicy(4)
    policy.reference_logprobs += 0.3  # r = reference / policy: d k3 / d log p = 1 - r
    _, with_kl, num_parts = update(batch, loss="dapo", beta=0.5, policy=policy)
    assert num_parts == 2
    expected = 0.5 * (1 - torch.tensor(0.3).exp()) / 10
    torch.testing.assert_close(with_kl[0, :2], expected.expand(2))
    torch.testing.assert_close(with_kl[2, :3], gradient[2, :3] + expected)


@pytest.mark.fault(10)
@pytest.mark.parametrize("loss", LOSSES)
def test_masked_rows_do_not_shrink_the_gradient_of_the_others(loss: str) -> None:
    advantages = [1.0, -0.5, 0.25, -0.75]
    batch = batch_of([2, 10, 3, 4], advantages, group_size=4, cut=[1])
    _, gradient, _ = update(batch, loss=loss, mask_truncated=True)
    _, kept, _ = update(batch, loss=loss)
    assert (gradient[1] == 0).all()
    assert (kept[1] != 0).any()
    if loss == "grpo":  # the mean of three completions, not of four
        for row, length in ((0, 2), (2, 3), (3, 4)):
            expected = -advantages[row] / (3 * length)
            torch.testing.assert_close(gradient[row, :length], torch.full((length,), expected))
    if loss == "dapo":
        torch.testing.assert_close(gradient[3, :4], torch.full((4,), 0.75 / 9))


@pytest.mark.fault(11)
@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_the_last_token_counts_where_padding_is_eos(loss: str) -> None:
    eos = 3
    batch = batch_of([2, 6, 3, 1], [1.0, -1.0, 0.5, -0.5], group_size=4, last_token=eos)
    _, gradient, num_parts = update(batch, loss=loss, policy=TensorPolicy(4, pad_token_id=eos))
    assert num_parts == 1  # the shorter rows are padded with EOS
    for row, completion in enumerate(batch.completions):
        length = len(completion.token_ids)
        assert completion.token_ids[-1] == eos
        assert gradient[row, length - 1] == gradient[row, 0] != 0
        assert (gradient[row, length:] == 0).all()
