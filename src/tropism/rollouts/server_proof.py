"""Is a server's policy the trainer's? It has to give the log-probabilities of a fixed text.

1. At the start the server's base model must give the trainer's base's: another model, another
   revision or a quantised one does not.
2. A short draw at temperature 2 must come with log-probabilities at that temperature.
3. Each adapter that is loaded must give the trainer's of now, and lie nearer to them than to the
   base's: one that the server drops without a word does not.

Linears cannot be asked one by one over HTTP, as ``engine_probe`` does it. What moves the text by no
more than rounding is not seen here; ``rollouts/sampler_gap`` is measured on every completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tropism.lora.views import View
from tropism.policy import Policy
from tropism.rollouts.requests import Answer, Request
from tropism.rollouts.server_protocol import ServedModel
from tropism.types import MicroBatch, Prompt

TEXT = (
    "The cat sat on the mat. 12 + 30 = 42, and 7 * 8 = 56. "
    'Write JSON: {"name": "Ada", "age": 36, "tags": ["a", "b"]}. '
    "The capital of France is Paris; that of Italy is Rome."
)
NUM_GIVEN, NUM_DRAWN, TEMPERATURE = 8, 16, 2.0
"""Of the short draw: tokens of the text before it, its tokens, its temperature."""


def probe_token_ids(policy: Policy, *, context_length: int) -> tuple[int, ...]:
    """[N] the text as the trainer encodes it, cut to what fits with a token behind it."""
    ids = policy.encode(Prompt(id="probe", task="", text=TEXT))
    return ids[: context_length - 1]


def probe_request(token_ids: Sequence[int]) -> Request:
    """The short draw; no token ends it."""
    return Request(tuple(token_ids[:NUM_GIVEN]), (), NUM_DRAWN, TEMPERATURE, seed=0)


@torch.no_grad()
def trainer_logprobs(
    policy: Policy, token_ids: Sequence[int], *, num_given: int = 1, temperature: float = 1.0
) -> Tensor:
    """[N - num_given] fp32 on the CPU: the trainer's, of the tokens after the given ones."""
    ids = torch.tensor(token_ids)
    drawn = ids[None, num_given:]
    batch = MicroBatch(
        rows=torch.tensor([0]),
        prompt=ids[:num_given],
        targets=drawn,
        mask=torch.ones_like(drawn, dtype=torch.bool),
    )
    logprobs, _ = policy.completion_logprobs(batch.to(policy.device), temperature=temperature)
    return logprobs[0].cpu()


@contextmanager
def base_alone(policy: Policy) -> Iterator[None]:
    """No adapter takes part while inside."""
    with View() as view:
        for site in policy.sites:
            layer = policy.lora_layer(site)
            if layer is not None and not layer.disable_adapters:
                view.disable(layer)
        yield


class Proof:
    """What a server must say of the text, and how far off is too far.

    Attributes:
        token_ids: [N] of the text.
        base: [N - 1] the trainer's base's log-probabilities of it.
        noise: Mean gap of the server's base to that, nats a token: kernels, and dtypes.

    Args:
        policy: The trainer's; which adapters it has now does not matter.
        model: The server's.
        limit: Largest mean gap, nats a token; None for no limit.
    """

    def __init__(self, policy: Policy, model: ServedModel, limit: float | None) -> None:
        self.policy, self.model, self.limit = policy, model, limit
        length = min(policy.context_length, model.context_length)
        self.token_ids = probe_token_ids(policy, context_length=length)
        with base_alone(policy):
            self.base = trainer_logprobs(policy, self.token_ids)
        self.noise = 0.0

    def require_same_base(self, found: Tensor) -> None:
        """Refuse a server of another model.

        Args:
            found: [N - 1] what its base says of the text.

        Raises:
            ValueError: It is another one.
        """
        self.noise = gap = _gap(found, self.base)
        if self.limit is not None and not gap <= self.limit:
            raise ValueError(
                f"engine.url: the server's model {self.model.name!r} (loaded from "
                f"{self.model.root!r}) is not the trainer's base {self.policy.source!r}: its "
                f"log-probabilities of a fixed text are {gap:.3f} nats a token off, above "
                f"engine.max_sampler_gap={self.limit}. Start it with `vllm serve "
                f"{self.policy.source}`, of the same revision, not quantised; its --dtype should "
                "be the trainer's."
            )

    def require_processed(self, drawn: Answer) -> None:
        """Refuse log-probabilities that are not of the distribution that was drawn from.

        Args:
            drawn: The server's answer to ``probe_request``, by its base.

        Raises:
            ValueError: They are nearer to those at temperature 1.
        """
        ids = (*self.token_ids[:NUM_GIVEN], *drawn.token_ids)
        given = min(NUM_GIVEN, len(self.token_ids))
        found = torch.tensor(drawn.logprobs)
        with base_alone(self.policy):
            raw, processed = (
                _gap(found, trainer_logprobs(self.policy, ids, num_given=given, temperature=t))
                for t in (1.0, TEMPERATURE)
            )
        if raw < processed:
            raise ValueError(
                f"engine.url: the server's log-probabilities at temperature {TEMPERATURE:g} are "
                f"those at 1 (mean gap {raw:.3f} nats a token, {processed:.3f} at the right one): "
                "importance ratios would be wrong. Start it with "
                "--logprobs-mode processed_logprobs."
            )

    def require_adapter(self, found: Tensor) -> None:
        """Refuse an adapter with which the server does not compute as the trainer does now.

        Args:
            found: [N - 1] what the server's adapter says of the text.

        Raises:
            RuntimeError: It is another policy, or nearer to the base (where the adapter has moved
                the text by more than the noise of both).
        """
        expected = trainer_logprobs(self.policy, self.token_ids)
        gap, from_base = _gap(found, expected), _gap(found, self.base)
        moved = _gap(expected, self.base)
        is_off = self.limit is not None and not gap <= self.limit
        if is_off or (from_base < gap and moved > 4 * self.noise):
            raise RuntimeError(
                "after the weight sync the server does not compute with the adapter sent: its "
                f"log-probabilities of a fixed text are {gap:.3f} nats a token off the trainer's "
                f"and {from_base:.3f} off the base's, which the adapter moved by {moved:.3f}. It "
                "would sample from another policy. Leave `engine` out, or use VLLMEngine with "
                "engine.sync: merged."
            )


def _gap(one: Tensor, other: Tensor) -> float:
    """Mean absolute difference, nats a token."""
    return float((one - other).abs().mean())
