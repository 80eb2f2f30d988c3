"""What measuring and deciding cost on SmolLM2, and what a plan with LoRA only on top saves.

    python benchmarks/loop_cost.py            about 8 minutes on two idle cores; nothing beside it

1. `probe`: one rollout of the quickstart's shape (4 prompts x 8, 64 new tokens), its probe (2
   prompts x 2 completions) and, from 8 pooled probes, a reading and a decision. The share is
   8 probes + 1 reading + 1 decision over the 16 or 25 rollouts between two decisions.
2. `depth`: one update with LoRA on all layers and on the top third: time, and backward FLOPs as
   torch counts them.

Medians of `--repeats`, written to `benchmarks/results/loop_cost.json` with machine and commit.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tropism.adaptation.decide import make, random_key
from tropism.adaptation.placement import SignalShrink
from tropism.experience import Experience
from tropism.loop.observing import observe_placement
from tropism.loop.probing import Prober
from tropism.lora.placement import Placement
from tropism.measurements.gradient_probe import linear_shape
from tropism.models import LoRA, Model, load_policy
from tropism.objective.settings import Objective
from tropism.optimization import AdamW
from tropism.rewards import Rewards
from tropism.rollouts.engine import Sampling
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.tasks.structured import StructuredOutput
from tropism.update import accumulate_gradients, prepare

RESULTS = Path(__file__).parent / "results" / "loop_cost.json"
SAMPLING = Sampling(max_new_tokens=64, temperature=0.7)
OBJECTIVE = Objective()
WEIGHTS = {"parse": 0.25, "keys": 0.5, "types": 0.5, "pass": 1.0}
NUM_PROBES = 8


class WithoutModules:
    """For FLOPs of the whole: FlopCounterMode's own tracker of modules hangs hooks on tensors,
    which torch refuses where a forward takes a gradient inside, as the head's does."""  # fmt: skip

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    torch.manual_seed(0)
    lora = LoRA(rank=16, alpha=32)
    policy = load_policy(Model(name=options.model), lora)
    task = StructuredOutput(tier=1)
    engine = TransformersEngine()
    engine.bind(policy)
    rewards = Rewards(WEIGHTS, {task.name: task})
    experience = Experience(
        engine, {task.name: task}, rewards, OBJECTIVE, SAMPLING, group_size=8, seed=0
    )
    placement = Placement(policy.sites, policy.lora_layer, max_rank=lora.rank)
    optimizer, scheduler = AdamW(learning_rate=6e-4).build(policy.named_trainable(), num_steps=99)
    prompts = list(task.prompts("train", 4 * (options.repeats + NUM_PROBES), seed=0))
    prober = Prober(
        policy,
        OBJECTIVE,
        SAMPLING,
        components=tuple(rewards.weights),
        num_prompts=2,
        num_completions=2,
        choice="contrast",
        max_rows=96,
        sketch_size=32,
        seed=0,
    )

    def update(batch: Any) -> None:
        prepared = prepare(
            batch, policy, OBJECTIVE, max_completion_length=64, temperature=0.7, max_tokens=4096
        )
        accumulate_gradients(
            prepared, policy, OBJECTIVE, temperature=0.7, backward=lambda loss: loss.backward()
        )
        placement.mask_gradients()
        placement.scale_learning_rates(optimizer, scheduler.get_last_lr()[0])
        optimizer.step()
        placement.after_step()
        optimizer.zero_grad(set_to_none=True)

    rollout_seconds, probe_seconds, update_seconds = [], [], []
    for i in range(options.repeats + NUM_PROBES):
        seconds, batch = timed(
            lambda i=i: experience.collect(prompts[4 * i : 4 * i + 4], rollout=i)
        )
        rollout_seconds.append(seconds)
        pooled = prober.pool.num_prompts
        seconds, _ = timed(lambda batch=batch: prober.probe(batch, rewards.weights))
        if prober.pool.num_prompts == pooled + 2:
            probe_seconds.append(seconds)
        if batch.advantages.any():
            update_seconds.append(timed(lambda batch=batch: update(batch))[0])
            last = batch
        print(f"rollout {i}: {rollout_seconds[-1]:.1f} s, probe {seconds:.2f} s", flush=True)
    reading_seconds, estimate = timed(lambda: prober.pool.estimate(rank=lora.rank))
    reading_seconds += timed(prober.pool.reward_gradients)[0]
    observation = observe_placement(
        rollout=NUM_PROBES,
        step=NUM_PROBES,
        max_rank=lora.rank,
        plan=placement.plan,
        sites=policy.sites,
        shapes=[linear_shape(policy.linear(site)) for site in policy.sites],
        can_train=[True] * len(policy.sites),
        pressure=estimate,
        other_signals={},
    )
    key = random_key(0, "placement", NUM_PROBES)
    decision_seconds, decision = timed(lambda: make(SignalShrink(), observation, {}, key))
    step = statistics.median(rollout_seconds) + statistics.median(update_seconds)
    measuring = NUM_PROBES * statistics.median(probe_seconds) + reading_seconds + decision_seconds
    shares = {f"share_of_{n}_rollouts": measuring / (n * step + measuring) for n in (16, 25)}

    top = min(site.layer for site in policy.sites) + 2 * 30 // 3
    plans = {
        "all": placement.plan,
        "top_third": tuple(
            entry if (entry.layer or 0) >= top else replace(entry, state="KEEP", rank=0)
            for entry in placement.plan
        ),
    }
    depth: dict[str, dict[str, float]] = {}
    for name, plan in plans.items():
        placement.apply(plan, optimizer)
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = WithoutModules()
        with counter:
            update(last)
        seconds = [timed(lambda: update(last))[0] for _ in range(options.repeats)]
        depth[name] = {
            "seconds": statistics.median(seconds),
            "teraflop": counter.get_total_flops() / 1e12,
        }
    result = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "model": options.model,
        "rollout_seconds": statistics.median(rollout_seconds),
        "update_seconds": statistics.median(update_seconds),
        "probe_seconds": statistics.median(probe_seconds),
        "reading_seconds": reading_seconds,
        "decision_seconds": decision_seconds,
        **shares,
        "decision": decision.reason,
        "depth": depth,
        "depth_time_ratio": depth["top_third"]["seconds"] / depth["all"]["seconds"],
        "depth_flop_ratio": depth["top_third"]["teraflop"] / depth["all"]["teraflop"],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
