"""Where a decoder recalls a fact: causal tracing, the protocol of ROME (Meng et al., 2202.05262).

A prompt runs once as it is and in ten copies with noise on the embeddings of its subject. Then part
of what the clean run computed is put into the copies: the output of one layer at one token, or the
outputs of the MLPs, or the attentions, of a window of layers at one token. The effect is what
that brings back of the answer's probability, in the mean over the copies:

    effect = p(answer, restored) - p(answer, corrupted)

How this differs from the authors' code:
1. Only the suffix runs: a pass starts from what entered the lowest layer that it changes, and
   nothing below that layer is computed again.
2. Tokens before the subject are left out. They are the same in all copies, so that their effect is
   exactly 0.
3. All that starts at the same layer shares passes, tokens and windows alike.
4. Noise is keyed by seed and fact, whatever was traced before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tropism.forward.trunk import Trunk, started_from
from tropism.measurements.facts import Fact, TokenizedFact
from tropism.measurements.traced_decoder import NAMES, Part, TracedDecoder
from tropism.measurements.traced_effects import Kind

HEAD_ROWS = 64
"""Rows whose logits exist at the same time."""


@dataclass(frozen=True)
class Tracing:
    """The protocol's settings; the defaults are ROME's.

    Args:
        noise: Standard deviation of the noise, in standard deviations of the embeddings of all
            subjects.
        num_copies: Corrupted copies of a prompt.
        window: Layers whose MLP or attention outputs are restored together; about the middle one.
        max_tokens: Tokens of one forward pass; bounds memory. At least the copies of one prompt.
        seed: Of the noise.

    Raises:
        ValueError: Noise below 0, or a count below 1.
    """

    noise: float = 3.0
    num_copies: int = 10
    window: int = 10
    max_tokens: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.noise <= 0:
            raise ValueError(f"tracing.noise={self.noise}: give more than 0.")
        for name in ("num_copies", "window", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"tracing.{name}={getattr(self, name)}: give at least 1.")


@dataclass(frozen=True)
class Restoration:
    """What of the clean run is put into the copies.

    Args:
        kind: Outputs of a whole layer, of MLPs or of attentions.
        layers: A range with a step of 1; of one layer for ``state``.
        tokens: At which tokens.
    """

    kind: Kind
    layers: range
    tokens: tuple[int, ...]

    @property
    def depth(self) -> int:
        """The lowest layer that has to run."""
        return self.layers.start + (self.kind == "state")


def draw_noise(fact: Fact, shape: tuple[int, ...], *, deviation: float, seed: int) -> Tensor:
    """Normal noise that depends on the seed and the fact's words alone.

    Args:
        fact: The fact.
        shape: (copies, tokens of the subject, D).
        deviation: Its standard deviation.
        seed: Of the tracing.
    """
    digest = hashlib.sha256(f"{fact.prompt}\n{fact.subject}".encode()).digest()
    key = [seed, *np.frombuffer(digest, dtype=np.uint32).tolist()]
    drawn = np.random.default_rng(key).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(drawn) * deviation


class TracedFact:
    """The clean and the corrupted runs of one prompt, and what restoring brings back.

    Args:
        decoder: The model.
        fact: The prompt.
        noise: [copies, tokens of the subject, D], added to the subject's embeddings.
        max_tokens: Tokens of one forward pass.
    """

    def __init__(
        self, decoder: TracedDecoder, fact: TokenizedFact, noise: Tensor, *, max_tokens: int
    ) -> None:
        self._decoder, self._fact, self._max_tokens = decoder, fact, max_tokens
        self._copies = len(noise)
        self._states: list[Tensor] = []
        self._outputs: dict[Part, list[Tensor]] = {part: [] for part in NAMES}
        probabilities, first = self._run(noise.to(decoder.device))
        self.clean = float(probabilities[0])
        self.corrupted = float(probabilities[1:].mean())
        self.is_known = first == fact.answer_id

    @torch.no_grad()
    def _run(self, noise: Tensor) -> tuple[Tensor, int]:
        """Run all copies once and keep what they compute.

        ``_states[d]`` [1 + copies, T, D] enters layer d (after the embedding for d = 0, before
        whatever the family adds to it); ``_outputs[part][l]`` [T, D] are the clean run's.

        Returns:
            [1 + copies] p(answer), and the clean run's first choice.
        """
        subject = slice(self._fact.start, self._fact.end)

        def corrupt(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            output = output.clone()
            output[1:, subject] += noise
            self._states.append(output)
            return output

        def keep_state(_: nn.Module, __: Any, output: Tensor) -> None:
            self._states.append(output)

        with ExitStack() as hooks:
            hooks.enter_context(_hook(self._decoder.embedding, corrupt))
            for layer in self._decoder.layers:
                hooks.enter_context(_hook(layer, keep_state))
            for part, modules in self._decoder.parts.items():
                for module in modules:
                    kept = self._outputs[part]

                    def keep(_: nn.Module, __: Any, output: Any, kept: Any = kept) -> None:
                        kept.append(_tensor(output)[0])

                    hooks.enter_context(_hook(module, keep))
            final = self._decoder.final_states(self._fact.ids, 1 + self._copies)
        return self._probabilities(final), int(self._decoder.head(final[:1]).argmax())

    def _probabilities(self, final: Tensor) -> Tensor:
        """[rows] p(answer) from [rows, D] last hidden states; the softmax is in fp32."""
        parts = [self._decoder.head(rows).float() for rows in final.split(HEAD_ROWS)]
        answers = [part.softmax(dim=-1)[:, self._fact.answer_id] for part in parts]
        return torch.cat(answers)

    def effects(self, kind: Kind, window: int) -> list[list[float]]:
        """The effect at each layer and traced token, [L][len(fact.traced)].

        Args:
            kind: ``state`` for single layers, else a window about each layer.
            window: Layers from ``l - window // 2`` up to, without it, ``l + ceil(window / 2)``.
        """
        num_layers = len(self._decoder.layers)
        restorations = [
            Restoration(kind, _window(layer, num_layers, 1 if kind == "state" else window), (at,))
            for layer in range(num_layers)
            for at in self._fact.traced
        ]
        found = self.restored(restorations)
        width = len(self._fact.traced)
        return [
            [p - self.corrupted for p in found[row * width : (row + 1) * width]]
            for row in range(num_layers)
        ]

    @torch.no_grad()
    def restored(self, restorations: Sequence[Restoration]) -> list[float]:
        """The mean over the copies of p(answer), with each of these restored."""
        found: dict[int, float] = {}
        by_depth: dict[int, list[int]] = {}
        for i, restoration in enumerate(restorations):
            by_depth.setdefault(restoration.depth, []).append(i)
        at_once = max(1, self._max_tokens // (self._copies * len(self._fact.ids)))
        for depth, members in by_depth.items():
            for start in range(0, len(members), at_once):
                some = members[start : start + at_once]
                final = self._suffix(depth, [restorations[i] for i in some])
                means = self._probabilities(final).view(len(some), -1).mean(dim=1)
                found.update(zip(some, means.tolist(), strict=True))
        return [found[i] for i in range(len(restorations))]

    def _suffix(self, depth: int, restorations: Sequence[Restoration]) -> Tensor:
        """[restorations * copies, D] last hidden states; the layers below ``depth`` do not run."""
        clean = self._states[depth][0]
        hidden = self._states[depth][1:].repeat(len(restorations), 1, 1)
        rows = hidden.view(len(restorations), self._copies, *hidden.shape[1:])
        for row, restoration in zip(rows, restorations, strict=True):
            if restoration.kind == "state":
                row[:, list(restoration.tokens)] = clean[list(restoration.tokens)]
        with ExitStack() as hooks:
            for part, modules in self._decoder.parts.items():
                for layer, module in enumerate(modules):
                    patched = [
                        (i, r.tokens)
                        for i, r in enumerate(restorations)
                        if r.kind == part and layer in r.layers
                    ]
                    if patched:
                        values = self._outputs[part][layer]
                        hooks.enter_context(_hook(module, self._patch(patched, values)))
            if depth == 0:
                hooks.enter_context(_hook(self._decoder.embedding, lambda *_: hidden))
            else:
                hooks.enter_context(started_from(self._decoder.layers, Trunk(depth, hidden)))
            return self._decoder.final_states(self._fact.ids, len(hidden))

    def _patch(
        self, patched: Sequence[tuple[int, tuple[int, ...]]], values: Tensor
    ) -> Callable[..., Any]:
        """A hook that puts the clean ``values`` [T, D] into the rows of (restoration, tokens)."""

        def patch(_: nn.Module, __: Any, output: Any) -> Any:
            found = _tensor(output).clone()
            rows = found.view(-1, self._copies, *found.shape[1:])
            for i, tokens in patched:
                rows[i][:, list(tokens)] = values[list(tokens)]
            return (found, *output[1:]) if isinstance(output, tuple) else found

        return patch


def _window(layer: int, num_layers: int, size: int) -> range:
    """ROME's window about a layer, cut at both ends."""
    return range(max(0, layer - size // 2), min(num_layers, layer + (size + 1) // 2))


def _tensor(output: Any) -> Tensor:
    """A module's output; attentions give their weights beside it."""
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


@contextmanager
def _hook(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
