"""A switch of placement under observation: unchanged outputs at once, and no spike after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tropism.finetuning import FineTuning
from tropism.loop.snapshot import Snapshot
from tropism.objective.kl import full_kl
from tropism.policy import Policy
from tropism.rollouts.collate import rows_of
from tropism.types import MicroBatch, RolloutBatch

WATCHED_TOKENS = 256
CHECKED_TOKENS = 64
REMEMBERED_ROLLOUTS = 8

Watched = dict[str, float | None]


class SwitchWatch:
    """What the policy does after a switch, beside what it did before, and the way back.

    Attributes:
        history_before: ``kl``, ``entropy`` and ``grad_norm`` of the last rollouts before a switch.
        since_switch: The same of every rollout since.
    """

    def __init__(self) -> None:
        self.history_before: deque[Watched] = deque(maxlen=REMEMBERED_ROLLOUTS)
        self.since_switch: list[Watched] = []
        self._snapshot: Snapshot | None = None
        self._states: list[tuple[MicroBatch, Tensor]] = []

    @property
    def is_on(self) -> bool:
        """Whether a switch is being watched."""
        return self._snapshot is not None

    def start(self, snapshot: Snapshot) -> None:
        """Watch from now on; what was seen so far is what came before."""
        self.stop()
        self._snapshot = snapshot

    def stop(self) -> None:
        """The switch is as good as any other state: forget the way back."""
        self.history_before.extend(self.since_switch)
        self.since_switch, self._snapshot = [], None

    def roll_back(self, module: FineTuning) -> None:
        """Go back to before the switch, and stop watching."""
        assert self._snapshot is not None
        self._snapshot.restore(module)
        self.since_switch, self._snapshot = [], None

    def before_update(self, policy: Policy, batch: RolloutBatch) -> None:
        """Remember the policy on some completions."""
        with torch.no_grad():
            self._states = [
                (part, policy.completion_states(part))
                for part in _some_completions(policy, batch, WATCHED_TOKENS)
            ]

    def after_update(
        self, policy: Policy, metrics: Mapping[str, float | None], *, temperature: float
    ) -> float | None:
        """Note the rollout; the mean KL(before || after) of its update where it was remembered."""
        kl = None
        if self._states:
            with torch.no_grad():
                kls = [
                    full_kl(
                        states,
                        policy.completion_states(part),
                        head=policy.head,
                        temperature=temperature,
                    )
                    for part, states in self._states
                ]
            kl = float(torch.cat(kls).mean())
            self._states = []
        seen: Watched = {"kl": kl, "entropy": metrics["entropy"], "grad_norm": metrics["grad_norm"]}
        (self.since_switch if self.is_on else self.history_before).append(seen)
        return kl

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to watch on."""
        return {
            "history_before": list(self.history_before),
            "since_switch": list(self.since_switch),
            "snapshot": None if self._snapshot is None else vars(self._snapshot),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        self.history_before = deque(state["history_before"], maxlen=REMEMBERED_ROLLOUTS)
        self.since_switch = list(state["since_switch"])
        snapshot = state["snapshot"]
        self._snapshot = None if snapshot is None else Snapshot(**snapshot)


@contextmanager
def require_same_outputs(policy: Policy, batch: RolloutBatch | None) -> Iterator[None]:
    """What happens inside must leave policy and reference as they are, bit for bit.

    Args:
        policy: Under change.
        batch: The rollout whose completions are compared; None (before the first) skips it.

    Raises:
        RuntimeError: The hidden states before the head differ.
    """
    parts = [] if batch is None else list(_some_completions(policy, batch, CHECKED_TOKENS))
    before = _outputs(policy, parts)
    yield
    after = _outputs(policy, parts)
    if any(not torch.equal(one, other) for one, other in zip(before, after, strict=True)):
        raise RuntimeError(
            "a switch of placement changed the policy or its reference, which it never may: this "
            "is a fault of the plan's execution. Leave AdaptiveLoRA out, and report it."
        )


@torch.no_grad()
def _outputs(policy: Policy, parts: list[MicroBatch]) -> list[Tensor]:
    was_training = policy.model.training
    policy.model.eval()
    try:
        outputs = [policy.completion_states(part) for part in parts]
        if policy.uses_lora and parts:
            with policy.reference():
                outputs += [policy.completion_states(part) for part in parts]
    finally:
        policy.model.train(was_training)
    return outputs


def _some_completions(policy: Policy, batch: RolloutBatch, max_tokens: int) -> Iterator[MicroBatch]:
    """One completion of each prompt until there are about so many tokens."""
    num_tokens = 0
    for index in range(len(batch.rollouts)):
        row = index * batch.group_size
        num_tokens += len(batch.completions[row].token_ids)
        if index and num_tokens > max_tokens:
            return
        yield rows_of(batch.rollouts, [row], pad_token_id=policy.pad_token_id).to(policy.device)
