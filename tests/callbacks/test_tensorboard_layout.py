"""The page of a run: no chart without a line, no line without a chart, once and for all resumes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.plugins.custom_scalar import layout_pb2

from tropism_callbacks import Checkpoint, RunRecord, UpdateNorms
from tropism_callbacks.tensorboard_layout import CATEGORIES, HELD_OUT, layout_of

EVERYTHING = """
trainer:
  callbacks+:
    - class_path: tropism_callbacks.UpdateNorms
    - class_path: tropism_callbacks.Alarms
    - class_path: tropism_callbacks.KLDrift
      init_args: {every_n_rollouts: 3, num_prompts: 2}
    - class_path: tropism_callbacks.Pressure
      init_args:
        {every_n_rollouts: 1, num_completions: 4, probes_per_reading: 2, should_measure_gain: true}
    - class_path: tropism_callbacks.AdaptiveLoRA
      init_args:
        policy:
          class_path: tropism.adaptation.placement.TopBudget
          init_args: {budget: 0.4, min_probes: 2, min_z: null, dwell: 1, hysteresis: 0.0}
    - class_path: tropism_callbacks.AdaptiveRewards
      init_args: {policy: {class_path: tropism.adaptation.rewards.Fixed}}
    - class_path: tropism_callbacks.AdaptiveRollouts
      init_args:
        policy: {class_path: tropism.adaptation.rollouts.CriticalGroups, init_args: {max_groups: 2}}
"""
REMOTE = """
from tropism.measurements import metrics as names
from tropism.rollouts.transformers_engine import TransformersEngine

OWN = (names.SYNC_SECONDS, names.SYNC_MEGABYTES, names.PREFIX_CACHE_HITS, names.QUEUE_SECONDS)


class Remote(TransformersEngine):
    max_sampler_gap = None

    def metrics(self):
        return dict.fromkeys(OWN, 1.0)
"""
MORE = ("--data.init_args.num_rollouts", "6", "--model.init_args.objective.beta", "0.01",
        "--model.init_args.objective.mismatch", "token_mask",
        "--model.init_args.rollouts_ahead", "1")  # fmt: skip


def layouts(events: Any) -> list[dict[str, dict[str, list[str]]]]:
    """Category -> title -> patterns, of each layout in a run's events."""
    read = []
    for event in events.Tensors("custom_scalars__config__"):
        layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
        read.append({c.title: {chart.title: patterns(chart) for chart in c.chart}
                     for c in layout.category})  # fmt: skip
    return read


def patterns(chart: Any) -> list[str]:
    """A margin chart's names are no expressions."""
    exact = [n for s in chart.margin.series for n in (s.value, s.lower, s.upper)]
    return [*chart.multiline.tag, *(f"^{re.escape(name)}$" for name in exact)]


def unmatched(layout: dict[str, dict[str, list[str]]], tags: list[str]) -> tuple[set, set]:
    """Patterns without a tag, and tags without a pattern, matched as TensorBoard's server does."""
    asked = [p for charts in layout.values() for chart in charts.values() for p in chart]
    tags = [tag for tag in tags if not tag.startswith("final/")]  # for the HParams tab
    return (
        {pattern for pattern in asked if not any(re.match(pattern, tag) for tag in tags)},
        {tag for tag in tags if not any(re.match(pattern, tag) for pattern in asked)},
    )


def test_every_chart_has_a_line_and_every_scalar_a_chart(tropism, tmp_path, events):
    config = tmp_path / "everything.yaml"
    config.write_text(EVERYTHING)
    (tmp_path / "remote_engine.py").write_text(REMOTE)
    engine = ("--model.init_args.engine", "remote_engine.Remote")
    run = tropism("--config", str(config), *MORE, *engine)
    logged = events(run)
    (layout,) = layouts(logged)
    assert unmatched(layout, logged.Tags()["scalars"]) == (set(), set())
    assert logged.Tags()["images"]
    titles = {
        category: {chart.title for chart in charts} for category, charts in CATEGORIES.items()
    }
    titles["Held-out prompts"].add("skills: pass, 95 % interval")
    assert {category: set(charts) for category, charts in layout.items()} == titles
    shown_twice = {
        tag
        for tag in logged.Tags()["scalars"]
        if sum(
            any(re.match(pattern, tag) for pattern in chart)
            for category in layout.values()
            for chart in category.values()
        )
        > 1
    }
    assert shown_twice == {"eval/skills/pass"}
    assert layout["Held-out prompts"]["skills: pass, 95 % interval"] == [
        "^eval/skills/pass$",
        "^eval/skills/pass_low$",
        "^eval/skills/pass_high$",
    ]


def test_a_run_without_the_loop_has_no_charts_of_it(tropism, events):
    logged = events(tropism("--data.init_args.num_rollouts", "2"))
    (layout,) = layouts(logged)
    assert list(layout) == ["Held-out prompts", "Rollouts", "Objective", "System"]
    assert unmatched(layout, logged.Tags()["scalars"]) == (set(), set())


def test_sft_without_held_out_prompts(tropism_sft, events):
    none = ("--trainer.limit_val_batches", "0")
    logged = events(tropism_sft("--data.init_args.num_rollouts", "2", *none))
    (layout,) = layouts(logged)
    assert list(layout) == ["Rollouts", "Objective", "System"]
    without_a_line, _ = unmatched(layout, logged.Tags()["scalars"])
    # Traces come in no groups, and nobody samples them.
    assert without_a_line == {"^reward/group_std$", "^system/tokens_per_second$"}


def test_a_resumed_run_keeps_its_layout(
    make_run: Callable[..., Any], stand_in: type, events: Callable[[Path], Any]
) -> None:
    stopped = make_run(RunRecord(), Checkpoint(every_n_rollouts=1), module=stand_in(fail_at=2))
    with pytest.raises(RuntimeError, match="the reward of row 3"):
        stopped.fit()
    last = stopped.folder / "checkpoints" / "last.ckpt"
    make_run(RunRecord(), Checkpoint(every_n_rollouts=1)).fit(last)
    (layout,) = layouts(events(stopped.folder))
    # With a callback that was not there before there is more to show; TensorBoard takes the last.
    make_run(RunRecord(), UpdateNorms(), Checkpoint(every_n_rollouts=1)).fit(last)
    before, after = layouts(events(stopped.folder))
    assert before == layout
    assert set(after["Objective"]) - set(before["Objective"]) == {"Share of the update realised"}


def test_runs_of_other_rewards_share_their_charts():
    """TensorBoard merges layouts by category and leaves out equal charts."""
    one, other = (layout_of({HELD_OUT}, [task]) for task in ("skills", "structured"))
    differing = {
        title for category in one for title in one[category].keys() ^ other[category].keys()
    }
    assert differing == {"skills: pass, 95 % interval", "structured: pass, 95 % interval"}
    assert all(one[c][t] == other[c][t] for c in one for t in one[c].keys() & other[c].keys())


def test_another_logger_gets_no_layout(tropism):
    run = tropism("--data.init_args.num_rollouts", "1", "--trainer.logger", "CSVLogger",
                  "--trainer.logger.init_args.save_dir", "runs")  # fmt: skip
    assert (run / "metrics.csv").exists()
    assert not list(run.glob("events.out.tfevents.*"))
