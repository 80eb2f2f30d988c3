"""Whole runs: what is logged at which optimizer step, and what happens where nothing differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tropism.measurements.records import read
from tropism.tasks.skills import Skills

MODEL = "--model.init_args"
NO_EVALUATION = ("--trainer.limit_val_batches", "0")


class Weights(Callback):
    """The trained tensors after every rollout, the start first."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.states = [{k: v.clone() for k, v in pl_module.state_dict().items()}]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.states.append({k: v.clone() for k, v in pl_module.state_dict().items()})


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Weights:
    """Watches the run: given to the Trainer of the command line."""
    from tropism.cli import TropismCLI

    watch = Weights()
    original = TropismCLI.instantiate_trainer

    def with_watch(self: TropismCLI, **settings: Any) -> Any:
        trainer = original(self, **settings)
        trainer.callbacks.insert(0, watch)
        return trainer

    monkeypatch.setattr(TropismCLI, "instantiate_trainer", with_watch)
    return watch


def alternate(monkeypatch: pytest.MonkeyPatch, *, silent: tuple[int, ...] = ()) -> None:
    """Rewards of 8 completions a rollout: right and wrong in turns, all equal in ``silent``."""
    calls = iter(range(1_000_000))

    def score(*_: Any) -> dict[str, float]:
        call = next(calls)
        return {"format": 1.0, "accuracy": 0.0 if call // 8 in silent else float(call % 2)}

    monkeypatch.setattr(Skills, "score", score)


def points(run: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run)).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.mark.fault(7)
def test_a_rollout_without_signal_moves_no_weight_by_momentum_or_decay(
    tropism: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, weights: Weights
) -> None:
    alternate(monkeypatch, silent=(1, 2))
    run = tropism(*NO_EVALUATION, f"{MODEL}.optimizer.weight_decay", "0.1")
    moved = [
        any(not torch.equal(before[name], after[name]) for name in before)
        for before, after in zip(weights.states, weights.states[1:], strict=False)
    ]
    assert moved == [True, False, False, True]
    norms = read(run, "update_norms").groupby("rollout")["step_norm"].sum()
    assert (norms > 0).tolist() == moved  # the record says which rollout moved what
    steps = read(run, "steps")
    assert steps["step"].tolist() == [1, 1, 1, 2]
    assert steps["frac_reward_zero_std"].tolist() == [0, 1, 1, 0]
    assert steps["loss"].isna().tolist() == [False, True, True, False]


@pytest.mark.fault(4)
def test_equal_rewards_in_each_group_have_no_loss_and_two_spreads(
    tropism: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1_000_000))

    def score(*_: Any) -> dict[str, float]:  # groups of two: [0, 0] and [5, 5]
        return {"format": 0.0, "accuracy": float(next(calls) % 4 >= 2)}

    monkeypatch.setattr(Skills, "score", score)
    with pytest.warns(UserWarning, match="No optimizer step was taken"):
        run = tropism(
            *NO_EVALUATION,
            *("--data.init_args.num_rollouts", "1", "--data.init_args.batch_size", "4"),
            *(f"{MODEL}.group_size", "2"),
            *(f"{MODEL}.reward_weights", '{"format": 1.0, "accuracy": 5.0}'),
        )
    assert points(run, "reward/group_std") == [(0, 0.0)]
    assert points(run, "reward/batch_std") == [(0, pytest.approx((25 / 3) ** 0.5))]
    assert read(run, "steps")["loss"].isna().all()


@pytest.mark.fault(30)
def test_one_event_for_each_optimizer_step_at_its_own_x(
    tropism: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    alternate(monkeypatch, silent=(1,))
    run = tropism(
        *NO_EVALUATION,
        *(f"{MODEL}.max_tokens_per_microbatch", "1"),  # 8 backward passes a step
        *(f"{MODEL}.optimizer.schedule", "linear"),
    )
    # 4 rollouts, one without a step; the rate falls to 0 over the 4 that were planned.
    assert points(run, "objective/lr") == [
        (1, pytest.approx(2e-3)),
        (2, pytest.approx(1.5e-3)),
        (3, pytest.approx(1e-3)),
    ]
    for name in ("objective/loss", "objective/grad_norm"):
        assert [x for x, _ in points(run, name)] == [1, 2, 3]
    assert [x for x, _ in points(run, "reward/total")] == [0, 1, 2, 3]  # over rollouts
    assert read(run, "steps")["step"].tolist() == [1, 1, 2, 3]


@pytest.mark.fault(30)
def test_several_updates_on_a_rollout_leave_no_gaps(
    tropism: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    alternate(monkeypatch)
    run = tropism(*NO_EVALUATION, f"{MODEL}.objective.num_iterations", "3")
    for name in ("objective/loss", "objective/grad_norm", "objective/lr"):
        assert [x for x, _ in points(run, name)] == list(range(1, 13))


@pytest.mark.fault(31)
def test_a_checkpoint_knows_what_the_command_line_linked(tropism: Callable[..., Path]) -> None:
    from tropism import GRPO
    from tropism.models import LoRA

    run = tropism(
        *NO_EVALUATION,
        *("--seed_everything", "5", "--data.init_args.num_rollouts", "1"),
        *(f"{MODEL}.lora.rank", "2", f"{MODEL}.lora.alpha", "2"),
    )
    (run / "config.yaml").unlink()
    module = GRPO.load_from_checkpoint(run / "checkpoints" / "last.ckpt")
    assert module.lora == LoRA(rank=2, alpha=2)
    assert {module.policy.adapter(site).a.shape[0] for site in module.policy.sites} == {2}  # type: ignore[union-attr]
    assert module.seed == module.hparams["seed"] == 5  # linked from seed_everything
    assert module.group_size == 4


@pytest.mark.fault(23)
def test_a_run_says_how_much_of_its_updates_bf16_rounds_away(
    tropism: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    alternate(monkeypatch)
    short = (*NO_EVALUATION, "--data.init_args.num_rollouts", "1")
    whole = (*short, f"{MODEL}.lora", "null", f"{MODEL}.optimizer.learning_rate", "1e-6")
    with pytest.warns(UserWarning, match=r"only \d+% of the update.*bfloat16.*model\.dtype"):
        lossy = tropism(*whole, f"{MODEL}.model.dtype", "bfloat16")
    shares = points(lossy, "update_norms/realised")
    assert [x for x, _ in shares] == [0]
    assert shares[0][1] < 0.5
    for exact in (whole, short):  # fp32 weights; fp32 adapters
        shares = points(tropism(*exact), "update_norms/realised")
        assert shares == [(0, pytest.approx(1.0, abs=2e-3))]
