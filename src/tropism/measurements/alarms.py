"""Alarms: what goes wrong in reinforcement learning of language models, told from a few numbers.

Each alarm is a rule over the *readings* of the last rollouts (and the first ones, to compare with);
it keeps nothing itself, and says what was seen and what to change. The thresholds are settings.

Source: the instabilities of "Scalpel vs Hammer", 2507.10616: at too high a learning rate the model
writes tag after tag up to the completion limit, gradient norms explode, and the reward for format
goes on paying for wrong answers. Where no group's rewards differ nothing is learnt at all, and
where the entropy is gone soon none will.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import ClassVar

from tropism.measurements.component_statistics import component_statistics
from tropism.types import RolloutBatch

NUM_START = 5
"""Rollouts at the start of a run that later ones are compared with."""
HIGH = 0.9
"""A component whose mean is at least this pays nearly always: it has nowhere to rise to."""
TAG = re.compile(r"</?[A-Za-z][\w.:-]*\s*/?>")


@dataclass(frozen=True)
class Reading:
    """One rollout, as alarms see it; None is what was not measured.

    Args:
        rollout: Its index.
        tag_repeats: How often each completion writes its most frequent tag.
        clipped_ratio: Share of completions cut at the token limit.
        grad_norm: Before clipping.
        entropy: Nats per token.
        zero_variance: Share of groups whose rewards are all equal.
        components: Mean of each reward component.
    """

    rollout: int
    tag_repeats: Sequence[int]
    clipped_ratio: float | None
    grad_norm: float | None
    entropy: float | None
    zero_variance: float | None
    components: Mapping[str, float | None]


@dataclass(frozen=True)
class Finding:
    """What an alarm says of the run as it is now.

    Args:
        is_on: Whether it rings.
        value: What was seen; None where there is too little to judge by yet.
        threshold: What the value is compared with; None as above.
        message: A sentence with what was seen and what to change, where it rings.
    """

    is_on: bool = False
    value: float | None = None
    threshold: float | None = None
    message: str = ""


def most_frequent_tag(text: str) -> int:
    """How often the most frequent tag of ``text`` stands in it; ``<a>`` and ``</a>`` are two."""
    return max(Counter(TAG.findall(text)).values(), default=0)


def take_reading(batch: RolloutBatch, metrics: Mapping[str, float | None]) -> Reading:
    """The reading of a rollout batch and its columns of the ``steps`` table."""
    return Reading(
        rollout=batch.rollout,
        tag_repeats=[most_frequent_tag(completion.text) for completion in batch.completions],
        clipped_ratio=metrics["clipped_ratio"],
        grad_norm=metrics["grad_norm"],
        entropy=metrics["entropy"],
        zero_variance=metrics["frac_reward_zero_std"],
        components={
            name: component_statistics(scores, batch.group_size)["mean"]
            for name, scores in batch.components.items()
        },
    )


@dataclass(frozen=True)
class Alarm(ABC):
    """A rule with thresholds."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def num_readings(self) -> int:
        """How many of the last readings it looks at, at most."""

    @abstractmethod
    def judge(self, start: Sequence[Reading], recent: Sequence[Reading]) -> Finding:
        """Whether it rings after the last of ``recent``.

        Args:
            start: The first ``NUM_START`` readings of the run, or those that there are.
            recent: The last ``num_readings`` or more, or those that there are; oldest first.
        """

    def _finding(self, is_on: bool, value: float, threshold: float, message: str) -> Finding:
        return Finding(is_on, value, threshold, message if is_on else "")

    def _check(self, **at_least: float) -> None:
        for setting, least in at_least.items():
            value = getattr(self, setting)
            if not value >= least:
                raise ValueError(f"alarms.{self.name}.{setting}={value}: give at least {least:g}.")


