"""What one plan changes of another."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tropism.lora.plan import Plan


@dataclass(frozen=True)
class PlanChange:
    """What a plan changed.

    Args:
        entered: Keys of the linears that train now and did not.
        left: Keys of those that trained and do not.
        states: Keys of all whose state changed.
        ranks: Keys of those that train before and after, at another rank.
        lr_scales: Keys of all whose factor on the learning rate changed.
        restarted: Keys of those that train on, their moments forgotten.
        jaccard: |both train| / |either trains|; 1 where none trains in either.
    """

    entered: tuple[str, ...]
    left: tuple[str, ...]
    states: tuple[str, ...]
    ranks: tuple[str, ...]
    lr_scales: tuple[str, ...]
    restarted: tuple[str, ...]
    jaccard: float

    def __bool__(self) -> bool:
        """Whether anything changed."""
        return bool(self.states or self.ranks or self.lr_scales or self.restarted)


def compare(before: Plan, after: Plan, *, reset: Collection[str] = ()) -> PlanChange:
    """Compare two plans of the same linears; ``reset`` are keys that are to restart anyway.

    Raises:
        ValueError: ``reset`` names a linear that does not train after.
    """
    pairs = list(zip(before, after, strict=True))
    old, new = ({e.key for e in plan if e.state == "TRAIN"} for plan in (before, after))
    if unknown := sorted(set(reset) - new):
        raise ValueError(f"reset={unknown}: nothing trains there in this plan; leave them out.")
    return PlanChange(
        entered=tuple(n.key for _, n in pairs if n.key in new - old),
        left=tuple(n.key for _, n in pairs if n.key in old - new),
        states=tuple(n.key for o, n in pairs if o.state != n.state),
        ranks=tuple(n.key for o, n in pairs if n.key in old & new and o.rank != n.rank),
        lr_scales=tuple(n.key for o, n in pairs if o.lr_scale != n.lr_scale),
        restarted=tuple(n.key for _, n in pairs if n.key in old & new and n.key in reset),
        jaccard=len(old & new) / len(old | new) if old | new else 1.0,
    )
