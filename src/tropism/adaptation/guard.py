"""Whether what follows a switch looks like a spike: the reason to take the switch back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tropism.adaptation.settings import require

ENTROPY_ROLLOUTS = 8

Watched = Mapping[str, float | None]


@dataclass(frozen=True)
class Guard:
    """Limits on the rollouts after a switch.

    Args:
        rollouts: Rollouts that a switch is watched for.
        max_kl: Largest KL(before || after) of one rollout's update, in nats per token.
        entropy_drop: Largest fall of the entropy below its mean before the switch, as a share; of
            its mean over the last ``ENTROPY_ROLLOUTS``, as many as came before, for prompts alone
            move it: a mean over 4 falls by half in one of ten watches without any switch. A watch
            of fewer rollouts does not judge it.
        grad_norm_ratio: Largest gradient norm, in units of the mean before the switch.
    """

    rollouts: int = 20
    max_kl: float = 0.2
    entropy_drop: float = 0.5
    grad_norm_ratio: float = 10.0

    def __post_init__(self) -> None:
        require(self.rollouts >= 1, self, "rollouts", "give 1 or more")
        require(self.max_kl > 0, self, "max_kl", "give a value above 0")
        require(0 < self.entropy_drop <= 1, self, "entropy_drop", "give a share in (0, 1]")
        require(self.grad_norm_ratio > 1, self, "grad_norm_ratio", "give a value above 1")

    def check(
        self, history_before: Sequence[Watched], since_switch: Sequence[Watched]
    ) -> str | None:
        """The reason to roll back, or None. What is undefined (None) is left out.

        Args:
            history_before: ``kl``, ``entropy`` and ``grad_norm`` of the last rollouts before.
            since_switch: The same since, oldest first; the last one is judged.
        """
        if not since_switch:
            return None
        now, rollout = since_switch[-1], f"{len(since_switch)} rollouts after the switch"
        kl, norm = now.get("kl"), now.get("grad_norm")
        recent = since_switch[-ENTROPY_ROLLOUTS:]
        entropy = _mean(recent, "entropy") if len(recent) == ENTROPY_ROLLOUTS else None
        if kl is not None and kl > self.max_kl:
            return f"an update moved the policy by KL {kl:.3g} > {self.max_kl:g}, {rollout}"
        mean_entropy = _mean(history_before, "entropy")
        if entropy is not None and mean_entropy is not None and mean_entropy > 0:
            drop = 1 - entropy / mean_entropy
            if drop > self.entropy_drop:
                return (
                    f"entropy fell from {mean_entropy:.3g} to {entropy:.3g}, by "
                    f"{drop:.0%} > {self.entropy_drop:.0%}, {rollout}"
                )
        mean_norm = _mean(history_before, "grad_norm")
        if norm is not None and mean_norm is not None and mean_norm > 0:
            ratio = norm / mean_norm
            if ratio > self.grad_norm_ratio:
                return (
                    f"the gradient norm rose from {mean_norm:.3g} to {norm:.3g}, "
                    f"{ratio:.1f} > {self.grad_norm_ratio:g} times, {rollout}"
                )
        return None


def _mean(history: Sequence[Watched], name: str) -> float | None:
    values = [value for watched in history if (value := watched.get(name)) is not None]
    return sum(values) / len(values) if values else None