@dataclass(frozen=True)
class TagSpam(Alarm):
    """Completions write the same tag over and over.

    Args:
        repeats: From so many of one tag on, a completion is spam.
        share: Of the completions of a rollout.
        in_a_row: Rollouts.
    """

    name: ClassVar[str] = "tag_spam"
    repeats: int = 10
    share: float = 0.25
    in_a_row: int = 2

    def __post_init__(self) -> None:
        self._check(repeats=2, share=0, in_a_row=1)

    @property
    def num_readings(self) -> int:
        return self.in_a_row

    def judge(self, start: Sequence[Reading], recent: Sequence[Reading]) -> Finding:
        shares = [self._share(reading) for reading in recent[-self.in_a_row :]]
        if not shares:
            return Finding(threshold=self.share)
        is_on = len(shares) == self.in_a_row and all(share >= self.share for share in shares)
        return self._finding(
            is_on,
            shares[-1],
            self.share,
            f"{shares[-1]:.0%} of the completions repeat one tag {self.repeats} times or more. "
            "Lower optimizer.learning_rate, and the weight of the component that pays for tags.",
        )

    def _share(self, reading: Reading) -> float:
        spam = [count >= self.repeats for count in reading.tag_repeats]
        return sum(spam) / max(len(spam), 1)


@dataclass(frozen=True)
class LengthToTheLimit(Alarm):
    """Most completions are cut at the token limit, which they were not at the start.

    Args:
        share: Of the completions of a rollout.
        rise: Over their share in the first rollouts.
        in_a_row: Rollouts.
    """

    name: ClassVar[str] = "length_to_the_limit"
    share: float = 0.5
    rise: float = 0.25
    in_a_row: int = 3

    def __post_init__(self) -> None:
        self._check(share=0, rise=0, in_a_row=1)

    @property
    def num_readings(self) -> int:
        return self.in_a_row

    def judge(self, start: Sequence[Reading], recent: Sequence[Reading]) -> Finding:
        first = [r.clipped_ratio for r in start if r.clipped_ratio is not None]
        last = [r.clipped_ratio for r in recent if r.clipped_ratio is not None][-self.in_a_row :]
        if len(first) < NUM_START or len(last) < self.in_a_row:
            return Finding()
        threshold = max(self.share, fmean(first) + self.rise)
        is_on = all(share >= threshold for share in last)
        return self._finding(
            is_on,
            last[-1],
            threshold,
            f"{last[-1]:.0%} of the completions are cut at the token limit; it was "
            f"{fmean(first):.0%} in the first rollouts. Lower optimizer.learning_rate, give "
            "unfinished answers less reward (objective.overlong_buffer), or raise "
            "sampling.max_new_tokens if the answers need it.",
        )


@dataclass(frozen=True)
class ExplodingGradientNorm(Alarm):
    """The gradient norm is many times what it was.

    Args:
        factor: Over the median of the window.
        in_a_row: Rollouts that took an optimizer step; the window lies before them.
        window: Rollouts.
        least: So many of the window are needed to judge by.
    """

    name: ClassVar[str] = "exploding_gradient_norm"
    factor: float = 5.0
    in_a_row: int = 3
    window: int = 50
    least: int = 10

    def __post_init__(self) -> None:
        self._check(factor=1, in_a_row=1, least=1)
        self._check(window=self.least)

    @property
    def num_readings(self) -> int:
        return self.window + self.in_a_row

    def judge(self, start: Sequence[Reading], recent: Sequence[Reading]) -> Finding:
        norms = [r.grad_norm for r in recent[-self.num_readings :] if r.grad_norm is not None]
        before, last = norms[: -self.in_a_row], norms[-self.in_a_row :]
        if len(before) < self.least:
            return Finding()
        usual = median(before)
        threshold = self.factor * usual
        is_on = all(norm > threshold for norm in last)
        return self._finding(
            is_on,
            last[-1],
            threshold,
            f"the gradient norm is {last[-1]:.3g}, {self.in_a_row} times in a row over "
            f"{self.factor:g} x its median of {usual:.3g}. Lower optimizer.learning_rate or "
            "optimizer.max_grad_norm, and go on from a checkpoint before this.",
        )


