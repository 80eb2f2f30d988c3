"""Adapters on their way to an engine: a folder and a number of its own for each version."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp

from peft import LoraConfig, PeftModel
from torch import Tensor

from tropism.lora.export import write_adapter
from tropism.policy import ADAPTER, Policy


class AdapterFolders:
    """Writes versions of a policy's adapter into temporary folders; the last one stays.

    Args:
        parent: Where the folders are made; the system's place for temporary files where None.
    """

    def __init__(self, parent: str | Path | None = None) -> None:
        self._parent = parent
        self._root: Path | None = None
        self._version = 0

    def write(self, policy: Policy, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[int, Path]:
        """Write a new version.

        Args:
            policy: Whose adapter it is.
            pairs: Name of a linear -> A and B, the scaling folded in.

        Returns:
            Its number, from 1, never given twice; and its folder.
        """
        if self._root is None:
            self._root = Path(mkdtemp(prefix="tropism-adapters-", dir=self._parent))
            weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        self._version += 1
        assert isinstance(policy.model, PeftModel)
        config = policy.model.peft_config[ADAPTER]
        assert isinstance(config, LoraConfig)
        folder = write_adapter(
            self._root / str(self._version),
            pairs,
            like=config,
            base_model_name_or_path=policy.source,
        )
        for older in self._root.iterdir():
            if older != folder:
                shutil.rmtree(older)
        return self._version, folder
