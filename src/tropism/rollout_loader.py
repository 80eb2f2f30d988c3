"""Loaders that Lightning takes as they are: training batches that resume, and fixed ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from tropism.types import Prompt


class RolloutLoader:
    """Hands out the batches of a schedule, and can begin in the middle.

    Lightning saves ``state_dict`` with the fit loop and restores it before the first batch. No
    ``DataLoader`` itself, so that Lightning replaces no sampler and proposes no more workers.

    Args:
        batches: One list of prompts per rollout.
        identity: What the schedule depends on; a state saved under another is refused.
        num_workers: Processes of the DataLoader inside.
        num_processed: Batches of this epoch that the trainer has finished, or None where it does
            not train. Workers run ahead and a step may be under way while a checkpoint is
            written, so what was handed out is not what was used.
    """

    def __init__(
        self,
        batches: Sequence[list[Prompt]],
        identity: Mapping[str, Any],
        num_workers: int = 0,
        num_processed: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._batches = batches
        self._identity = dict(identity)
        self._num_workers = num_workers
        self._num_processed = num_processed
        self._start = 0
        self._handed_out = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Prompt]]:
        start, self._start = self._start, 0
        self._handed_out = start
        loader: DataLoader[list[Prompt]] = DataLoader(
            self._batches,  # type: ignore[arg-type]
            batch_size=None,
            sampler=range(start, len(self)),
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
        )
        for batch in loader:
            self._handed_out += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The next rollout's index, and what the schedule depends on."""
        processed = self._num_processed()
        rollout = self._handed_out if processed is None else processed
        return {"rollout": rollout, "identity": self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin at the saved rollout.

        Raises:
            ValueError: The state is of a run with other prompts or another order of them.
        """
        saved = state["identity"]
        if saved != self._identity:
            changed = [
                f"{key}: {saved.get(key)} then, {self._identity.get(key)} now"
                for key in {**saved, **self._identity}
                if saved.get(key) != self._identity.get(key)
            ]
            raise ValueError(
                "the checkpoint's run drew its prompts differently (" + "; ".join(changed) + "). "
                "Resume with its settings; to train longer, set num_train_prompts to its number."
            )
        self._start = self._handed_out = state["rollout"]


class PromptBatches:
    """A fixed list of prompts in batches of ``batch_size``, the last one shorter."""

    def __init__(self, prompts: Sequence[Prompt], batch_size: int) -> None:
        self._prompts, self._batch_size = prompts, batch_size

    def __len__(self) -> int:
        return math.ceil(len(self._prompts) / self._batch_size)

    def __iter__(self) -> Iterator[list[Prompt]]:
        for start in range(0, len(self._prompts), self._batch_size):
            yield list(self._prompts[start : start + self._batch_size])


def _as_it_is(batch: list[Prompt]) -> list[Prompt]:
    return batch
