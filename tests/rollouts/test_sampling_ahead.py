"""A rollout kept for its turn: drawn in a thread, at once, or taken out of a checkpoint."""

from __future__ import annotations

import io
import threading

import pytest
import torch

from tropism.grpo import GRPO
from tropism.models import LoRA
from tropism.objective.settings import Objective
from tropism.rollouts.ahead import Ahead
from tropism.rollouts.engine import Sampling
from tropism.rollouts.pending import CancelledError, Pending
from tropism.rollouts.vllm_engine import VLLMEngine
from tropism.types import Completion, GenerationProgress, Prompt, Rollout

PROMPTS = [Prompt(id=name, task="t", text=name) for name in "abc"]
OPTIONS = {"group_size": 2, "sampling": Sampling(), "seed": 0, "rollout": 5, "step": 9}


def rollouts_for(prompts) -> list[Rollout]:
    answers = [Completion((4, 7), "xy", torch.tensor([-0.5, -0.25]), "stop"),
               Completion((1,), "z", torch.tensor([-2.0]), "length")]  # fmt: skip
    return [Rollout(prompt, (i,), tuple(answers)) for i, prompt in enumerate(prompts)]


class AtOnce:
    """An engine without weights of its own."""

    def generate(self, prompts, **options):
        return rollouts_for(prompts)


class InThread(AtOnce):
    """Draws until it is let go, and asks meanwhile whether it should stop."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.error: Exception | None = None

    def begin(self, prompts, **options):
        def draw(report):
            while not self.may_end.wait(0.01):
                report(GenerationProgress(0, 1, 0))
            if self.error is not None:
                raise self.error
            return prompts

        return Pending(draw, rollouts_for)


def same(one: list[Rollout], other: list[Rollout]) -> bool:
    def plain(rollouts):
        return [
            (r.prompt, r.prompt_token_ids, c.token_ids, c.text, c.finish_reason,
             c.sampler_logprobs.tolist())
            for r in rollouts for c in r.completions
        ]  # fmt: skip

    return plain(one) == plain(other)


@pytest.mark.parametrize("in_thread", [False, True])
def test_what_was_begun_is_taken_once_also_after_a_checkpoint(in_thread):
    engine = InThread() if in_thread else AtOnce()
    ahead = Ahead()
    assert ahead.take(PROMPTS, rollout=0) is None
    assert ahead.state_dict() is None
    ahead.begin(engine, PROMPTS[:2], **OPTIONS)
    if in_thread:
        assert ahead._drawn.__class__ is Pending  # begin came back before the thread was done
        engine.may_end.set()

    file = io.BytesIO()
    torch.save(ahead.state_dict(), file)
    file.seek(0)
    resumed = Ahead()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.state_dict()["prompt_ids"] == ["a", "b"]  # saved again before it is taken
    for one in (ahead, resumed):
        drawn = one.take(PROMPTS, rollout=5)  # sizes have grown since
        assert same(drawn.rollouts, rollouts_for(PROMPTS[:2]))
        assert (drawn.step, drawn.group_size) == (9, 2)
        assert drawn.seconds > 0
        assert one.take(PROMPTS, rollout=6) is None


@pytest.mark.parametrize("should_save", [False, True])
def test_other_prompts_or_another_turn_are_refused(should_save):
    for prompts, rollout in ((PROMPTS[1:], 5), (PROMPTS, 6)):
        ahead = Ahead()
        ahead.begin(AtOnce(), PROMPTS[:2], **OPTIONS)
        if should_save:
            ahead.load_state_dict(ahead.state_dict())
        with pytest.raises(RuntimeError, match=r"rollout 5 was sampled ahead with .*'a', 'b'"):
            ahead.take(prompts, rollout=rollout)


def test_what_ended_the_thread_is_raised_where_the_rollout_is_taken_and_not_before():
    engine, ahead = InThread(), Ahead()
    engine.error = OSError("the server is gone")
    ahead.begin(engine, PROMPTS, **OPTIONS)
    engine.may_end.set()
    assert ahead.state_dict() is None  # a checkpoint is complete without it
    with pytest.raises(OSError, match="the server is gone"):
        ahead.take(PROMPTS, rollout=5)


def test_cancelling_ends_the_thread():
    engine, ahead = InThread(), Ahead()
    ahead.begin(engine, PROMPTS, **OPTIONS)
    pending = ahead._drawn
    ahead.cancel()
    assert pending.has_failed
    with pytest.raises(CancelledError):
        pending.result()
    assert ahead.take(PROMPTS, rollout=5) is None
    ahead.cancel()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollouts_ahead": 2}, r"rollouts_ahead=2: give 1"),
        ({"rollouts_ahead": 1}, r"objective\.mismatch='none'.*Set objective\.mismatch to token_"),
        (
            {
                "rollouts_ahead": 1,
                "objective": Objective(mismatch="token_mask"),
                "engine": VLLMEngine(sleep_level=1),
            },
            r"engine\.sleep_level=1: .* cannot sleep",
        ),
        (
            {
                "rollouts_ahead": 1,
                "objective": Objective(mismatch="token_mask"),
                "engine": VLLMEngine(),
                "lora": LoRA(dropout=0.1),
            },
            r"lora\.dropout=0\.1",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPO(**settings)
    GRPO(**{**settings, "rollouts_ahead": 0})
