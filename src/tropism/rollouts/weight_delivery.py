"""Sends an engine what it lacks, and has it prove that it computes with it.

Works on a ``vllm.LLM``, or whatever has its methods, and imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from tropism.rollouts import engine_probe
from tropism.rollouts.adapter_folders import AdapterFolders
from tropism.rollouts.vllm_settings import Sync
from tropism.rollouts.weight_sync import Update, WeightSync


class Delivery:
    """The way from the trainer's weights to an engine's.

    Attributes:
        lora_request: What completions must be asked for with; None where no adapter is in use.

    Args:
        llm: The engine.
        weights: The account of what it has.
        sync: Whole weights, or the adapter.
        request: Makes vLLM's ``LoRARequest`` of a name, a number and a folder.

    Raises:
        ValueError: The engine has no module for one of the policy's linears.
    """

    def __init__(
        self,
        llm: Any,
        weights: WeightSync,
        *,
        sync: Sync,
        request: Callable[[str, int, str], Any],
    ) -> None:
        self._llm, self._weights, self._sync, self._request = llm, weights, sync, request
        self._folders = AdapterFolders()
        self.lora_request: Any = None
        (known,) = llm.apply_model(engine_probe.names)
        lost = [group.name for group in weights.groups if group.name not in known]
        if lost:
            raise ValueError(
                f"engine: vLLM's model has no linear {lost[0]!r} ({len(lost)} of the trainer's are "
                "missing), so that weights sent there would be lost. Leave `engine` out: the "
                "trainer's own engine samples any model."
            )

    def moved(self) -> None:
        """Weights were updated."""
        self._weights.moved()

    def forget(self) -> None:
        """The engine has lost its weights."""
        self._weights.forget()

    def deliver(self) -> int | None:
        """Send what the engine lacks, and empty its prefix cache.

        Returns:
            The number of bytes; None where it lacks nothing.

        Raises:
            RuntimeError: The engine does not compute with what it was sent. It is then of no use
                any more: half an update cannot be mended.
        """
        update = self._weights.pending()
        if update is None:
            return None
        num_bytes = self._send_adapter() if self._sync == "adapter" else self._send(update)
        self._weights.delivered(update)
        self.reset_prefix_cache()
        return num_bytes

    def reset_prefix_cache(self) -> None:
        """What it holds is of older weights.

        Raises:
            RuntimeError: It was not emptied.
        """
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache, which is of older weights.")

    def _send(self, update: Update) -> int:
        weights = self._weights
        weights.require_whole(weights.names(update))
        num_bytes = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal num_bytes
            for name, tensor in weights.tensors(update):
                num_bytes += tensor.nbytes
                yield name, tensor

        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": counted()})
        wanted = frozenset(group.name for group in update.groups)
        (found,) = self._llm.apply_model(partial(engine_probe.answers, wanted=wanted))
        for group in update.groups:
            expected = weights.expected(group, update)
            engine_probe.require_same(group.name, found.get(group.name), expected, weights.dtype)
        return num_bytes

    def _send_adapter(self) -> int:
        """All of it, under a new name and number: nothing cached of an older one is found."""
        weights, engine = self._weights, self._llm.llm_engine
        if self.lora_request is not None:
            engine.remove_lora(self.lora_request.lora_int_id)
            self.lora_request = None
        pairs = weights.adapters()
        if not pairs:
            return 0
        version, folder = self._folders.write(weights.policy, pairs)
        self.lora_request = self._request(f"tropism-{version}", version, str(folder))
        engine.add_lora(self.lora_request)
        (found,) = self._llm.collective_rpc(engine_probe.adapter_answers, args=(version,))
        for group in weights.groups:
            expected = weights.expected_of_adapters(group, pairs)
            engine_probe.require_same(group.name, found.get(group.name), expected, weights.dtype)
        return sum(side.nbytes for pair in pairs.values() for side in pair)
