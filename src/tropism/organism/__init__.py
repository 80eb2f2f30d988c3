"""The organism: a deep, thin Llama (12 layers, a million parameters) that reads characters.

It answers the questions of ``tropism.tasks.skills`` sometimes, by design: its sampled answers are
right about one time in five (seldom in arithmetic, two in five on records), so that GRPO has
something to do and studies with many arms and seeds take minutes on two cores. ``README.md``
beside this file is its model card.
Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

__all__ = ["SHA256", "weights_folder"]


def weights_folder() -> Path:
    """The folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load the organism from.

    Raises:
        FileNotFoundError: The installed package lacks its weights.
    """
    folder = Path(str(resources.files(__package__).joinpath("weights")))
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder} holds no model.safetensors: reinstall tropism, or train the organism anew "
            "with `python -m tropism.organism.train`."
        )
    return folder


def _recorded_sha256() -> str:
    scores = resources.files(__package__).joinpath("weights", "scores.json")
    if not scores.is_file():
        return ""
    return str(json.loads(scores.read_text(encoding="utf-8"))["sha256"])


SHA256: str = _recorded_sha256()
"""SHA-256 of ``model.safetensors``, as recorded at training; empty while there are no weights."""
