"""A run whose engine is elsewhere, and away: it stops where it is, and goes on from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tropism.measurements.records import read
from tropism.rollouts.engine import EngineUnreachableError
from tropism.rollouts.transformers_engine import TransformersEngine


def weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(
        run / "checkpoints" / "last.ckpt", weights_only=True
    )["state_dict"]
    return found


@pytest.mark.parametrize("interval", ["1.0", "2"])
def test_stopped_twice_and_resumed_a_run_equals_an_uninterrupted_one(
    tropism: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, interval: str
) -> None:
    generate = TransformersEngine.generate
    away: set[int] = set()

    def maybe(self: TransformersEngine, *args: Any, **options: Any) -> Any:
        if options["rollout"] in away and not options.get("greedy"):
            away.remove(options["rollout"])
            raise EngineUnreachableError("the server has been away for 300 s")
        return generate(self, *args, **options)

    monkeypatch.setattr(TransformersEngine, "generate", maybe)
    shared = ["--trainer.val_check_interval", interval, "--data.init_args.num_rollouts", "5"]
    whole = tropism(*shared)
    for rollout in (2, 3):
        away.add(rollout)
    resumed, given = [], list(shared)
    for rollout in (2, 3):
        with pytest.raises(EngineUnreachableError):
            tropism(*given)
        (last,) = whole.parent.glob("version_1/checkpoints/last.ckpt")
        assert last.with_name(f"rollout={rollout:06d}.ckpt").samefile(last)
        given = [*shared, "--ckpt_path", str(last)]
    resumed = tropism(*given)
    assert resumed.name == "version_1"
    for table in ("steps", "evals", "rewards"):
        rows, again = read(whole, table), read(resumed, table)
        same = [name for name in rows.columns if not name.startswith("seconds_")]
        assert again[same].equals(rows[same]), table
    expected, found = weights(whole), weights(resumed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
