"""RolloutSamples: which completions are kept, and that none can break the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tropism.measurements import records
from tropism_callbacks import RolloutSamples
from tropism_callbacks.rollout_samples import choose_samples
from tropism_callbacks.tensorboard import quoted


def test_choice_by_hand() -> None:
    rewards = [0.1, 0.9, 0.5, 0.2, 0.3, 0.4, 0.7, 0.7, 0.6, 0.0, 1.0, 1.0]  # 4 groups of 3
    assert choose_samples(rewards, 3, 2) == [0, 1]  # best and worst of one group
    assert choose_samples(rewards, 3, 4) == [0, 1, 6, 8]  # of groups 0 and 2
    assert choose_samples(rewards, 3, 1) == [1]
    assert choose_samples(rewards, 3, 12) == list(range(12))
    assert choose_samples([0.5, 0.5], 2, 2) == [0, 1]


@pytest.mark.parametrize("num", range(1, 13))
def test_choice_has_no_duplicates(num: int) -> None:
    chosen = choose_samples([0.5] * 12, 4, num)
    assert len(set(chosen)) == num


@pytest.mark.parametrize("setting", ["every_n_rollouts", "num_samples"])
def test_bad_settings_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"RolloutSamples\.{setting}=0"):
        RolloutSamples(**{setting: 0})


def test_rows(make_run: Callable[..., Any]) -> None:
    run = make_run(RolloutSamples(every_n_rollouts=2, num_samples=2)).fit()
    rows = records.read(run.folder, "completions")
    assert rows["rollout"].tolist() == [0, 0, 2, 2]
    assert rows["prompt_id"].tolist() == ["train/0", "train/0", "train/4", "train/4"]
    assert rows["sample"].tolist() == [0, 1, 0, 1]
    assert rows["text"].tolist() == ["answer 0", "answer 1"] * 2
    assert rows["advantage"].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert rows["num_tokens"].tolist() == [9] * 4
    assert rows["components"].tolist()[:2] == [
        {"right": 1.0, "short": 0.5},
        {"right": 0.0, "short": None},  # abstained
    ]


def test_all_completions(make_run: Callable[..., Any]) -> None:
    run = make_run(RolloutSamples(every_n_rollouts=3, num_samples=None)).fit()
    rows = records.read(run.folder, "completions")
    assert rows.groupby("rollout").size().to_dict() == {0: 4, 3: 4}


HOSTILE = [
    "```\n<script>alert(1)</script>\n```",
    "</pre></code><b>bold</b>",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "# heading\n\n\n* item\n\n<div>\n\nnot code</div>",
    "[link](javascript:alert(1)) ![image](http://example.com/x.png)",
    "one\x0b# two\u2028# three\r\n# four\x85# five",
    "\n\n   # after blank lines",
    "\tindented\n===\n---",
    "[1]: http://example.com\n*[HTML]: abbreviation",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_model_output_cannot_break_the_page(text: str) -> None:
    plugin_util = pytest.importorskip("tensorboard.plugin_util")
    page = plugin_util.markdown_to_safe_html(f"**Completion**{quoted(text)}**Reward**")
    for tag in ("<b>", "<script", "<h1>", "<h2>", "<table", "<li>", "<div", "<a ", "<img", "<hr"):
        assert tag not in page
    assert page.count("<code>") == page.count("</code>") == 1
    assert page.rstrip().endswith("<p><strong>Reward</strong></p>")


def test_empty_output_is_shown_as_such() -> None:
    assert "*(empty)*" in quoted("")
    assert "*(empty)*" in quoted(" \n")


def test_text_in_tensorboard(make_run: Callable[..., Any], events: Callable[[Path], Any]) -> None:
    run = make_run(RolloutSamples(every_n_rollouts=2, num_samples=2)).fit()
    read = events(run.folder).Tensors("rollouts/samples/text_summary")
    assert [event.step for event in read] == [0, 2]
    text = read[0].tensor_proto.string_val[0].decode()
    assert "    0 + 0 =" in text
    assert "    answer 0" in text
    assert "**Reward 1.000, advantage +0.500**" in text
    assert "abstains" in text
