"""Progress: the ETA's arithmetic, plain lines, and the redrawn line of a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from tropism_callbacks import Progress
from tropism_callbacks.progress import pass_share
from tropism_callbacks.progress_display import ProgressDisplay, clock, eta_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (80, "1:20"), (59.6, "1:00"), (3723, "1:02:03"), (None, "-:--")],
)
def test_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


def test_eta_by_hand() -> None:
    assert eta_seconds([], remaining=3) is None
    # first rollout, a quarter sampled after 10 s: 40 s each, 3 of them, 10 s gone
    assert eta_seconds([], remaining=3, elapsed=10, fraction=0.25) == 110
    # 20 s each: two whole ones and the rest of this one
    assert eta_seconds([10, 30], remaining=3, elapsed=5) == 55
    assert eta_seconds([10, 30], remaining=3, elapsed=50) == 40  # slower than usual
    assert eta_seconds([10, 30], remaining=0) == 0


def test_pass_share_leaves_out_abstentions(stand_in: type, make_batch: Callable[..., Any]) -> None:
    batch = make_batch(2)
    assert pass_share(stand_in(), batch) == 0.75
    batch.components["right"][0] = float("nan")
    assert pass_share(stand_in(), batch) == 1.0
    batch.components["right"][:] = float("nan")
    assert pass_share(stand_in(), batch) is None


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Progress\.window=0"):
        Progress(window=0)


def test_plain_lines_without_a_terminal(
    make_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(Progress()).fit()
    lines = capsys.readouterr().out.splitlines()
    assert all(re.search(r" (in|eta) \d:\d\d$", line) for line in lines)
    assert [line.rsplit(" ", 1)[0] for line in lines] == [
        "evaluation pass 0.17 of 6 in",
        "rollout 1/4 reward 0.50 pass 0.50 kl 0.004 6 tok/s eta",
        "rollout 2/4 reward 0.50 pass 0.50 kl 0.004 6 tok/s eta",
        "rollout 3/4 reward 0.75 pass 0.75 kl 0.004 6 tok/s eta",
        "rollout 4/4 reward 0.38 pass 0.38 kl 0.004 6 tok/s eta",
        "evaluation pass 0.83 of 6 in",
    ]


def test_redrawn_line_shows_phases_completions_reward_and_eta(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, str, float]] = []

    def update(
        self: ProgressDisplay, title: str, info: str, *, completed: float, total: float
    ) -> None:
        shown.append((title, info, completed))

    monkeypatch.setattr(ProgressDisplay, "update", update)
    make_run(Progress()).fit()
    third = [info for title, info, _ in shown if title == "rollout 3/4"]
    assert third[0].startswith("generating · reward 0.50 (mean 0.50) · 6 tok/s · eta 0:")
    assert third[2].startswith("generating 1/4 completions · ")
    assert third[5].startswith("scoring · ")
    assert third[6].startswith("training · ")
    evaluating = [(info, completed) for title, info, completed in shown if title == "evaluating"]
    assert evaluating[0] == ("eta -:--", 0.0)
    assert evaluating[2][0].startswith("pass 0.17 of 6 eta 0:")
    assert evaluating[2][1] == 2.0


def test_display_on_a_terminal() -> None:
    output = io.StringIO()
    display = ProgressDisplay(Console(file=output, force_terminal=True, width=100))
    display.update("rollout 1/4", "generating 1/4 [bold]", completed=0.1, total=4)
    display.line("a plain line")
    display.stop()
    text = output.getvalue()
    assert "rollout 1/4" in text
    assert "generating 1/4 [bold]" in text  # markup is shown, not obeyed
    assert "a plain line" not in text


def test_a_disabled_display_is_silent() -> None:
    output = io.StringIO()
    display = ProgressDisplay(Console(file=output, force_terminal=True), enabled=False)
    display.update("rollout 1/4", "x", completed=0.1, total=4)
    display.line("y")
    display.stop()
    plain = ProgressDisplay(Console(file=output), enabled=False)
    plain.line("z")
    assert output.getvalue() == ""


def test_evaluation_alone(make_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(Progress())
    run.trainer.validate(run.module, datamodule=run.data)
    assert capsys.readouterr().out.startswith("evaluation pass 0.17 of 6 in 0:")


def test_state_round_trip() -> None:
    progress = Progress(window=2)
    progress.load_state_dict(
        {"rewards": [0.1, 0.2, 0.3], "durations": [1.0, 2.0], "evaluation_seconds": 5.0}
    )
    other = Progress(window=2)
    other.load_state_dict(progress.state_dict())
    assert other.state_dict() == {
        "rewards": [0.2, 0.3],
        "durations": [1.0, 2.0],
        "evaluation_seconds": 5.0,
    }
