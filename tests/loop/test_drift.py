"""Drift on the organism against whole logits of single sequences, made the plain way."""

from dataclasses import replace

import pytest
import torch

from tropism.loop.drift import answered, gold_answers, measure_drift
from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy
from tropism.tasks.skills import Skills
from tropism.types import Rollout

MODEL = Model(name="organism", dtype="float32")
PROMPTS = Skills().prompts("validation", 12, 0)


def perturb(policy: Policy, scale: float) -> None:
    """Move every trainable parameter; of an adapter this makes B unlike 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.named_trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def tuned(lora: LoRA | None) -> Policy:
    torch.manual_seed(0)
    policy = load_policy(MODEL, lora)
    policy.keep_start()
    perturb(policy, 0.05 if lora is not None else 0.02)
    return policy


def logits(policy: Policy, rollout: Rollout) -> torch.Tensor:
    """[S + T, V] of prompt and answer in a batch of its own."""
    ids = [*rollout.prompt_token_ids, *rollout.completions[0].token_ids]
    with torch.no_grad():
        return policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def naive(before: Policy, after: Policy, rollouts: list[Rollout], scope: str) -> list:
    """For each rollout KL(before || after) and KL(after || before), position by position."""
    kl = torch.distributions.kl_divergence
    found = []
    for rollout in rollouts:
        first = len(rollout.prompt_token_ids) - 1 if scope == "completion" else 0
        p, q = (
            torch.distributions.Categorical(logits=logits(policy, rollout)[first:-1])
            for policy in (before, after)
        )
        found.append((kl(p, q), kl(q, p)))
    return found


@pytest.mark.parametrize("scope", ["completion", "all"])
@pytest.mark.parametrize("lora", [LoRA(rank=4, alpha=8), None], ids=["lora", "all weights"])
@pytest.mark.parametrize("max_tokens", [40, 2048])
def test_equals_whole_logits(lora, scope, max_tokens):
    policy = tuned(lora)
    rollouts = gold_answers(policy, Skills(), PROMPTS)
    tokens = measure_drift(policy, rollouts, scope=scope, max_tokens=max_tokens)
    expected = naive(load_policy(MODEL, None), policy, rollouts, scope)
    for index, (forward, reverse) in enumerate(expected):
        own = tokens.prompts == index
        torch.testing.assert_close(tokens.forward[own], forward, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(tokens.reverse[own], reverse, atol=1e-5, rtol=1e-5)
    assert tokens.forward.mean() > 1e-3


def test_sequences_that_begin_unlike():
    policy = tuned(LoRA(rank=4, alpha=8))
    answers = gold_answers(policy, Skills(), PROMPTS)
    rollouts = [
        replace(answer, prompt_token_ids=answer.prompt_token_ids[index % 3 :])
        for index, answer in enumerate(answers)
    ]
    tokens = measure_drift(policy, rollouts, scope="completion", max_tokens=90)
    expected = naive(load_policy(MODEL, None), policy, rollouts, "completion")
    for index, (forward, _) in enumerate(expected):
        torch.testing.assert_close(
            tokens.forward[tokens.prompts == index], forward, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [LoRA(rank=4, alpha=8), None], ids=["lora", "all weights"])
def test_exactly_zero_at_the_start(lora, dtype):
    policy = load_policy(Model(name="organism", dtype=dtype), lora)
    policy.keep_start()
    rollouts = gold_answers(policy, Skills(), PROMPTS)
    for scope in ("completion", "all"):
        tokens = measure_drift(policy, rollouts, scope=scope, max_tokens=2048)
        assert tokens.forward.abs().max() == tokens.reverse.abs().max() == 0


def test_the_start_stays_where_the_reference_moves():
    policy = tuned(LoRA(rank=4, alpha=8))
    rollouts = gold_answers(policy, Skills(), PROMPTS)
    before = measure_drift(policy, rollouts, scope="completion", max_tokens=2048)
    policy.keep_reference()
    after = measure_drift(policy, rollouts, scope="completion", max_tokens=2048)
    assert torch.equal(before.forward, after.forward)


@pytest.mark.parametrize("lora", [LoRA(rank=4, alpha=8), None], ids=["lora", "all weights"])
def test_nothing_is_changed(lora):
    policy = tuned(lora)
    saved = {name: p.detach().clone() for name, p in policy.named_trainable().items()}
    policy.model.train()
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    rollouts = gold_answers(policy, Skills(), PROMPTS)
    measure_drift(policy, rollouts, scope="completion", max_tokens=2048)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert policy.model.training
    for name, parameter in policy.named_trainable().items():
        assert torch.equal(parameter, saved[name])
        assert parameter.grad is None
    policy.keep_start()  # too late to change anything
    again = measure_drift(policy, rollouts, scope="completion", max_tokens=2048)
    assert again.forward.mean() > 1e-3


def test_gold_answers_end_as_the_model_ends_them():
    policy = load_policy(MODEL, None)
    (rollout,) = gold_answers(policy, Skills(), PROMPTS[:1])
    ids = rollout.completions[0].token_ids
    assert ids[-1] in policy.eos_token_ids
    assert policy.decode(ids) == PROMPTS[0].columns["answer"]
    assert rollout.prompt_token_ids == policy.encode(PROMPTS[0])


def test_an_answer_longer_than_the_context_is_refused():
    policy = load_policy(MODEL, None)
    with pytest.raises(ValueError, match="more than the model's context"):
        answered(policy, PROMPTS[0], [5] * policy.context_length)
