"""The Hugging Face hub and its local cache."""

from __future__ import annotations

from pathlib import Path
from urllib.error import HTTPError as StatusError
from urllib.request import Request, urlopen

from tropism.weights.conversion import problem_of
from tropism.weights.wheels import say

TIMEOUT_SECONDS = 3.0
FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "README.md",  # names the licence
]
NOT_FILES = ["*/*", "consolidated*"]  # exports to other formats, and second copies


def from_hub(hub_id: str, revision: str | None, tried: dict[str, str]) -> Path | None:
    """The Hugging Face cache's copy, brought up to date where the hub answers.

    Adds to ``tried`` why there is none.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]

    unreachable = _why_unreachable()
    if unreachable is None:
        say(f"looking for {hub_id} on the hub (kept in {HF_HUB_CACHE})")
    try:
        folder = Path(
            snapshot_download(
                hub_id,
                revision=revision,
                local_files_only=unreachable is not None,
                allow_patterns=FILES,
                ignore_patterns=NOT_FILES,
            )
        )
    except LocalEntryNotFoundError as error:
        tried[f"Hugging Face cache {HF_HUB_CACHE}"] = f"no complete copy of {hub_id}"
        tried[f"hub {hub_id}"] = unreachable or str(error).splitlines()[0]
    except (HTTPError, OSError) as error:  # no such repository, gated, or a broken download
        tried[f"hub {hub_id}"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    else:
        if not (problem := problem_of(folder)):
            return folder
        tried[f"hub {hub_id}"] = problem
    return None


def _why_unreachable() -> str | None:
    """None where the hub answers. Its own client waits for minutes where packets are dropped."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "not tried: HF_HUB_OFFLINE is set"
    try:
        request = Request(constants.ENDPOINT, method="HEAD")
        urlopen(request, timeout=TIMEOUT_SECONDS).close()
    except StatusError:
        return None  # it answered
    except OSError as error:
        return f"{constants.ENDPOINT} cannot be reached ({getattr(error, 'reason', error)})"
    return None
