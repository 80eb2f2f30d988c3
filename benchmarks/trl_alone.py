"""Imported before TRL's trainers, it keeps them from importing vLLM where that is installed.

They would do so unasked: memory and seconds that are not TRL's own.
"""

from trl import import_utils

import_utils.is_vllm_available = lambda min_version=None: False
