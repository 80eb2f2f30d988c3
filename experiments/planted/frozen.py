"""Part 1: the signals of a damaged model that is never trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scores import Cell, score

from tropism.experience import Experience
from tropism.loop.probing import Prober
from tropism.measurements.alignment import Moments, alignment, misalignment
from tropism.measurements.gradient_probe import GradientProbe
from tropism.measurements.probe_rows import choose_probe_rows
from tropism.models import LoRA, Model, load_policy
from tropism.objective.settings import Objective
from tropism.policy import Policy
from tropism.rewards import Rewards
from tropism.rollouts.collate import rows_of
from tropism.rollouts.engine import Sampling
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.tasks.skills import Skills
from tropism.types import RolloutBatch

NUM_GROUPS = (8, 24, 48)
GROUPS_PER_ROLLOUT = 4
STEP_SIZES = (0.02, 0.08)
OBJECTIVE = Objective(loss="dapo")
SAMPLING = Sampling(max_new_tokens=24, temperature=1.0)
REWARD_WEIGHTS = {"format": 0.5, "accuracy": 1.0}


def batches(policy: Policy, seed: int) -> Iterator[RolloutBatch]:
    """Rollout batches of the damaged model as GRPO makes them, of always new prompts."""
    engine, task = TransformersEngine(), Skills()
    engine.bind(policy)
    experience = Experience(
        engine=engine,
        tasks={task.name: task},
        rewards=Rewards(REWARD_WEIGHTS, tasks={task.name: task}),
        objective=OBJECTIVE,
        sampling=SAMPLING,
        group_size=8,
        seed=seed,
    )
    prompts = task.prompts("train", 100 * GROUPS_PER_ROLLOUT, seed)
    for rollout in range(100):
        start = rollout * GROUPS_PER_ROLLOUT
        yield experience.collect(prompts[start : start + GROUPS_PER_ROLLOUT], rollout=rollout)


def frozen(seed: int, damaged: frozenset[str]) -> list[Cell]:
    """AUC of every signal at the damaged model itself."""
    policy = load_policy(Model(name=f"organism-planted-{seed}", dtype="float32"), LoRA(8, 16))
    prober = Prober(
        policy,
        OBJECTIVE,
        SAMPLING,
        components=tuple(REWARD_WEIGHTS),
        num_prompts=GROUPS_PER_ROLLOUT,
        num_completions=4,
        choice="contrast",
        max_rows=4 * (NUM_GROUPS[-1] + GROUPS_PER_ROLLOUT),
        sketch_size=32,
        seed=seed,
    )
    moments = Moments()
    cells, used = [], []
    static: dict[str, dict[str, float | None]] = {}
    wanted = list(NUM_GROUPS)
    for batch in batches(policy, seed):
        static = static or prober.static_scores(batch)
        prober.probe(batch, REWARD_WEIGHTS)
        add_moments(moments, policy, batch, seed)
        used.append(batch)
        if prober.pool.num_prompts >= wanted[0]:
            signals = pressure_signals(prober)
            for name in ("plop", "weight_norm"):
                signals[name] = [static[site.key][name] for site in policy.sites]
            found = {
                site.key: alignment(
                    policy.weight(site), moments.inputs(site.key), moments.gradients(site.key)
                )
                for site in policy.sites
            }
            signals["misalignment"] = list(misalignment(found, policy.sites))
            signals["random"] = list(np.random.default_rng(seed).random(len(policy.sites)))
            cells += score(wanted.pop(0), signals, policy.sites, damaged)
        if not wanted:
            break
    gain = {"step_gain": step_gains(policy, used[:6], used[6:9])}
    return cells + score(24, gain, policy.sites, damaged)


def pressure_signals(prober: Prober) -> dict[str, list[float | None]]:
    estimate = prober.pool.estimate(rank=8)
    signals: dict[str, list[float | None]] = defaultdict(list)
    for site in estimate.sites:
        for name, value in {**site.signals(), "null_z": site.null_z}.items():
            signals[name].append(value)
    return signals


def contrasts(policy: Policy, batch: RolloutBatch, seed: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """(completions, advantages) of four completions of each prompt with signal."""
    for chosen in choose_probe_rows(
        batch.advantages,
        group_size=8,
        num_prompts=GROUPS_PER_ROLLOUT,
        num_completions=4,
        rng=np.random.default_rng([seed, batch.rollout]),
    ):
        rows = list(chosen.rows)
        part = rows_of(batch.rollouts, rows, pad_token_id=policy.pad_token_id)
        yield part, batch.advantages[rows]


def add_moments(moments: Moments, policy: Policy, batch: RolloutBatch, seed: int) -> None:
    linears = [(site, policy.linear(site)) for site in policy.sites]
    for part, _ in contrasts(policy, batch, seed):
        with GradientProbe(linears, policy.base.get_input_embeddings(), moments) as probe:
            logprobs, _ = policy.completion_logprobs(
                part, temperature=1.0, should_share_prompt=False
            )
            probe.backward(-logprobs.sum())


def step_gains(
    policy: Policy, learning: Sequence[RolloutBatch], judging: Sequence[RolloutBatch]
) -> list[float | None]:
    """How much the objective on ``judging`` grows when one linear alone takes a step."""
    weights = [policy.linear(site).get_parameter("weight") for site in policy.sites]
    policy.model.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)
    for batch in learning:
        for part, advantages in contrasts(policy, batch, 0):
            logprobs, _ = policy.completion_logprobs(part, temperature=1.0)
            (advantages * logprobs.sum(dim=1)).sum().backward()
    gradients = [weight.grad for weight in weights]
    policy.model.requires_grad_(False)
    parts = [part for batch in judging for part in contrasts(policy, batch, 0)]

    @torch.no_grad()
    def objective() -> float:
        return sum(
            float(advantages @ policy.completion_logprobs(part, temperature=1.0)[0].sum(dim=1))
            for part, advantages in parts
        )

    before, gains = objective(), []
    for weight, gradient in zip(weights, gradients, strict=True):
        assert gradient is not None
        whole = weight.detach().clone()
        direction = gradient / gradient.norm() * whole.norm()
        after = []
        for size in STEP_SIZES:
            weight.data.copy_(whole + size * direction)
            after.append(objective())
        weight.data.copy_(whole)
        gains.append(max(after) - before)
    return gains
