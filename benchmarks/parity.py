"""The gate before any timing: the same completions give both sides the same loss and gradients.

    python benchmarks/parity.py REQUEST.json RESULT.json           (against_trl.py writes and reads)

TRL's own ``_compute_loss``, on its own trainer, stands against ``prepare`` and
``accumulate_gradients``: same base weights, same adapter (B away from 0, or A would have no
gradient), same prompts, completions and advantages, first update on a rollout.

In float32 both are exact up to rounding, and must agree tensor by tensor. In bf16 each side rounds
in other places, by how much depends on the model, and float32 tells: ours may be at most ``EXCESS``
times as far from the float32 gradient as TRL's is, and the two at most ``APART`` times as far from
each other (independent errors of equal size are the root of 2 apart). On SmolLM2 cosine and ratio
of norms between the two are 0.9994 and 1.000, on the tiny organism, which rounds worst, 0.99 and
1.03. (The loss of a first update does not depend on the policy, its gradient does.)
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from trl_side import build
from tropism_side import OBJECTIVE, Texts
from workload import ALPHA, RANK, Workload, read_request

from tropism.models import LoRA, Model, load_policy
from tropism.types import Completion, Rollout, RolloutBatch
from tropism.update import accumulate_gradients, prepare

Gradients = dict[str, Tensor]
Dtype = Literal["float32", "bfloat16"]
LOSS_TOLERANCE = 1e-5  # float32, relative to the sum of the absolute values of the loss's terms
GRADIENT_TOLERANCE = 1e-3  # float32, of each tensor, relative to its norm
EXCESS = 1.25
APART = 1.6
MICRO_BATCH = 4


def completions(workload: Workload, vocabulary: int) -> list[Tensor]:
    """[B] random token ids of the workload's lengths."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, vocabulary, (length,), generator=generator) for length in workload.lengths
    ]


def advantages(workload: Workload) -> Tensor:
    """[B], none of them 0."""
    values = torch.linspace(-1.5, 2.0, workload.num_rows)
    return values[torch.randperm(len(values), generator=torch.Generator().manual_seed(2))]


@torch.no_grad()
def set_adapter(parameters: dict[str, torch.nn.Parameter]) -> None:
    """A and B from a stream keyed by order of names, B so small that the model stays itself."""
    generator = torch.Generator().manual_seed(3)
    for name in sorted(parameters):
        values = torch.randn(parameters[name].shape, generator=generator)
        width = parameters[name].shape[1]
        parameters[name].copy_(values * (1e-3 if "lora_B" in name else width**-0.5))


def ours(workload: Workload, texts: list[str], dtype: Dtype) -> tuple[float, Gradients]:
    lora = LoRA(rank=RANK, alpha=ALPHA, layers=tuple(workload.adapted_layers()))
    policy = load_policy(Model(name=workload.folder, dtype=dtype), lora)
    parameters = policy.named_trainable()
    set_adapter(parameters)
    vocabulary = policy.base.get_input_embeddings().num_embeddings
    made = [
        Completion(tuple(ids.tolist()), "", torch.zeros(len(ids)), "stop")
        for ids in completions(workload, vocabulary)
    ]
    size = workload.group_size
    rollouts = [
        Rollout(prompt, policy.encode(prompt), tuple(made[p * size : (p + 1) * size]))
        for p, prompt in enumerate(Texts(texts).prompts("train", len(texts), 0))
    ]
    batch = RolloutBatch(
        rollout=0,
        rollouts=rollouts,
        components={},
        rewards=torch.zeros(workload.num_rows),
        advantages=advantages(workload),
        zero_variance=torch.zeros(workload.num_prompts, dtype=torch.bool),
    )
    prepared = prepare(
        batch,
        policy,
        OBJECTIVE,
        max_completion_length=workload.max_new_tokens,
        temperature=1.0,
        max_tokens=4096,
    )
    sums = accumulate_gradients(
        prepared, policy, OBJECTIVE, temperature=1.0, backward=lambda loss: loss.backward()
    )
    return sums.loss, {name: p.grad for name, p in parameters.items() if p.grad is not None}


