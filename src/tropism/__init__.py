"""GRPO fine-tuning of small language models, measured and steered layer by layer.

Names are loaded on first use, so that ``import tropism`` needs neither torch nor vLLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tropism.data import PromptDataModule as PromptDataModule
    from tropism.grpo import GRPO as GRPO
    from tropism.sft import SFT as SFT

__version__ = "0.1.0"

_LAZY = {"GRPO": "tropism.grpo", "PromptDataModule": "tropism.data", "SFT": "tropism.sft"}

__all__ = ["GRPO", "SFT", "PromptDataModule", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tropism' has no attribute {name!r}")
