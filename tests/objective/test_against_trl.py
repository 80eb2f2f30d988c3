"""Every loss of TRL 1.16 on the same tensors, through the real update: value and gradient."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tropism.objective.settings import Objective
from tropism.types import Completion, Prompt, Rollout, RolloutBatch
from tropism.update import accumulate_gradients, prepare

trl = pytest.importorskip("trl.import_utils", reason="needs the extra `bench`")
# Else it imports a vLLM that is installed, and warns of its version.
trl.is_vllm_available = lambda min_version=None: False

G, LIMIT = 4, 9
LENGTHS = [3, 5, 9, 1, 7, 9, 2, 4]
B, T = len(LENGTHS), max(LENGTHS)
CASES = {
    "grpo": {"loss": "grpo"},
    "dapo with clip-higher": {"loss": "dapo", "clip_high": 0.28},
    "dr_grpo": {"loss": "dr_grpo"},
    "bnpo": {"loss": "bnpo"},
    "gspo": {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    "cispo": {"loss": "cispo", "clip_high": 0.4},
    "sapo": {"loss": "sapo", "sapo_temperatures": (0.9, 1.3)},
    "dual clip": {"loss": "grpo", "dual_clip": 1.5},
    "entropy bonus": {"loss": "dapo", "entropy_bonus": 0.03},
    "top entropy": {"loss": "dapo", "entropy_top_fraction": 0.5},
    "token truncate": {"loss": "dapo", "mismatch": "token_truncate", "mismatch_range": (0.8, 1.1)},
    "token mask": {"loss": "grpo", "mismatch": "token_mask", "mismatch_range": (None, 1.1)},
    "sequence truncate": {"loss": "dapo", "mismatch": "sequence_truncate"},
    "sequence mask": {"loss": "dapo", "mismatch": "sequence_mask", "mismatch_range": (0.7, 1.4)},
}


@pytest.fixture
def numbers() -> SimpleNamespace:
    torch.manual_seed(3)
    policy = -torch.rand(B, T) * 2
    mask = torch.arange(T)[None] < torch.tensor(LENGTHS)[:, None]
    return SimpleNamespace(
        mask=mask,
        policy=policy,
        old=policy + torch.randn(B, T) * 0.4,
        reference=policy + torch.randn(B, T) * 0.3,
        sampler=policy + torch.randn(B, T) * 0.2,
        entropy=torch.rand(B, T) * 3,
        advantages=torch.randn(B),
    )


class TensorPolicy:
    """Stands where the model is: its log-probabilities and entropies *are* the parameters."""

    device = torch.device("cpu")
    pad_token_id = 0
    can_pack = False

    def __init__(self, numbers: SimpleNamespace) -> None:
        self.logprobs = numbers.policy.clone().requires_grad_()
        self.entropy = numbers.entropy.clone().requires_grad_()
        self._reference = numbers.reference
        self._shows_reference = False

    @contextmanager
    def reference(self):
        self._shows_reference = True
        yield
        self._shows_reference = False

    def completion_logprobs(self, part, *, temperature, should_train_entropy=False, trunk=None):
        source = self._reference if self._shows_reference else self.logprobs
        width = part.mask.shape[1]
        entropy = self.entropy if should_train_entropy else self.entropy.detach()
        return (
            source[part.rows, :width] * part.mask,
            entropy[part.rows, :width] * part.mask,
        )


def ours(numbers: SimpleNamespace, objective: Objective):
    completions = [
        Completion(tuple(range(1, n + 1)), "", numbers.sampler[row, :n], "stop")
        for row, n in enumerate(LENGTHS)
    ]
    rollouts = [
        Rollout(Prompt(id=str(p), task="t", text="x"), (1, 2), tuple(completions[p * G :][:G]))
        for p in range(B // G)
    ]
    batch = RolloutBatch(
        rollout=0,
        rollouts=rollouts,
        components={},
        rewards=torch.zeros(B),
        advantages=numbers.advantages,
        zero_variance=torch.zeros(B // G, dtype=torch.bool),
    )
    policy = TensorPolicy(numbers)
    prepared = prepare(
        batch, policy, objective, max_completion_length=LIMIT, temperature=1.0, max_tokens=20
    )
    assert len(prepared.micro_batches) > 2  # the parts must add up to the whole
    prepared.old_logprobs = [
        numbers.old[part.rows, : part.mask.shape[1]] * part.mask for part in prepared.micro_batches
    ]
    sums = accumulate_gradients(
        prepared, policy, objective, temperature=1.0, backward=torch.Tensor.backward
    )
    return sums.loss, policy.logprobs.grad, policy.entropy.grad


def theirs(numbers: SimpleNamespace, objective: Objective):
    from trl import GRPOTrainer

    # The ratio and the weights of TRL's vLLM correction, as in its generation step.
    gap = (numbers.old - numbers.sampler) * numbers.mask
    if objective.mismatch.startswith("sequence"):
        gap = gap.sum(dim=1, keepdim=True)
    low, high = objective.mismatch_range
    ratio = gap.exp()
    if objective.mismatch.endswith("truncate"):
        ratio = ratio.clamp(low, high)
    elif objective.mismatch.endswith("mask"):
        outside = (ratio < (low or 0.0)) | (ratio > high)
        ratio = ratio.masked_fill(outside, 0.0)
    logprobs = numbers.policy.clone().requires_grad_()
    entropy = numbers.entropy.clone().requires_grad_()
    is_local = objective.loss == "bnpo"  # a local batch is a group here
    slices = [slice(p * G, (p + 1) * G) for p in range(B // G)] if is_local else [slice(0, B)]
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
    )
    total = 0.0
    for rows in slices:
        trainer = SimpleNamespace(
            accelerator=accelerator,
            model=SimpleNamespace(training=True),
            _metrics={"train": defaultdict(list)},
            args=SimpleNamespace(
                delta=objective.dual_clip,
                use_bias_correction_kl=False,
                sapo_temperature_pos=objective.sapo_temperatures[0],
                sapo_temperature_neg=objective.sapo_temperatures[1],
                steps_per_generation=1,
            ),
            loss_type="grpo" if objective.loss == "gspo" else objective.loss,
            importance_sampling_level="sequence" if objective.loss == "gspo" else "token",
            epsilon_low=objective.clip_low,
            # TRL's cap for cispo is the bound itself.
            epsilon_high=objective.clip_high + (objective.loss == "cispo"),
            beta=objective.beta,
            max_completion_length=LIMIT,
            current_gradient_accumulation_steps=len(slices),
            top_entropy_quantile=objective.entropy_top_fraction,
            off_policy_mask_threshold=None,
            use_vllm=objective.mismatch != "none",
            vllm_importance_sampling_correction=objective.mismatch != "none",
            aux_loss_enabled=False,
            _entropy_bonus_enabled=objective.entropy_bonus > 0,
            use_adaptive_entropy=False,
            entropy_coef=objective.entropy_bonus,
            _get_per_token_logps_and_entropies=lambda *a, rows=rows, **k: (
                logprobs[rows],
                entropy[rows],
                None,
            ),
        )
        trainer.get_high_entropy_mask = lambda *a, t=trainer: GRPOTrainer.get_high_entropy_mask(
            t, *a
        )
        mask = numbers.mask[rows].long()
        loss = GRPOTrainer._compute_loss(
            trainer,
            None,
            {
                "prompt_ids": torch.ones(len(mask), 2, dtype=torch.long),
                "prompt_mask": torch.ones(len(mask), 2, dtype=torch.long),
                "completion_ids": torch.ones_like(mask),
                "completion_mask": mask,
                "advantages": numbers.advantages[rows],
                "old_per_token_logps": numbers.old[rows],
                "ref_per_token_logps": numbers.reference[rows],
                "num_items_in_batch": numbers.mask.sum(),
                "importance_sampling_ratio": ratio[rows],
            },
        )
        loss.backward()
        total += float(loss.detach())
    return total, logprobs.grad, entropy.grad


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_loss_and_gradients_equal_trls(numbers, case, beta):
    objective = Objective(beta=beta, **case)
    loss, gradient, entropy_gradient = ours(numbers, objective)
    expected, expected_gradient, expected_entropy_gradient = theirs(numbers, objective)
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    if objective.entropy_bonus:
        torch.testing.assert_close(entropy_gradient, expected_entropy_gradient)
    assert gradient.abs().sum() > 0