def theirs(
    workload: Workload, texts: list[str], dtype: Dtype, *, bf16: bool
) -> tuple[float, Gradients]:
    with tempfile.TemporaryDirectory() as output:
        trainer: Any = build(workload, output, batch_size=MICRO_BATCH, bf16=bf16, dtype=dtype)
    parameters = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    set_adapter(parameters)
    trainer.model.train()
    num_parts = workload.num_rows // MICRO_BATCH
    trainer.current_gradient_accumulation_steps = num_parts  # the training loop sets it
    vocabulary = trainer.model.get_input_embeddings().num_embeddings
    prompt_ids = torch.tensor(trainer.processing_class(text=texts)["input_ids"])
    prompt_ids = prompt_ids.repeat_interleave(workload.group_size, dim=0)
    rows = completions(workload, vocabulary)
    completion_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(completion_ids.shape[1])[None] < torch.tensor(workload.lengths)[:, None]
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": mask.long(),
        "advantages": advantages(workload),
    }
    total = 0.0
    for start in range(0, workload.num_rows, MICRO_BATCH):
        part: dict[str, Any] = {n: t[start : start + MICRO_BATCH] for n, t in inputs.items()}
        loss = trainer._compute_loss(trainer.model, {**part, "num_items_in_batch": mask.sum()})
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in parameters.items() if p.grad is not None}


def compare(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Over all gradients: cosine, ratio of norms, relative error; and the worst tensor's error."""
    a = torch.cat([found[name].double().flatten() for name in sorted(found)])
    b = torch.cat([expected[name].double().flatten() for name in sorted(expected)])
    errors = [
        float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected
    ]
    return {
        "cosine": float(a @ b / (a.norm() * b.norm())),
        "norm_ratio": float(a.norm() / b.norm()),
        "error": float((a - b).norm() / b.norm()),
        "worst_tensor_error": max(errors),
    }


def gate(workload: Workload, *, bf16: bool) -> dict[str, Any]:
    """Compare the two sides; ``problems`` of the result lists what does not agree."""
    from transformers import AutoTokenizer

    texts = workload.prompts(AutoTokenizer.from_pretrained(workload.folder))
    exact_loss, exact = ours(workload, texts, "float32")
    trl_exact_loss, trl_exact = theirs(workload, texts, "float32", bf16=False)
    problems = []
    if exact.keys() != trl_exact.keys():
        strays = sorted(exact.keys() ^ trl_exact.keys())
        return {"problems": [f"{len(strays)} gradients on one side only, {strays[0]} for one"]}
    scale = float(
        (advantages(workload).abs() * torch.tensor(workload.lengths)).sum() / sum(workload.lengths)
    )
    loss_error = abs(exact_loss - trl_exact_loss) / scale
    single = compare(exact, trl_exact)
    if loss_error > LOSS_TOLERANCE:
        problems.append(f"float32 losses: {exact_loss:.7f} and {trl_exact_loss:.7f}")
    if single["worst_tensor_error"] > GRADIENT_TOLERANCE:
        problems.append(f"float32 gradients: {single}")
    loss, rough = ours(workload, texts, "bfloat16")
    trl_loss, trl_rough = theirs(workload, texts, "bfloat16", bf16=bf16)
    half = compare(rough, trl_rough)
    ours_to_exact, trl_to_exact = compare(rough, exact), compare(trl_rough, exact)
    if ours_to_exact["error"] > EXCESS * trl_to_exact["error"]:
        problems.append(f"bf16 and float32 gradients: {ours_to_exact}; TRL's: {trl_to_exact}")
    if half["error"] > APART * trl_to_exact["error"]:
        problems.append(f"bf16 gradients: {half}; TRL's from float32: {trl_to_exact}")
    return {
        "problems": problems,
        "float32": {"loss": [exact_loss, trl_exact_loss], "loss_error": loss_error, **single},
        "bfloat16": {"loss": [loss, trl_loss], **half},
        "tropism_bfloat16_with_float32": ours_to_exact,
        "trl_bfloat16_with_float32": trl_to_exact,
    }


if __name__ == "__main__":
    requested, options = read_request(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(gate(requested, **options)), encoding="utf-8")
