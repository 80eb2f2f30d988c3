"""What a rollout engine is: it samples G completions per prompt from the current policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tropism.rollouts.pending import Pending
from tropism.types import GenerationProgress, Prompt, Rollout

if TYPE_CHECKING:
    from tropism.policy import Policy


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    top-p, top-k and min-p are not here on purpose: they narrow the sampler's support, and the
    trainer's log-probabilities would then belong to another distribution.

    Args:
        max_new_tokens: Completion limit in tokens.
        temperature: > 0; the policy's log-probabilities are taken at it too.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"sampling.max_new_tokens={self.max_new_tokens}: give at least 1 token."
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"sampling.temperature={self.temperature}: training needs a value above 0 "
                "(evaluation is greedy anyway)."
            )


class RolloutEngine(Protocol):
    """Samples from the trainer's policy.

    The engine must draw from exactly the policy that the trainer updates: ``bind`` hands it over
    once, ``sync`` is called after every update and before the next ``generate``.
    """

    def bind(self, policy: Policy) -> None:
        """Take the policy to sample from (once, after it is loaded)."""

    def sync(self) -> None:
        """The policy's weights have moved; the next ``generate`` must use the new ones."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        rollout: int,
        greedy: bool = False,
        progress: Callable[[GenerationProgress], None] | None = None,
    ) -> list[Rollout]:
        """Sample ``group_size`` completions for each prompt, in order.

        Randomness is keyed by (seed, rollout, prompt id, sample), so that a completion does not
        depend on which others are drawn beside it. ``greedy`` takes the likeliest token.

        Raises:
            ValueError: A prompt and ``max_new_tokens`` do not fit into the model's context.
        """
        ...


@runtime_checkable
class AheadEngine(Protocol):
    """An engine that can sample in a thread while the trainer's weights move."""

    def begin(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        rollout: int,
    ) -> Pending[Any]:
        """``generate``, begun: of the policy of now, whatever becomes of it.

        The weights are taken over before this returns. Whatever else is asked of the engine waits
        until these completions are there.
        """
        ...


@runtime_checkable
class RemoteEngine(Protocol):
    """An engine with weights of its own: it tells how it does, and is stopped where it drifts.

    Attributes:
        max_sampler_gap: Largest mean gap of log-probabilities to the trainer's, in nats a token,
            before the run stops; None for no limit.
    """

    max_sampler_gap: float | None

    def metrics(self) -> Mapping[str, float]:
        """Of the last ``generate`` and what it needed: name in TensorBoard -> value."""
        ...


class EngineUnreachableError(RuntimeError):
    """An engine elsewhere has been away for too long.

    Raised while completions are asked for: nothing of the rollout has happened yet, and the state
    of the run is that after the last one.
    """


class SamplerGapError(RuntimeError):
    """The engine samples from another policy than the trainer's; raised before the update."""


def require_small_gap(engine: RolloutEngine, gap: float, *, staleness: int = 0) -> None:
    """Stop where completions came from another policy than the one that is to learn from them.

    Args:
        engine: Where they came from; one without a limit passes.
        gap: Mean absolute difference of sampler's and trainer's log-probabilities, nats a token.
        staleness: Optimizer steps since they were sampled, which are part of the gap.

    Raises:
        SamplerGapError: It is above the engine's limit. No step was taken.
    """
    limit = engine.max_sampler_gap if isinstance(engine, RemoteEngine) else None
    if limit is not None and not gap <= limit:
        ahead = (
            f" {staleness} optimizer steps since they were sampled (rollouts_ahead=1) are part of "
            "it: lower optimizer.learning_rate, or set rollouts_ahead to 0."
            if staleness
            else ""
        )
        raise SamplerGapError(
            f"engine.max_sampler_gap={limit}: the engine's log-probabilities are {gap:.3f} nats a "
            "token off the trainer's. No step was taken. In bf16 some 0.02 is usual; more means "
            "that the engine lacks weights or samples otherwise. Compare with the trainer's own "
            "engine (leave `engine` out), try engine.sync: merged, or model.dtype: float32; raise "
            f"the limit only together with objective.mismatch.{ahead}"
        )
