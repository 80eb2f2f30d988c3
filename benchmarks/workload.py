"""The work that both sides do: prompts, completion lengths, rewards, and what it costs at least.

Imports neither torch nor transformers by itself, so that a process which only describes work stays
small.
"""

from __future__ import annotations

import json
import resource
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

Layers = Literal["all", "top_half", "top_third"]
LAYERS: tuple[Layers, ...] = ("all", "top_half", "top_third")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 16, 32
LEARNING_RATE = 1e-5
CLIP = 0.2
NUM_WARMUP_STEPS = 1
SENTENCES = (
    "The committee met on a cold morning and read the letter twice before anyone spoke.",
    "Rivers carry sand to the sea, and the sea returns it to the shore in the winter storms.",
    "A good map leaves out almost everything, so that the one road you need can be seen.",
    "She counted the boxes again, wrote the number down, and locked the door behind her.",
)
FILLERS = (" the", " and", " a", ".", ",", "!", " I", "a", "e", "s", "1", " ")


@dataclass(frozen=True)
class Workload:
    """One rollout batch and its update, the same at every step.

    Args:
        model: Name, for reports.
        folder: Its config, safetensors and tokenizer; both sides load this.
        num_prompts: P.
        group_size: G completions of each prompt.
        prompt_tokens: Tokens of each prompt, BOS included.
        max_new_tokens: Limit of a completion; the lengths are spread from 60 % of it up to it.
        layers: Which layers carry LoRA, on all their linears.
        steps: Timed steps of one process, after one that is not timed.
    """

    model: str
    folder: str
    num_prompts: int = 2
    group_size: int = 8
    prompt_tokens: int = 64
    max_new_tokens: int = 96
    layers: Layers = "all"
    steps: int = 3

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion, EOS included; each group has short and long ones alike."""
        low, high = round(0.6 * self.max_new_tokens), self.max_new_tokens
        last = max(1, self.num_rows - 1)
        spread = [round(low + (high - low) * i / last) for i in range(self.num_rows)]
        return [
            spread[p + g * self.num_prompts]
            for p in range(self.num_prompts)
            for g in range(self.group_size)
        ]

    def adapted_layers(self) -> list[int]:
        """Indices of the layers that carry LoRA."""
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(self.folder)
        num_layers = int(config.get_text_config().num_hidden_layers)
        share = {"all": 1, "top_half": 2, "top_third": 3}[self.layers]
        return list(range(num_layers - num_layers // share, num_layers))

    def prompts(self, tokenizer: Any) -> list[str]:
        """P different texts of exactly ``prompt_tokens`` tokens."""
        return [text_of(tokenizer, self.prompt_tokens, first=p) for p in range(self.num_prompts)]

    def state(self) -> dict[str, Any]:
        return asdict(self)


def text_of(tokenizer: Any, num_tokens: int, *, first: int) -> str:
    """A text that the tokenizer makes exactly ``num_tokens`` of: sentences, repeated, then filler.

    Raises:
        ValueError: No filler leads to that number.
    """

    def count(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    start = first % len(SENTENCES)
    rotated = [*SENTENCES[start:], *SENTENCES[:start]]
    text = f"Story {first + 1}:"
    for word in islice(cycle(" ".join(rotated).split()), num_tokens):
        if count(f"{text} {word}") > num_tokens:
            break
        text = f"{text} {word}"
    while (missing := num_tokens - count(text)) > 0:
        longer = (text + filler for filler in FILLERS)
        text = next((t for t in longer if 0 < count(t) - count(text) <= missing), "")
        if not text:
            break
    if count(text) != num_tokens:
        raise ValueError(
            f"--prompt-tokens {num_tokens}: no text with that many tokens of this tokenizer was "
            "found; give another number (at least 8)."
        )
    return text


def reward_of(text: str) -> float:
    """A number in [0, 1) that differs for different texts and costs nothing."""
    return zlib.crc32(text.encode()) / 2**32


def linear_sizes(base: Any) -> dict[str, int]:
    """Weights of the linears of a causal LM by layer (``"0"``, ``"1"``, ...), and of its ``head``.

    Adapters are not counted.
    """
    from torch import nn

    head = base.get_output_embeddings()
    sizes = {"head": int(head.weight.numel())}
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear) and module is not head and "lora_" not in name:
            layer = next((part for part in name.split(".") if part.isdigit()), "other")
            sizes[layer] = sizes.get(layer, 0) + int(module.weight.numel())
    return sizes


def least_flops(
    sizes: dict[str, int],
    *,
    num_prompts: int,
    prompt_tokens: int,
    lengths: Sequence[int],
    layers: Sequence[int],
) -> dict[str, float]:
    """FLOPs that one step needs at the least, by phase; the same for both sides.

    A forward costs 2 x weights of the linears for each token, a backward as much again for the
    gradients of the inputs (the weights are frozen and have none), down to the lowest layer with
    an adapter. The head (``N_h`` weights) runs at completion tokens only. With ``N`` weights of all
    linears, ``N_b`` of those in the lowest adapted layer and above, ``S`` prompt tokens (each
    prompt once), ``C`` completion tokens of ``B`` rows::

        rollout = 2 N (S + C - B) + 2 N_h C              the last token of a row is never run
        train   = 2 (N + N_b) (S + C - B) + 4 N_h C

    Attention, adapters, norms, and work done twice (prompts once per completion, pads) are not
    counted: they lower the rate that a side achieves.
    """
    all_weights = sum(size for name, size in sizes.items() if name != "head")
    upper_weights = sum(
        size for name, size in sizes.items() if name.isdigit() and int(name) >= min(layers)
    )
    num_completion = sum(lengths)
    through_layers = num_prompts * prompt_tokens + num_completion - len(lengths)
    return {
        "rollout": 2.0 * all_weights * through_layers + 2.0 * sizes["head"] * num_completion,
        "train": 2.0 * (all_weights + upper_weights) * through_layers
        + 4.0 * sizes["head"] * num_completion,
    }


def peak_megabytes() -> float:
    """Most memory that this process had resident so far, imports included.

    ``VmHWM`` where there is a /proc: a child's ``ru_maxrss`` starts at its parent's.
    """
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def read_request(path: str) -> tuple[Workload, dict[str, Any]]:
    """What a process was asked to do: the workload, and the options of its side."""
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    return Workload(**request["workload"]), request["options"]
