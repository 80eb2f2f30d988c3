"""Probes against the gradient that training takes, on the organism."""

import pytest
import torch

from tropism.loop.moves import Moves
from tropism.loop.probing import Prober
from tropism.lora.plan import SitePlan
from tropism.measurements.sketches import ExactGradients
from tropism.models import LoRA, Model, load_policy
from tropism.objective.advantages import group_advantages
from tropism.objective.settings import Objective
from tropism.rollouts.collate import rows_of
from tropism.rollouts.engine import Sampling
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.tasks.skills import Skills
from tropism.types import RolloutBatch
from tropism.update import accumulate_gradients, prepare

SAMPLING = Sampling(max_new_tokens=10, temperature=0.8)
G = 4


def batch_of(policy) -> RolloutBatch:
    engine = TransformersEngine()
    engine.bind(policy)
    prompts = list(Skills().prompts("train", 3, seed=0))
    rollouts = engine.generate(prompts, group_size=G, sampling=SAMPLING, seed=0, rollout=0)
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(len(prompts) * G, generator=generator)
    advantages = group_advantages(rewards, group_size=G)
    return RolloutBatch(
        rollout=0,
        rollouts=rollouts,
        components={"a": rewards},
        rewards=rewards,
        advantages=advantages.values,
        zero_variance=advantages.zero_variance,
    )


def prober(policy, objective, **settings) -> Prober:
    made = Prober(
        policy,
        objective,
        SAMPLING,
        components=("a",),
        num_prompts=3,
        num_completions=G,
        choice="contrast",
        max_rows=96,
        sketch_size=32,
        seed=0,
        **settings,
    )
    made.pool.sketch = ExactGradients()
    return made


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_whole_groups_sum_to_the_gradient_of_the_first_update(loss):
    """Full-parameter training, whose gradient autograd has at every weight."""
    torch.manual_seed(0)
    policy = load_policy(Model(name="organism", dtype="float32"), None)
    batch, objective = batch_of(policy), Objective(loss=loss)
    found = prober(policy, objective)
    found.probe(batch, {"a": 1.0})
    prompts = found.pool._prompts
    total = sum(prompt.advantages.float() @ prompt.rows for prompt in prompts)
    prepared = prepare(
        batch, policy, objective, max_completion_length=10, temperature=0.8, max_tokens=512
    )
    accumulate_gradients(
        prepared, policy, objective, temperature=0.8, backward=lambda loss: loss.backward()
    )
    position = 0
    for site in policy.sites:
        gradient = policy.linear(site).weight.grad.flatten()
        part = total[position : position + len(gradient)]
        position += len(gradient)
        torch.testing.assert_close(part, gradient, rtol=1e-3, atol=1e-6)
    assert position == len(total)


def shift(policy, size: float) -> None:
    """Move every adapter at random."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.named_trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


def test_changes_along_moves_are_those_of_the_log_probabilities():
    """To first order, against the difference of two forwards."""
    torch.manual_seed(0)
    policy = load_policy(Model(name="organism", dtype="float32"), LoRA(rank=4, alpha=8))
    shift(policy, 0.02)
    batch = batch_of(policy)

    def logprobs() -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                policy.completion_logprobs(
                    rows_of(batch.rollouts, [row], pad_token_id=policy.pad_token_id),
                    temperature=SAMPLING.temperature,
                )[0].sum()
                for row in range(12)
            ]

    moves = Moves()
    plan = tuple(SitePlan(site.layer, site.module, "TRAIN", 4) for site in policy.sites)
    moves.keep(policy, plan)
    before = torch.stack(logprobs())
    shift(policy, 2e-3)
    after = torch.stack(logprobs())
    found = prober(policy, Objective())
    found.probe(batch, {"a": 1.0}, moves.since(policy))
    total = torch.cat([prompt.moved.sum(dim=1) for prompt in found.gains._prompts])
    assert float((after - before).abs().mean()) > 1e-3
    torch.testing.assert_close(total.float(), after - before, rtol=0.1, atol=5e-4)


def test_probing_leaves_gradients_and_trainability_alone():
    policy = load_policy(Model(name="organism", dtype="float32"), LoRA(rank=4, alpha=4))
    batch = batch_of(policy)
    before = {name: p.requires_grad for name, p in policy.model.named_parameters()}
    prober(policy, Objective()).probe(batch, {"a": 1.0})
    assert {name: p.requires_grad for name, p in policy.model.named_parameters()} == before
    assert all(p.grad is None for p in policy.model.parameters())


def test_static_scores_need_no_reward_and_cover_every_linear():
    policy = load_policy(Model(name="organism", dtype="float32"), LoRA(rank=4, alpha=4))
    scores = prober(policy, Objective()).static_scores(batch_of(policy))
    assert scores.keys() == {site.key for site in policy.sites}
    weight = policy.weight(policy.sites[0])
    rms = float(weight.square().mean().sqrt())
    assert scores[policy.sites[0].key]["weight_norm"] == pytest.approx(rms, rel=1e-5)
    assert all(score["plop"] > 0 for score in scores.values())
