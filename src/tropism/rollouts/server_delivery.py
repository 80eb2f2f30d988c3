"""The way from the trainer's adapter to a server: a folder, a name of its own for each version.

vLLM's prefix cache is keyed by an adapter's name and folder beside the tokens, so that nothing
computed with an older version, or by another run, is ever found again: it need not be emptied.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from torch import Tensor

from tropism.policy import Policy
from tropism.rollouts.adapter_folders import AdapterFolders
from tropism.rollouts.server_client import RefusedError, ServerClient
from tropism.rollouts.server_proof import Proof, probe_request
from tropism.rollouts.server_protocol import complete, load_adapter, score, unload_adapter
from tropism.rollouts.weight_sync import WeightSync


class ServerDelivery:
    """Keeps a server's adapter equal to the trainer's.

    Attributes:
        adapter_name: By which completions are asked for; None where no adapter is in use.

    Args:
        policy: The trainer's.
        adapter_folder: Where adapters are written, which the server must see too; None for the
            system's place for temporary files, where the server is on this machine.
    """

    def __init__(self, policy: Policy, adapter_folder: str | None) -> None:
        dtype = next(policy.base.parameters()).dtype
        self._policy = policy
        self._weights = WeightSync(policy, packed={}, dtype=dtype)
        self._folders = AdapterFolders(adapter_folder)
        self._run = secrets.token_hex(4)
        self.adapter_name: str | None = None

    def forget(self) -> None:
        """The server was started anew."""
        self._weights.forget()
        self.adapter_name = None

    async def try_out(self, client: ServerClient, proof: Proof) -> None:
        """Before anything is sampled: is the server's base the trainer's, does it take adapters?

        Raises:
            ValueError: No; names what the server lacks.
        """
        base = proof.model.name
        proof.require_same_base(await score(client, base, proof.token_ids))
        request = probe_request(proof.token_ids)
        (drawn,) = await complete(client, base, request, num_samples=1)
        proof.require_processed(drawn)
        pairs = {}
        for site in self._policy.sites:
            if (adapter := self._policy.adapter(site)) is not None:
                a, b = adapter.a.detach(), adapter.b.detach() * adapter.scaling
                pairs[site.name] = (a.cpu(), b.cpu())
        name, _ = await self._load(client, pairs)
        await unload_adapter(client, name)

    async def deliver(self, client: ServerClient, proof: Proof) -> int | None:
        """Load what the server lacks, and have it prove that it computes with it.

        Returns:
            The number of bytes; None where it lacks nothing.

        Raises:
            RuntimeError: It does not compute with the adapter.
        """
        update = self._weights.pending()
        if update is None:
            return None
        pairs = self._weights.adapters()
        older, name, num_bytes = self.adapter_name, None, 0
        if pairs:
            name, num_bytes = await self._load(client, pairs)
            proof.require_adapter(await score(client, name, proof.token_ids))
        if older is not None:
            await unload_adapter(client, older)
        self.adapter_name = name
        self._weights.delivered(update)
        return num_bytes

    async def _load(
        self, client: ServerClient, pairs: Mapping[str, tuple[Tensor, Tensor]]
    ) -> tuple[str, int]:
        """Write a new version and have it loaded; its name and number of bytes."""
        version, folder = self._folders.write(self._policy, pairs)
        name = f"tropism-{self._run}-{version}"
        try:
            await load_adapter(client, name, str(folder))
        except RefusedError as error:
            rank = max(len(a) for a, _ in pairs.values())
            lack = (
                "it has no way to load adapters while it runs"
                if error.is_unknown_route
                else f"it does not take the adapter in {folder}: {error.reason}"
            )
            raise ValueError(
                f"engine.url={client.url}: {lack}. Start the server with --enable-lora "
                f"--max-lora-rank {rank} (or the next larger one that vLLM has) and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment; where it runs on another "
                "machine, let engine.adapter_folder be a folder that both see under one name."
            ) from error
        return name, sum(side.nbytes for pair in pairs.values() for side in pair)
