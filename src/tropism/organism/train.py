"""Train the organism from nothing, score it, and write its folder.

    python -m tropism.organism.train --output weights          some minutes on one core

1. A Llama of 12 layers, 96 wide, 6 query heads on 2 key-value heads, tied embeddings. Projections
   that write into the residual stream start smaller by sqrt(2 L), as in GPT-2.
2. Muon for the layers' matrices and AdamW for the rest (or AdamW alone), linear warm-up, cosine
   decay to zero. The loss counts answer tokens, and question tokens with a small weight.
3. One optimizer step is one batch, cut into micro-batches of like length: little padding, and no
   batch that holds only one skill.
4. Answers are right at first and as noisy as the corpus from two thirds on: skills come before the
   calibration to noise that makes sampled answers fail now and then.
5. The weights are rounded to bf16, saved, loaded again and scored as a user would load them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer

from tropism.organism.corpus import draw_example
from tropism.organism.model import build_model
from tropism.organism.scores import score_table
from tropism.organism.tokenizer import build_tokenizer, save_tokenizer

IGNORED = -100
LENGTH_MULTIPLE = 8


def _collate(rows: list[tuple[list[int], int]], prompt_weight: float) -> dict[str, Tensor]:
    """Right-padded ids [B, T], labels [B, T] and loss weights [B, T] of the *next* token."""
    longest = max(len(ids) for ids, _ in rows)
    width = math.ceil(longest / LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    weights = torch.zeros(len(rows), width)
    for row, (tokens, num_prompt_tokens) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens) - 1] = torch.tensor(tokens[1:])
        weights[row, : num_prompt_tokens - 1] = prompt_weight
        weights[row, num_prompt_tokens - 1 : len(tokens) - 1] = 1.0
    return {"ids": ids, "labels": labels, "weights": weights}


def noise_at(progress: float) -> float:
    """Share of noisy answers: none in the first 0.45 of training, all of them after 0.65."""
    return min(1.0, max(0.0, (progress - 0.45) / 0.2))


def batches(
    tokenizer: Tokenizer,
    *,
    num_steps: int,
    batch_size: int,
    num_micro: int,
    prompt_weight: float,
    seed: int,
) -> Iterator[list[dict[str, Tensor]]]:
    """``num_steps`` batches, each as ``num_micro`` micro-batches sorted by length."""
    rng = random.Random(seed)
    encode = tokenizer.backend_tokenizer.encode
    micro_size = batch_size // num_micro
    for step in range(num_steps):
        rows = []
        for _ in range(batch_size):
            question, answer = draw_example(rng, noise_at(step / num_steps))
            prompt = encode(f"<bos><|user|>{question}<|end|><|assistant|>").ids
            rows.append((prompt + encode(f"{answer}<|end|>").ids, len(prompt)))
        rows.sort(key=lambda row: len(row[0]))
        starts = range(0, batch_size, micro_size)
        yield [_collate(rows[start : start + micro_size], prompt_weight) for start in starts]


def learning_rate(step: int, arguments: argparse.Namespace) -> float:
    """Linear warm-up, then cosine to zero at the last step."""
    if step < arguments.warmup:
        return float(arguments.learning_rate * (step + 1) / arguments.warmup)
    progress = (step - arguments.warmup) / max(1, arguments.steps - arguments.warmup)
    return float(arguments.learning_rate * 0.5 * (1 + math.cos(math.pi * progress)))


def build_optimizers(
    model: LlamaForCausalLM, kind: str, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon for the layers' matrices and AdamW for embedding and gains.

    Muon's steps are scaled to AdamW's root mean square, so that one learning rate serves both.
    """
    embedding = model.get_input_embeddings().weight
    gains = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    muon = [matrices] if kind == "muon" else []
    decayed = [embedding] if kind == "muon" else [embedding, *matrices]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return [
        torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True),
        *(
            torch.optim.Muon(
                hidden, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            for hidden in muon
        ),
    ]


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, arguments: argparse.Namespace) -> None:
    """Run ``arguments.steps`` optimizer steps in place."""
    optimizers = build_optimizers(model, arguments.optimizer, arguments.weight_decay)
    source = batches(
        tokenizer,
        num_steps=arguments.steps,
        batch_size=arguments.batch_size,
        num_micro=arguments.num_micro,
        prompt_weight=arguments.prompt_weight,
        seed=arguments.seed,
    )
    started, num_tokens = time.perf_counter(), 0
    for step, micro_batches in enumerate(source):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, arguments)
        total_weight = sum(float(micro["weights"].sum()) for micro in micro_batches)
        answer_loss, num_answer_tokens = 0.0, 0
        for micro in micro_batches:
            logits = model(input_ids=micro["ids"], use_cache=False).logits
            losses = cross_entropy(
                logits.flatten(0, 1), micro["labels"].flatten(), reduction="none"
            )  # (B*T,)
            weights = micro["weights"].flatten()
            ((losses * weights).sum() / total_weight).backward()
            answer_loss += float(losses.detach()[weights == 1.0].sum())
            num_answer_tokens += int((weights == 1.0).sum())
            num_tokens += int((micro["labels"] != IGNORED).sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        if step % arguments.log_every == 0 or step == arguments.steps - 1:
            seconds = time.perf_counter() - started
            print(
                f"step {step:5d}  answer loss {answer_loss / num_answer_tokens:.4f}  "
                f"{num_tokens / seconds:,.0f} tokens/s  {seconds:.0f} s",
                flush=True,
            )


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> str:
    """Write the folder in bf16 and return the SHA-256 of the weights file."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,  # left out, it would be 50
        top_p=1.0,
    )
    model.bfloat16().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def parser() -> argparse.ArgumentParser:
    """The command line; its defaults made the shipped weights."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--output", type=Path, required=True, help="folder to write")
    options.add_argument("--steps", type=int, default=2600)
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--num-micro", type=int, default=2, help="micro-batches a step")
    options.add_argument("--learning-rate", type=float, default=6e-3)
    options.add_argument("--warmup", type=int, default=30, help="steps")
    options.add_argument("--weight-decay", type=float, default=0.01)
    options.add_argument("--prompt-weight", type=float, default=0.05, help="loss on questions")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    options.add_argument("--log-every", type=int, default=25)
    options.add_argument("--eval-prompts", type=int, default=500, help="validation questions")
    return options


def main(argv: list[str] | None = None) -> None:
    """Train, save, score."""
    arguments = parser().parse_args(argv)
    if arguments.batch_size % arguments.num_micro:
        raise ValueError(
            f"--num-micro={arguments.num_micro} must divide --batch-size={arguments.batch_size}."
        )
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    started = time.perf_counter()
    train(model, tokenizer, arguments)
    seconds = time.perf_counter() - started
    sha256 = save(model, tokenizer, arguments.output)
    reloaded = AutoModelForCausalLM.from_pretrained(arguments.output, dtype=torch.float32)
    scores: dict[str, Any] = {
        "sha256": sha256,
        "training": {**vars(arguments), "output": None, "seconds": round(seconds)},
        **score_table(
            reloaded.eval(), tokenizer, num_prompts=arguments.eval_prompts, num_samples=8, seed=1
        ),
    }
    text = json.dumps(scores, indent=1) + "\n"
    (arguments.output / "scores.json").write_text(text, encoding="utf-8")
    for skill, row in scores["skills"].items():
        print(skill, {name: rate["value"] for name, rate in row.items()})


if __name__ == "__main__":
    main()