@dataclass(frozen=True)
class EntropyCollapse(Alarm):
    """The policy has become all but certain of each token, and finds nothing new.

    Args:
        share_of_start: Of the first rollouts' entropy; it has to be below this and the next.
        nats: Per token.
        in_a_row: Rollouts that took an optimizer step.
    """

    name: ClassVar[str] = "entropy_collapse"
    share_of_start: float = 0.2
    nats: float = 0.02
    in_a_row: int = 3

    def __post_init__(self) -> None:
        self._check(share_of_start=0, nats=0, in_a_row=1)

    @property
    def num_readings(self) -> int:
        return self.in_a_row

    def judge(self, start: Sequence[Reading], recent: Sequence[Reading]) -> Finding:
        first = [r.entropy for r in start if r.entropy is not None]
        last = [r.entropy for r in recent if r.entropy is not None][-self.in_a_row :]
        if len(start) < NUM_START or not first or len(last) < self.in_a_row:
            return Finding()
        threshold = min(self.nats, self.share_of_start * fmean(first))
        is_on = all(entropy < threshold for entropy in last)
        return self._finding(
            is_on,
            last[-1],
            threshold,
            f"the entropy is {last[-1]:.2g} nats per token; it was {fmean(first):.2g} in the first "
            "rollouts. Lower optimizer.learning_rate, raise objective.clip_high, "
            "objective.entropy_bonus or sampling.temperature, or stop: the prompts may be learnt.",
        )


@dataclass(frozen=True)
class FormatPaidWhileAccuracyFalls(Alarm):
    """The reward for form pays as before, or more, while answers become worse.

    The last ``window`` rollouts are compared with those ``window`` before them, within
    ``look_back``, in which the goal stood highest.

    Args:
        paid: Name of the component that pays for form.
        goal: Name of the component that training is for.
        fall: Of the goal's mean.
        min_z: The fall in units of its standard error, from the rollouts' scatter.
        window: Rollouts that are averaged.
        look_back: Rollouts.
    """

    name: ClassVar[str] = "format_paid_while_accuracy_falls"
    paid: str = "format"
    goal: str = "accuracy"
    fall: float = 0.1
    min_z: float = 4.0
    window: int = 10
    look_back: int = 64

    def __post_init__(self) -> None:
        self._check(fall=0, min_z=0, window=2)
        self._check(look_back=2 * self.window)
        if self.paid == self.goal:
            raise ValueError(
                f"alarms.{self.name}: paid and goal are both {self.goal!r}: name two components."
            )

    @property
    def num_readings(self) -> int:
        return self.look_back

    def judge(self, start: Sequence[Reading], recent: Sequence[Reading]) -> Finding:
        pairs = [
            (paid, goal)
            for reading in recent[-self.look_back :]
            if (paid := reading.components.get(self.paid)) is not None
            and (goal := reading.components.get(self.goal)) is not None
        ]
        size = self.window
        before, last = pairs[:-size], pairs[-size:]
        if len(before) < size:
            return Finding()
        windows = [before[i : i + size] for i in range(len(before) - size + 1)]
        best = max(windows, key=lambda window: fmean(goal for _, goal in window))
        (paid_then, goal_then), (paid_now, goal_now) = _means(best), _means(last)
        error = math.sqrt((variance(g for _, g in best) + variance(g for _, g in last)) / size)
        fall = goal_then - goal_now
        is_paid = paid_now >= min(paid_then, HIGH)
        is_on = is_paid and fall >= self.fall and fall >= self.min_z * error
        return self._finding(
            is_on,
            fall,
            max(self.fall, self.min_z * error),
            f"{self.goal} fell from {goal_then:.2f} to {goal_now:.2f} while {self.paid} went from "
            f"{paid_then:.2f} to {paid_now:.2f}. Lower the weight of {self.paid}, or pay it only "
            "for right answers, and lower optimizer.learning_rate.",
        )


@dataclass(frozen=True)
class AllGroupsZeroVariance(Alarm):
    """No group's rewards differ: there is nothing to learn from.

    Args:
        in_a_row: Rollouts. The run itself stops after ``max_rollouts_without_signal``.
    """

    name: ClassVar[str] = "all_groups_zero_variance"
    in_a_row: int = 5

    def __post_init__(self) -> None:
        self._check(in_a_row=1)

    @property
    def num_readings(self) -> int:
        return self.in_a_row

    def judge(self, start: Sequence[Reading], recent: Sequence[Reading]) -> Finding:
        count = 0
        for reading in reversed(recent[-self.in_a_row :]):
            if reading.zero_variance != 1:
                break
            count += 1
        is_on = count >= self.in_a_row
        return self._finding(
            is_on,
            float(count),
            float(self.in_a_row),
            f"in {count} rollouts in a row all rewards of each group were equal, so that nothing "
            "was learnt. Choose prompts that the model gets right sometimes, shape the reward, or "
            "raise group_size or sampling.temperature.",
        )


def _means(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return fmean(paid for paid, _ in pairs), fmean(goal for _, goal in pairs)
