"""How far is the policy that samples from the one that trains, by the way adapters are merged?

    python benchmarks/merge_gap.py --run runs/quickstart/version_0

Sampling multiplies with W_0 + scaling B A, cast to the base's bf16; training adds the adapter to
each product. On completions of the run's own policy this prints, for each way of showing the
weights to the sampler, the mean and largest gap of log-probabilities to the trainer's, the
estimated KL (k3, nats a token), and the gap to the same policy wholly in fp32: what bf16 costs by
itself. Ways: un-merged, merged to the nearest bf16, merged with stochastic rounding, and merged in
fp32 (adapted linears then multiply in fp32). Written to `benchmarks/results/merge_gap.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tropism.lora.views import View
from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy
from tropism.rollouts.collate import rows_of
from tropism.rollouts.engine import Sampling
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.tasks.structured import StructuredOutput
from tropism.types import Rollout

RESULTS = Path(__file__).parent / "results" / "merge_gap.json"
TEMPERATURE = 1.0


def totals(policy: Policy) -> Iterator[tuple[Any, Tensor]]:
    """Each adapted linear and its W_0 + scaling B A in fp32."""
    for site in policy.sites:
        layer, adapter = policy.lora_layer(site), policy.adapter(site)
        if layer is not None and adapter is not None:
            delta = adapter.scaling * adapter.b.detach() @ adapter.a.detach()
            yield layer, layer.get_base_layer().weight.detach().float() + delta


@contextmanager
def stochastic(policy: Policy) -> Iterator[None]:
    """Each weight goes to one of its two bf16 neighbours, unbiased."""
    generator = torch.Generator().manual_seed(0)
    with View() as view:
        for layer, total in totals(policy):
            noise = torch.randint(0, 1 << 16, total.shape, generator=generator, dtype=torch.int32)
            rounded = ((total.view(torch.int32) + noise) & -65536).view(torch.float32)
            view.show(layer.get_base_layer().weight, rounded.to(torch.bfloat16))
            view.disable(layer)
        yield


@contextmanager
def in_fp32(policy: Policy) -> Iterator[None]:
    with View() as view:
        for layer, total in totals(policy):
            base = layer.get_base_layer()

            def forward(x: Tensor, total: Tensor = total, base: Any = base) -> Tensor:
                return linear(x.float(), total, base.bias).to(x.dtype)

            view.compute(base, forward)
            view.disable(layer)
        yield


@torch.no_grad()
def logprobs_of(policy: Policy, rollouts: list[Rollout]) -> Tensor:
    """Of every completion token, prompt by prompt."""
    found, size = [], len(rollouts[0].completions)
    for i in range(len(rollouts)):
        part = rows_of(rollouts, range(i * size, (i + 1) * size), pad_token_id=policy.pad_token_id)
        found.append(policy.completion_logprobs(part, temperature=TEMPERATURE)[0][part.mask])
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="run folder whose adapter is measured")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=8)
    options = parser.parse_args()
    lora = LoRA(rank=options.rank, alpha=2 * options.rank)
    policy = load_policy(Model(adapter=options.run), lora)
    policy.model.eval()
    engine = TransformersEngine()
    engine.bind(policy)
    prompts = list(StructuredOutput(tier=1).prompts("validation", options.prompts, seed=0))
    sampling = Sampling(max_new_tokens=64, temperature=TEMPERATURE)
    rollouts = engine.generate(prompts, group_size=8, sampling=sampling, seed=0, rollout=0)
    trained = logprobs_of(policy, rollouts)
    exact = load_policy(Model(adapter=options.run, dtype="float32"), lora)
    exact.model.eval()
    truth = logprobs_of(exact, rollouts)
    sampled = torch.cat([c.sampler_logprobs for group in rollouts for c in group.completions])

    ways: dict[str, Any] = {
        "un-merged": nullcontext(),
        "nearest bf16": policy.merged(),
        "stochastic bf16": stochastic(policy),
        "fp32": in_fp32(policy),
    }
    rows = {}
    for name, way in ways.items():
        with way:
            rows[name] = logprobs_of(policy, rollouts)
    rows["engine, while sampling"] = sampled
    result: dict[str, Any] = {"run": options.run, "tokens": len(truth), "ways": {}}
    print(f"{len(truth)} tokens; gap of log-probabilities, nats")
    for name, values in rows.items():
        gap, off = (values - trained).abs(), (values - truth).abs()
        ratio = trained - values
        result["ways"][name] = {
            "mean_gap_to_trainer": float(gap.mean()),
            "max_gap_to_trainer": float(gap.max()),
            "kl_k3": float((ratio.exp() - 1 - ratio).mean()),
            "mean_gap_to_fp32": float(off.mean()),
        }
        print(f"{name:24}", {key: round(x, 5) for key, x in result["ways"][name].items()})
    result["trainer_mean_gap_to_fp32"] = float((trained - truth).abs().mean())
    print("trainer to fp32:", result["trainer_mean_gap_to_fp32"])
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
