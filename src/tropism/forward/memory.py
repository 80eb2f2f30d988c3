"""Freed memory goes back to the system between sampling, and one backward and the next forward."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Have glibc release what was freed; elsewhere nothing.

    Activations and packed weights are many blocks of a megabyte. glibc keeps them after they are
    freed, and what comes next, of other sizes, does not fit into them: a quarter of the peak.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
