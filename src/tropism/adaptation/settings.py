"""How settings of policies are refused: the setting, its value, and what to do."""

from __future__ import annotations


def require(holds: bool, policy: object, name: str, remedy: str) -> None:
    """Refuse a setting of ``policy`` unless ``holds``.

    Raises:
        ValueError: ``TopBudget.budget=1.5: give a share in (0, 1].``
    """
    if not holds:
        value = getattr(policy, name)
        raise ValueError(f"{type(policy).__name__}.{name}={value!r}: {remedy}.")
