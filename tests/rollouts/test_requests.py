"""What an engine is asked, and what its answers become."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy
from tropism.rollouts.engine import SamplerGapError, Sampling, require_small_gap
from tropism.rollouts.requests import Answer, Request, requests_for, rollouts_of
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.types import Prompt

PROMPTS = [Prompt(id=name, task="t", text=text) for name, text in (("a", "1+1="), ("b", "22+3="))]
SAMPLING = Sampling(max_new_tokens=3, temperature=0.6)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(Model(name="organism", dtype="float32"), LoRA(rank=4, alpha=8))


def ask(policy: Policy, prompts: list[Prompt] = PROMPTS, **changed) -> list[Request]:
    options = {"group_size": 2, "seed": 7, "rollout": 3, "greedy": False} | changed
    encoded = [policy.encode(prompt) for prompt in prompts]
    return requests_for(policy, prompts, encoded, sampling=SAMPLING, **options)


def test_each_completion_is_a_request_keyed_by_what_it_is(policy):
    requests = ask(policy)
    encoded = [policy.encode(prompt) for prompt in PROMPTS]
    assert [r.prompt_token_ids for r in requests] == [encoded[0]] * 2 + [encoded[1]] * 2
    assert {r.stop_token_ids for r in requests} == {tuple(sorted(policy.eos_token_ids))}
    assert len({r.seed for r in requests}) == 4
    assert all(0 <= r.seed < 2**63 for r in requests)  # what torch's generators take
    assert [r.seed for r in ask(policy, PROMPTS[1:])] == [r.seed for r in requests[2:]]
    assert [r.seed for r in ask(policy, group_size=1)] == [requests[0].seed, requests[2].seed]
    for other in ({"seed": 8}, {"rollout": 4}):
        assert not {r.seed for r in ask(policy, **other)} & {r.seed for r in requests}
    assert {r.temperature for r in requests} == {0.6}
    assert {r.temperature for r in ask(policy, greedy=True)} == {0.0}


def test_answers_become_groups_in_order(policy):
    eos = min(policy.eos_token_ids)
    answers = [
        Answer([5, eos], [-0.5, -0.25], "stop"),
        Answer([5, 6, 7], [-1.0, -2.0, -3.0], "length"),
        Answer([5, 6, eos], [-1.0, -2.0, -3.0], "stop"),  # ended with the last token allowed
        Answer([8, 8, 8], [0.0, 0.0, 0.0], "length"),
    ]
    a, b = rollouts_of(policy, PROMPTS, ask(policy), answers)
    assert (a.prompt.id, b.prompt.id) == ("a", "b")
    assert a.prompt_token_ids == policy.encode(PROMPTS[0])
    assert [c.finish_reason for c in (*a.completions, *b.completions)] == [
        "stop",
        "length",
        "stop",
        "length",
    ]
    assert a.completions[0].token_ids == (5, eos)
    assert a.completions[0].text == policy.decode((5,))
    torch.testing.assert_close(a.completions[0].sampler_logprobs, torch.tensor([-0.5, -0.25]))


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": "abort"},
        {"finish_reason": "stop"},  # without any stop token
        {"token_ids": [5, 6], "logprobs": [-1.0, -1.0]},  # neither ended nor at the limit
        {"logprobs": [-1.0]},
    ],
)
def test_what_is_no_completion_is_refused(policy, changes):
    whole = Answer([5, 6, 7], [-1.0, -1.0, -1.0], "length")
    requests = ask(policy, PROMPTS[:1], group_size=1)
    assert rollouts_of(policy, PROMPTS[:1], requests, [whole])
    with pytest.raises(RuntimeError, match="no completion to learn from"):
        rollouts_of(policy, PROMPTS[:1], requests, [replace(whole, **changes)])


class Remote(TransformersEngine):
    max_sampler_gap: float | None = 0.2

    def metrics(self):
        return {}


@pytest.mark.parametrize("gap", [0.21, float("nan")])
def test_a_gap_above_the_engines_limit_stops_the_run(gap):
    engine = Remote()
    require_small_gap(engine, 0.2)
    with pytest.raises(SamplerGapError, match=r"engine.max_sampler_gap=0.2: .* nats a token off"):
        require_small_gap(engine, gap)
    require_small_gap(TransformersEngine(), gap)  # the trainer's own modules: no limit
    engine.max_sampler_gap = None
    require_small_gap(engine, gap)
