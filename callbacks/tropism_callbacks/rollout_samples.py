"""What the policy writes: a few completions of every few rollouts, kept and shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from tropism.measurements import metrics as names
from tropism.types import Prompt, RolloutBatch, StepObserver
from tropism_callbacks.run_folder import Recorder, run_folder
from tropism_callbacks.tensorboard import log_markdown, quoted

if TYPE_CHECKING:
    from tropism.finetuning import FineTuning


class RolloutSamples(Callback, StepObserver):
    """Keeps the best and the worst completions of groups spread over the rollout batch.

    Logs:
        ``rollouts/samples``: text with prompt, completion, components and advantage.
    Writes:
        ``records/completions.jsonl``, a row per kept completion.
    Changes:
        Nothing.

    Args:
        every_n_rollouts: Record rollouts 0, n, 2n, ...
        num_samples: Completions kept of each recorded rollout; null keeps all of them (the page
            in TensorBoard then shows the first 16).
    """

    def __init__(self, every_n_rollouts: int = 5, num_samples: int | None = 4) -> None:
        if every_n_rollouts < 1:
            raise ValueError(
                f"RolloutSamples.every_n_rollouts={every_n_rollouts}: give 1 or more, or leave "
                "the callback out."
            )
        if num_samples is not None and num_samples < 1:
            raise ValueError(
                f"RolloutSamples.num_samples={num_samples}: give 1 or more, or null for all."
            )
        self.every_n_rollouts = every_n_rollouts
        self.num_samples = num_samples

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            pl_module.add_observer(self)  # type: ignore[operator]
            self._recorder = Recorder(
                run_folder(trainer), "completions", enabled=trainer.is_global_zero
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._recorder.rewind(pl_module.rollout)

    def after_update(
        self, module: FineTuning, batch: RolloutBatch, metrics: Mapping[str, float | None]
    ) -> None:
        if batch.rollout % self.every_n_rollouts:
            return
        total = len(batch.rewards)
        chosen = choose_samples(
            batch.rewards.tolist(), batch.group_size, min(self.num_samples or total, total)
        )
        rows = [_row(batch, index) for index in chosen]
        self._recorder.append(rows, rollout=batch.rollout, step=module.trainer.global_step)
        pages = [
            _page(
                batch.rollouts[index // batch.group_size].prompt, row, float(batch.rewards[index])
            )
            for index, row in list(zip(chosen, rows, strict=True))[:16]
        ]
        log_markdown(module.trainer, names.SAMPLES, "\n\n---\n\n".join(pages), x=batch.rollout)


def choose_samples(rewards: Sequence[float], group_size: int, num: int) -> list[int]:
    """Rows of the ``num`` completions to keep, ascending.

    From each of ``ceil(num / 2)`` groups spread evenly over the batch come the best and the worst
    by reward, then the second best, and so on while more are wanted. Ties go to the earlier row.
    """
    num_groups = len(rewards) // group_size
    num_used = min(num_groups, -(-num // 2))
    groups = [position * num_groups // num_used for position in range(num_used)]
    by_group = []
    for group in groups:
        rows = range(group * group_size, (group + 1) * group_size)
        best_first = sorted(rows, key=lambda row: (-rewards[row], row))
        outside_in = []
        while best_first:
            outside_in.append(best_first.pop(0))
            if best_first:
                outside_in.append(best_first.pop())
        by_group.append(outside_in)
    ranked = [row for same_rank in zip(*by_group, strict=True) for row in same_rank]
    if len(ranked) < num:  # more than these groups hold
        ranked += [row for row in range(len(rewards)) if row not in set(ranked)]
    return sorted(ranked[:num])


def _row(batch: RolloutBatch, index: int) -> dict[str, Any]:
    group, sample = divmod(index, batch.group_size)
    completion = batch.rollouts[group].completions[sample]
    return {
        "prompt_id": batch.rollouts[group].prompt.id,
        "sample": sample,
        "text": completion.text,
        "num_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "components": {name: float(values[index]) for name, values in batch.components.items()},
        "advantage": float(batch.advantages[index]),
    }


def _page(prompt: Prompt, row: Mapping[str, Any], reward: float) -> str:
    """Markdown in which whatever was prompted or written is an indented block."""
    if prompt.text is not None:
        asked = prompt.text
    else:
        asked = "\n".join(f"{m['role']}: {m['content']}" for m in prompt.messages or ())
    scores = "".join(
        quoted(f"{name:24} " + ("abstains" if math.isnan(value) else f"{value:.3f}"))
        for name, value in row["components"].items()
    )
    return (
        f"**Prompt**{quoted(prompt.id)}{quoted(asked)}"
        f"**Completion {row['sample']}** ({row['num_tokens']} tokens, {row['finish_reason']})"
        f"{quoted(row['text'])}"
        f"**Reward {reward:.3f}, advantage {row['advantage']:+.3f}**{scores}"
    )
