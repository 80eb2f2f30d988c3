"""The next rollout, sampled while the policy learns from the present one.

Rollout k + 1 is of the policy *before* update k, so that whoever learns from it has to weigh its
tokens by trainer / sampler (``objective.mismatch``), which corrects for the engine's rounding and
for the update at once: the engine's log-probabilities are those of the moment of sampling, and
the trainer's those of now, whatever an update, a plan or a rollback did between.

1. An engine with weights of its own (``AheadEngine``) takes them over, and samples in a thread.
   The trainer's own engine computes with the trainer's modules, so that it samples at once: the
   same completions as in a thread, and no time saved.
2. Randomness is keyed by the rollout as always: a policy that does not move draws what it would
   have drawn at the rollout's turn.
3. A checkpoint holds the completions, for the policy that drew them is gone when it is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tropism.objective.mismatch import Correction
from tropism.rollouts.engine import AheadEngine, RolloutEngine, Sampling
from tropism.rollouts.pending import Pending
from tropism.types import Completion, Prompt, Rollout


def check_ahead(
    rollouts_ahead: int, *, mismatch: Correction, dropout: float, engine: RolloutEngine | None
) -> None:
    """Refuse what cannot be sampled ahead, or would be learnt from as if it were of now.

    Raises:
        ValueError: Names the setting, its value and the remedy.
    """
    if rollouts_ahead not in (0, 1):
        raise ValueError(
            f"rollouts_ahead={rollouts_ahead}: give 1 to sample the next rollout during an update, "
            "or 0 to sample each at its turn."
        )
    if rollouts_ahead and mismatch == "none":
        raise ValueError(
            "rollouts_ahead=1 with objective.mismatch='none': completions would count as the "
            "present policy's, and they are of the one before the last update. Set "
            "objective.mismatch to token_truncate (or token_mask, sequence_truncate, "
            "sequence_mask), or rollouts_ahead to 0."
        )
    sleep_level = getattr(engine, "sleep_level", 0)
    if rollouts_ahead and sleep_level:
        raise ValueError(
            f"rollouts_ahead=1 with engine.sleep_level={sleep_level}: the engine samples while "
            "the trainer trains, and cannot sleep then. Set one of the two to 0."
        )
    if rollouts_ahead and dropout and isinstance(engine, AheadEngine):
        raise ValueError(
            f"rollouts_ahead=1 with lora.dropout={dropout}: the engine's thread draws from torch's "
            "generator too, so that what is dropped would depend on how far it has come. Set one "
            "of the two to 0, or leave `engine` out."
        )


@dataclass(frozen=True)
class Drawn:
    """Completions of an earlier policy.

    Args:
        rollouts: P groups.
        step: Optimizer steps that their policy had taken.
        seconds: How long drawing them took.
    """

    rollouts: list[Rollout]
    step: int
    seconds: float

    @property
    def group_size(self) -> int:
        return len(self.rollouts[0].completions)


class Ahead:
    """Keeps the one rollout that is sampled before its turn."""

    def __init__(self) -> None:
        self._rollout: int | None = None  # None: nothing is kept
        self._step = 0
        self._seconds = 0.0
        self._drawn: Pending[Any] | list[Rollout] | Mapping[str, Any] = []

    def begin(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        rollout: int,
        step: int,
    ) -> None:
        """Sample a later rollout from the policy of now.

        Args:
            engine: Samples in a thread where it can, else before this returns.
            prompts: Of that rollout.
            group_size: G.
            sampling: How completions are drawn.
            seed: Keys the sampling, with ``rollout``.
            rollout: Whose turn is still to come.
            step: Optimizer steps so far.
        """
        options: dict[str, Any] = {"group_size": group_size, "sampling": sampling}
        options |= {"seed": seed, "rollout": rollout}
        if isinstance(engine, AheadEngine):
            self._drawn = engine.begin(prompts, **options)
        else:
            start = time.perf_counter()
            self._drawn = engine.generate(prompts, **options)
            self._seconds = time.perf_counter() - start
        self._rollout, self._step = rollout, step

    def take(self, prompts: Sequence[Prompt], *, rollout: int) -> Drawn | None:
        """The completions of ``rollout``, whose turn has come, once they are there.

        Args:
            prompts: Of this rollout; fewer may have been sampled, where sizes have changed since.
            rollout: The present one.

        Returns:
            None where they were not sampled ahead.

        Raises:
            RuntimeError: What was sampled are other prompts.
            Exception: Whatever ended the engine's thread.
        """
        if self._rollout is None:
            return None
        asked, drawn, self._rollout = self._rollout, self._drawn, None
        if isinstance(drawn, Pending):
            drawn = self._result(drawn)
        packed = _packed(drawn) if isinstance(drawn, list) else drawn
        ids = packed["prompt_ids"]
        if asked != rollout or ids != [prompt.id for prompt in prompts[: len(ids)]]:
            raise RuntimeError(
                f"rollout {asked} was sampled ahead with the prompts {ids}, but it is the turn of "
                f"rollout {rollout} with {[prompt.id for prompt in prompts]}. Set "
                "rollouts_ahead to 0."
            )
        rollouts = drawn if isinstance(drawn, list) else _unpacked(drawn, prompts)
        return Drawn(rollouts, self._step, self._seconds)

    def cancel(self) -> None:
        """Nothing is wanted any more; an engine that samples is stopped."""
        self._rollout = None
        if isinstance(self._drawn, Pending):
            self._drawn.cancel()

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """What is kept, as plain values and tensors; waits for it. None where there is nothing.

        Where the engine's thread has failed there is nothing either: ``take`` says so.
        """
        if self._rollout is None:
            return None
        drawn = self._drawn
        if isinstance(drawn, Pending):
            drawn.wait()
            if drawn.has_failed:
                return None
            drawn = self._result(drawn)
        packed = drawn if isinstance(drawn, Mapping) else _packed(drawn)
        own = {"rollout": self._rollout, "step": self._step, "seconds": self._seconds}
        return {**packed, **own}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Keep what ``state_dict`` gave; the prompts come with ``take``."""
        self.cancel()
        if state is not None:
            self._rollout, self._step = state["rollout"], state["step"]
            self._seconds, self._drawn = state["seconds"], dict(state)

    def _result(self, pending: Pending[Any]) -> list[Rollout]:
        rollouts = pending.result()
        self._seconds = pending.seconds
        return rollouts


def _packed(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return {
        "prompt_ids": [group.prompt.id for group in rollouts],
        "prompt_token_ids": [group.prompt_token_ids for group in rollouts],
        "completions": [[vars(one) for one in group.completions] for group in rollouts],
    }


def _unpacked(packed: Mapping[str, Any], prompts: Sequence[Prompt]) -> list[Rollout]:
    groups = zip(prompts, packed["prompt_token_ids"], packed["completions"], strict=False)
    return [
        Rollout(prompt, token_ids, tuple(Completion(**one) for one in completions))
        for prompt, token_ids, completions in groups
    ]
