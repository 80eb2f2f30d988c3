"""What causal tracing found, from its records: effects by role of the token, and averages.

Loads no torch, so that figures are drawn anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd

Kind = Literal["state", "mlp", "attention"]
KINDS: tuple[Kind, ...] = ("state", "mlp", "attention")
ROLES = (
    "first subject",
    "middle subject",
    "last subject",
    "first subsequent",
    "further",
    "last",
)
"""What a traced token is, in the order of the prompt."""


def effects(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The effects on each known fact, averaged over its tokens of the same role.

    Args:
        rows: Of the ``causal_tracing`` table: ``roles`` [T], and for each kind [L][T].

    Returns:
        Columns fact (place among ``rows``), kind, role, layer, effect; kinds and roles sort in
        their own order.
    """
    found = []
    for fact, row in enumerate(rows):
        if not row["is_known"]:
            continue
        roles = np.array(row["roles"])
        for kind in KINDS:
            values = np.array(row[kind])  # (L, T)
            for role in dict.fromkeys(row["roles"]):
                for layer, effect in enumerate(values[:, roles == role].mean(axis=1)):
                    found.append((fact, kind, role, layer, float(effect)))
    table = pd.DataFrame(found, columns=["fact", "kind", "role", "layer", "effect"])
    return table.astype({"kind": pd.CategoricalDtype(KINDS, ordered=True),
                         "role": pd.CategoricalDtype(ROLES, ordered=True)})  # fmt: skip


def averages(table: pd.DataFrame) -> pd.DataFrame:
    """The average indirect effect over the facts that have a token of the role.

    Args:
        table: As ``effects`` gives it.

    Returns:
        Columns kind, role, layer, effect, num_facts; kinds and roles in their own order.
    """
    by_place = table.groupby(["kind", "role", "layer"], observed=True)["effect"]
    mean = by_place.agg(["mean", "count"]).reset_index()
    return mean.rename(columns={"mean": "effect", "count": "num_facts"})


def strongest_layers(means: pd.DataFrame, *, kind: str, role: str, k: int) -> dict[int, float]:
    """The k layers with the largest average effect, and that effect, in the order of the model.

    Raises:
        ValueError: No fact has a token of that role, or the model has fewer layers.
    """
    own = means[(means["kind"] == kind) & (means["role"] == role)]
    if own.empty:
        raise ValueError(f"plan.role={role!r}: no known fact has such a token; take another.")
    if k > len(own):
        raise ValueError(f"plan.k={k}: the model has {len(own)} layers; give at most that.")
    best = own.nlargest(k, "effect").sort_values("layer")
    return dict(zip(best["layer"].astype(int), best["effect"].astype(float), strict=True))
