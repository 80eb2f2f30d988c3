"""Each alarm rings on readings written for it, at the rollout where it should, and not before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tropism.measurements.alarms import (
    Alarm,
    AllGroupsZeroVariance,
    EntropyCollapse,
    ExplodingGradientNorm,
    Finding,
    FormatPaidWhileAccuracyFalls,
    LengthToTheLimit,
    Reading,
    TagSpam,
    most_frequent_tag,
)

CALM = Reading(
    rollout=0,
    tag_repeats=(1, 1, 0, 1),
    clipped_ratio=0.0,
    grad_norm=0.2,
    entropy=0.4,
    zero_variance=0.25,
    components={"format": 0.8, "accuracy": 0.5},
)


def run(name: str, values: Sequence[Any]) -> list[Reading]:
    """Calm readings but for one of their values."""
    return [replace(CALM, rollout=i, **{name: value}) for i, value in enumerate(values)]


def scores(form: Sequence[float], right: Sequence[float]) -> list[Reading]:
    pairs = zip(form, right, strict=True)
    return run("components", [{"format": f, "accuracy": a} for f, a in pairs])


def said(alarm: Alarm, readings: Sequence[Reading]) -> list[Finding]:
    """What it says after each rollout, whether or not it is given more than it looks at."""
    findings = []
    for i in range(1, len(readings) + 1):
        start, recent = readings[: min(i, 5)], readings[:i]
        findings.append(alarm.judge(start, recent))
        assert alarm.judge(start, recent[-alarm.num_readings :]) == findings[-1]
    return findings


def rings(alarm: Alarm, readings: Sequence[Reading]) -> list[int]:
    return [i for i, finding in enumerate(said(alarm, readings)) if finding.is_on]


ALL = (
    TagSpam(),
    LengthToTheLimit(),
    ExplodingGradientNorm(),
    EntropyCollapse(),
    FormatPaidWhileAccuracyFalls(),
    AllGroupsZeroVariance(),
)


@pytest.mark.parametrize("alarm", ALL, ids=lambda alarm: alarm.name)
def test_silent_while_all_is_calm(alarm: Alarm) -> None:
    assert rings(alarm, run("grad_norm", [0.2, 0.3, 0.25] * 40)) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("1 < 2 and 3 > 2, a<b>c", 1),
        ("<think>\nso\n</think>\n<answer>\n4\n</answer>", 1),
        ("<answer></answer>" * 3 + "<think>", 3),
        ("<br/> <br /> <br/>", 2),
        ("</answer>" * 40, 40),
    ],
)
def test_tags_are_counted_one_by_one(text: str, count: int) -> None:
    assert most_frequent_tag(text) == count


def test_tag_spam() -> None:
    # A quarter of the completions, twice in a row: from the second of them until it is over.
    spam, legal = (1, 10, 0, 1), (1, 9, 9, 9)
    readings = run("tag_repeats", [legal, spam, legal, spam, spam, (12, 12, 12, 12), legal])
    assert rings(TagSpam(), readings) == [4, 5]
    finding = said(TagSpam(), readings)[5]
    assert (finding.value, finding.threshold) == (1.0, 0.25)
    assert finding.message.startswith("100% of the completions repeat one tag 10 times or more.")


def test_length_to_the_limit_is_a_rise() -> None:
    shares = [0.0] * 5 + [0.25, 0.6, 0.7, 0.8, 0.4]
    assert rings(LengthToTheLimit(), run("clipped_ratio", shares)) == [8]
    # A model that never ended its answers has not become worse, unless it did.
    assert rings(LengthToTheLimit(), run("clipped_ratio", [0.8] * 20)) == []
    shares = [0.5] * 5 + [0.7] * 3 + [0.8] * 3
    assert rings(LengthToTheLimit(), run("clipped_ratio", shares)) == [10]
    assert said(LengthToTheLimit(), run("clipped_ratio", shares))[10].threshold == 0.75


def test_exploding_gradient_norm_is_told_from_the_running_median() -> None:
    norms = [0.2] * 10 + [1.1, 1.2, 0.3, 1.1, 1.2, 9.0, 9.0]
    alarm = ExplodingGradientNorm()
    assert rings(alarm, run("grad_norm", norms)) == [15, 16]
    finding = said(alarm, run("grad_norm", norms))[15]
    assert (finding.value, finding.threshold) == (9.0, 1.0)  # 5 x 0.2
    # One spike among them, and rollouts without an optimizer step, move no median.
    norms = [0.2, 5.0] + [0.2, None] * 8 + [1.1, None, 1.2, 1.3]
    assert rings(alarm, run("grad_norm", norms)) == [21]
    # Too little to know what is usual.
    assert rings(alarm, run("grad_norm", [0.2] * 9 + [9.0] * 3)) == []


def test_entropy_collapse_is_low_and_fallen() -> None:
    entropies = [0.4] * 5 + [0.01, 0.01, 0.01, 0.3]
    assert rings(EntropyCollapse(), run("entropy", entropies)) == [7]
    assert said(EntropyCollapse(), run("entropy", entropies))[7].threshold == 0.02
    # Fallen, but not low; low, but so from the start: 20 % of 0.04 is 0.008.
    assert rings(EntropyCollapse(), run("entropy", [4.0] * 5 + [0.3] * 9)) == []
    assert rings(EntropyCollapse(), run("entropy", [0.04] * 5 + [0.01] * 9)) == []
    assert rings(EntropyCollapse(), run("entropy", [None] * 5 + [0.001] * 9)) == []


def test_format_paid_while_accuracy_falls() -> None:
    noise = [0.02, -0.02] * 5
    high, low = [0.5 + n for n in noise], [0.3 + n for n in noise]
    alarm = FormatPaidWhileAccuracyFalls()
    readings = scores([0.8] * 10 + [0.85] * 10, high + low)
    assert rings(alarm, readings)[-1] == 19
    finding = said(alarm, readings)[-1]
    assert finding.value == pytest.approx(0.2)
    assert "accuracy fell from 0.50 to 0.30 while format went from 0.80 to 0.85" in finding.message
    # Form falls as well; accuracy rises; it falls by less; it is that noisy anyway.
    assert rings(alarm, scores([0.8] * 10 + [0.7] * 10, high + low)) == []
    assert rings(alarm, scores([0.8] * 20, low + high)) == []
    assert rings(alarm, scores([0.8] * 20, high + [value + 0.12 for value in low])) == []
    assert rings(alarm, scores([0.8] * 20, [0.9, 0.1] * 5 + [0.7, 0.0] * 5)) == []
    # Where form pays nearly always there is no more to rise to.
    assert rings(alarm, scores([0.97] * 10 + [0.93] * 10, high + low)) != []
    # Seen within look_back only: a slow fall has been going on for longer than that.
    assert rings(replace(alarm, look_back=20), readings) != []
    assert rings(replace(alarm, look_back=20), scores([0.8] * 30, high + noise_of(0.4) + low)) == []
    assert rings(alarm, scores([0.8] * 30, high + noise_of(0.4) + low)) != []


def noise_of(mean: float) -> list[float]:
    return [mean + n for n in [0.1, -0.1] * 5]


def test_a_component_that_abstains_or_is_not_there_says_nothing() -> None:
    alarm = FormatPaidWhileAccuracyFalls(goal="right")
    assert said(alarm, scores([0.8] * 30, [0.5] * 30))[-1] == Finding()
    nothing = run("components", [{"format": 0.8, "accuracy": None}] * 30)
    assert said(FormatPaidWhileAccuracyFalls(), nothing)[-1] == Finding()


def test_all_groups_zero_variance() -> None:
    shares = [1.0] * 4 + [0.75] + [1.0] * 6 + [0.0]
    alarm = AllGroupsZeroVariance()
    assert rings(alarm, run("zero_variance", shares)) == [9, 10]
    assert [f.value for f in said(alarm, run("zero_variance", shares))][3:6] == [4, 0, 1]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (TagSpam, {"repeats": 1}, r"alarms\.tag_spam\.repeats=1: give at least 2"),
        (ExplodingGradientNorm, {"window": 5}, r"norm\.window=5: give at least 10"),
        (EntropyCollapse, {"in_a_row": 0}, r"collapse\.in_a_row=0: give at least 1"),
        (LengthToTheLimit, {"rise": float("nan")}, r"limit\.rise=nan: give at least 0"),
        (FormatPaidWhileAccuracyFalls, {"paid": "accuracy"}, "name two components"),
        (FormatPaidWhileAccuracyFalls, {"look_back": 12}, "look_back=12: give at least 20"),
    ],
)
def test_bad_thresholds_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)
