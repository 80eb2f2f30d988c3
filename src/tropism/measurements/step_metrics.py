"""The numbers of one step: columns of the ``steps`` table, and extras for TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass, field

from tropism.measurements import metrics as names
from tropism.types import RolloutBatch


@dataclass
class Sums:
    """Sums over completion tokens, but for one maximum; means are taken last."""

    loss: float = 0.0
    tokens: int = 0
    entropy: float = 0.0
    kl: float = 0.0
    sampler_gap: float = 0.0
    sampler_gap_max: float = 0.0
    clipped_low: int = 0
    clipped_high: int = 0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    corrected: int = 0

    def mean(self, name: str) -> float:
        """Per completion token."""
        return float(getattr(self, name)) / max(self.tokens, 1)

    def effective_share(self) -> float:
        """(sum r)^2 / (N sum r^2) of the N ratios trainer / sampler: Kish's effective sample size.

        1 where they are all equal, 1 / N where one outweighs all others.
        """
        return self.ratio**2 / (max(self.tokens, 1) * max(self.ratio_squared, 1e-30))


@dataclass
class Update:
    """What one rollout batch did to the policy."""

    learning_rate: float
    num_updates: int = 0
    grad_norm: float | None = None
    first: Sums = field(default_factory=Sums)
    last: Sums = field(default_factory=Sums)


def step_metrics(
    batch: RolloutBatch,
    update: Update,
    *,
    has_reference: bool,
    trainable_params: int,
    corrects_mismatch: bool = False,
) -> dict[str, float | None]:
    """What ``StepObserver.after_update`` is given; names with a slash are for TensorBoard alone.

    Token means are over the completions that were trained on, in the first pass (before any step
    on this rollout), except for the loss and the clip ratios, which are the last pass's.
    ``reward_std`` is within groups, ``reward/batch_std`` over the whole rollout batch.
    """
    completions = batch.completions
    lengths = [len(completion.token_ids) for completion in completions]
    num_cut = sum(completion.finish_reason == "length" for completion in completions)
    first, last = update.first, update.last
    took_a_step = update.num_updates > 0
    corrected = took_a_step and corrects_mismatch
    return {
        "tokens": sum(lengths),
        "loss": last.loss if took_a_step else None,
        "reward": float(batch.rewards.mean()),
        "reward_std": _mean_group_std(batch),
        "frac_reward_zero_std": float(batch.zero_variance.float().mean()),
        "kl": first.mean("kl") if has_reference else None,
        "entropy": first.mean("entropy") if took_a_step else None,
        "grad_norm": update.grad_norm,
        "lr": update.learning_rate,
        "completion_length": sum(lengths) / len(lengths),
        "clipped_ratio": num_cut / len(lengths),
        "sampler_gap": first.mean("sampler_gap") if took_a_step else None,
        "trainable_params": trainable_params,
        "num_updates": update.num_updates,
        names.COMPLETION_LENGTH_MAX: max(lengths),
        names.SAMPLER_GAP_MAX: first.sampler_gap_max if took_a_step else None,
        names.MISMATCH_EFFECTIVE: first.effective_share() if corrected else None,
        names.MISMATCH_CORRECTED: first.mean("corrected") if corrected else None,
        "clip_ratio/low_mean": last.mean("clipped_low") if took_a_step else None,
        "clip_ratio/high_mean": last.mean("clipped_high") if took_a_step else None,
        "reward/batch_std": float(batch.rewards.std()) if len(batch.rewards) > 1 else None,
    }


def _mean_group_std(batch: RolloutBatch) -> float | None:
    if batch.group_size == 1:
        return None
    return float(batch.rewards.view(-1, batch.group_size).std(dim=1).mean())
