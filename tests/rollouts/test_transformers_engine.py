"""The engine against stock `generate` and against the trainer's own forward, on the organism."""

import pytest
import torch

from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy
from tropism.rollouts.collate import micro_batches
from tropism.rollouts.engine import Sampling
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.types import GenerationProgress, Prompt

PROMPTS = [
    Prompt(id=f"p{i}", task="t", messages=({"role": "user", "content": text},))
    for i, text in enumerate(["12+30=", "reverse: cat", "larger: 3 or 250", "name=bob age=7"])
]
SAMPLING = Sampling(max_new_tokens=24, temperature=0.8)


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    policy = load_policy(Model(name="organism", dtype="float32"), LoRA(rank=4, alpha=8))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for site in policy.sites:
            b = policy.adapter(site).b
            b.copy_(torch.randn(b.shape, generator=generator) * 0.02)
    return policy


def run(policy: Policy, prompts=PROMPTS, *, max_rows=64, group_size=3, **changed):
    engine = TransformersEngine(max_rows)
    engine.bind(policy)
    options = {"sampling": SAMPLING, "seed": 0, "rollout": 0} | changed
    return engine.generate(prompts, group_size=group_size, **options)


def tokens(rollouts):
    return [[c.token_ids for c in rollout.completions] for rollout in rollouts]


def test_greedy_equals_stock_generate_with_the_unmerged_adapter(policy):
    for rollout in run(policy, group_size=1, greedy=True):
        ids = torch.tensor([rollout.prompt_token_ids])
        with torch.no_grad():
            expected = policy.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=SAMPLING.max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(policy.eos_token_ids),
                pad_token_id=policy.pad_token_id,
            )
        assert rollout.completions[0].token_ids == tuple(expected[0, ids.shape[1] :].tolist())


def test_samples_do_not_depend_on_what_is_sampled_beside_them(policy):
    together = tokens(run(policy))
    assert together == tokens(run(policy, max_rows=3))
    assert together[2] == tokens(run(policy, [PROMPTS[2]]))[0]
    assert [group[:2] for group in together] == tokens(run(policy, group_size=2))
    assert together != tokens(run(policy, rollout=1))
    assert together != tokens(run(policy, seed=1))


def test_sampler_logprobs_are_the_trainers_at_the_sampling_temperature(policy):
    rollouts = run(policy)
    completions = [c for rollout in rollouts for c in rollout.completions]
    keep = torch.ones(12, dtype=torch.bool)
    for part in micro_batches(
        rollouts, keep=keep, max_tokens=512, pad_token_id=policy.pad_token_id
    ):
        with torch.no_grad():
            logprobs, _ = policy.completion_logprobs(part, temperature=SAMPLING.temperature)
        for i, row in enumerate(part.rows.tolist()):
            sampled = completions[row].sampler_logprobs
            torch.testing.assert_close(logprobs[i, : len(sampled)], sampled, rtol=0, atol=2e-4)


def test_completions_end_with_eos_or_at_the_limit(policy):
    for rollout in run(policy, group_size=8):
        for completion in rollout.completions:
            ended = completion.token_ids[-1] in policy.eos_token_ids
            assert ended == (completion.finish_reason == "stop")
            assert ended or len(completion.token_ids) == SAMPLING.max_new_tokens
            assert not set(completion.token_ids[:-1]) & policy.eos_token_ids
            assert len(completion.sampler_logprobs) == len(completion.token_ids)


def test_sampled_frequencies_are_the_policys(policy):
    num = 2000
    rollout = run(
        policy, PROMPTS[:1], group_size=num, sampling=Sampling(max_new_tokens=1), max_rows=num
    )[0]
    ids = torch.tensor([rollout.prompt_token_ids])
    with torch.no_grad():
        probabilities = policy.model(input_ids=ids).logits[0, -1].softmax(-1)
    drawn = torch.tensor([c.token_ids[0] for c in rollout.completions])
    counts = torch.bincount(drawn, minlength=len(probabilities)).float()
    spread = (num * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - num * probabilities).abs() <= 4.5 * spread + 1).all()


def test_policy_is_left_as_it_was(policy):
    policy.model.train()
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    run(policy)
    assert policy.model.training
    for name, value in policy.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_progress_reaches_the_total(policy):
    seen: list[GenerationProgress] = []
    rollouts = run(policy, max_rows=6, progress=seen.append)
    assert seen[-1].done == seen[-1].total == 12
    assert seen[-1].tokens == sum(len(c.token_ids) for r in rollouts for c in r.completions)
    assert [p.tokens for p in seen] == sorted(p.tokens for p in seen)


def test_prompt_longer_than_the_context_is_refused_by_id(policy):
    long = Prompt(id="long", task="t", text="1+" * 400)
    with pytest.raises(ValueError, match=r"'long' has \d+ tokens.*max_new_tokens=24"):
        run(policy, [PROMPTS[0], long])


class Forced(TransformersEngine):
    """Ends each row where it is told to, whatever was drawn."""

    def __init__(self, lengths: list[int], max_rows: int) -> None:
        super().__init__(max_rows)
        self.lengths, self.calls = torch.tensor(lengths), 0

    def ends(self, tokens, rows, position):
        self.calls += 1
        assert tokens.shape == rows.shape
        return self.lengths[rows] == position + 1


@pytest.mark.parametrize("max_rows", [3, 64])
def test_whoever_overrides_ends_sets_the_lengths(policy, max_rows):
    lengths = [5, 1, 24, 3, 3, 3, 24, 12, 2, 9, 1, 1]

    def forced(lengths):
        engine = Forced(lengths, max_rows)
        engine.bind(policy)
        rollouts = engine.generate(PROMPTS, group_size=3, sampling=SAMPLING, seed=0, rollout=0)
        return engine.calls, [c for rollout in rollouts for c in rollout.completions]

    calls, completions = forced(lengths)
    assert [len(c.token_ids) for c in completions] == lengths
    assert [len(c.sampler_logprobs) for c in completions] == lengths
    assert {c.finish_reason for c in completions} == {"stop"}
    longest = [max(lengths[i : i + 3]) for i in range(0, 12, 3)]
    assert calls == (sum(longest) if max_rows == 3 else max(longest))
    _, whole = forced([99] * 12)  # never told to
    assert {c.finish_reason for c in whole} == {"length"}
    assert {len(c.token_ids) for c in whole} == {SAMPLING.max_new_tokens}
    for one, other in zip(completions, whole, strict=True):
        assert one.token_ids == other.token_ids[: len(one.token_ids)]
