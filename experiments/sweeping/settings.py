"""A cell's settings as an overlay config for ``tropism fit``, and the hash of what comes of it.

Everything that a cell sets goes into one file, the last ``--config`` of its command: there a list
of callbacks can be added to (``trainer.callbacks+``), which ``--dotted=value`` does awkwardly.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .cells import Cell
from .specification import Sweep, fill, merged, placeholders

_CALLBACKS = "trainer.callbacks."


@dataclass(frozen=True)
class Identity:
    """The complete settings of a cell (seed and runs referred to included), and their hash."""

    settings: Mapping[str, Any]
    hash: str


def overlay(config: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted settings, nested.

    ``trainer.callbacks.CLASS.NAME`` sets an argument of the callback of that class, be it one of
    the settings, of ``config`` or a default one; ``init_args`` may be left out below it.

    Raises:
        ValueError: There is no such callback.
    """
    nested: dict[str, Any] = {}
    # A copy, since an argument may be set inside a callback that another setting adds.
    for name, value in copy.deepcopy(_callbacks_last(settings)).items():
        if name.startswith(_CALLBACKS):
            kind, *argument = name.removeprefix(_CALLBACKS).split(".")
            if not argument:
                raise ValueError(f"{name} names no argument: write {name}.NAME.")
            _put(_callback(nested, config, kind, name), argument, value)
        else:
            is_one = name.endswith("+") and not isinstance(value, list)
            _put(nested, name.split("."), [value] if is_one else value)
    return nested


def _callbacks_last(settings: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(settings.items(), key=lambda pair: pair[0].startswith(_CALLBACKS)))


def identities(sweep: Sweep, cells: Mapping[str, Cell]) -> dict[str, Identity]:
    """Key -> identity of every cell. Each config with overrides is parsed once, by the CLI itself.

    A run that a cell refers to counts by its own hash, wherever its folder is.

    Raises:
        ValueError: The CLI refuses a setting; the message names file, arm and setting.
    """
    known: dict[str, Identity] = {}
    templates: dict[str, dict[str, Any]] = {}
    for arm in sweep.arms:  # in order: those referred to are known by then
        for cell in (cell for cell in cells.values() if cell.arm.name == arm):
            written = merged(cell.arm.overrides, cell.grid)
            point = json.dumps([str(cell.arm.config), written], default=str)
            if point not in templates:
                templates[point] = _complete(sweep, cell, written)
            resolved = cell.settings(lambda key: f"{key}@{known[key].hash}")
            filled = {name: resolved[name] for name in written if placeholders(written[name])}
            settings = {**templates[point], "seed_everything": cell.seed, "filled_in": filled}
            text = json.dumps(settings, sort_keys=True, default=str)
            known[cell.key] = Identity(settings, hashlib.sha256(text.encode()).hexdigest()[:12])
    return known


def _complete(sweep: Sweep, cell: Cell, written: Mapping[str, Any]) -> dict[str, Any]:
    """The complete config, without what differs from run to run of an arm and grid point."""
    # Any seed will do here, but always the same one; a folder may not exist yet.
    seeds: dict[str, Any] = {"seed": 0, "other_seed": 1}
    sample = fill(_callbacks_last(written), lambda name: seeds.get(name, f"{{{name}}}"))
    config, problem = _parsed(cell.arm.config, sample)
    if config is None:
        where = f"{sweep.path}: arm {cell.arm.name!r}"
        for count in range(len(sample) + 1):  # the first setting that makes it unacceptable
            some = dict(list(sample.items())[:count])
            refused, problem = _parsed(cell.arm.config, some)
            if refused is None:
                break
        if count == 0:
            raise ValueError(f"{where}: config {cell.arm.config} is refused as it is: {problem}")
        name = list(sample)[count - 1]
        raise ValueError(
            f"{where}: setting {name}={written[name]!r} is refused (`tropism fit --config "
            f"{cell.arm.config} --print_config` lists all that there are): {problem}"
        )
    for name in ("config", "ckpt_path"):
        config.pop(name, None)
    trainer = config["trainer"]
    trainer.pop("logger", None)
    trainer["callbacks"] = {  # the last of a class is the one that runs
        item["class_path"].rsplit(".", 1)[-1]: item for item in trainer["callbacks"] or []
    }
    return config


def _parsed(config: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """What ``tropism fit --print_config`` prints; None, and what it says, where it refuses."""
    from tropism.cli import main

    try:
        text = as_yaml(overlay(config, settings))
    except ValueError as error:
        return None, str(error)
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "overlay.yaml"
        path.write_text(text, encoding="utf-8")
        arguments = ["fit", "--config", str(config), "--config", str(path), "--print_config"]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(arguments)
            except SystemExit as end:
                if end.code not in (0, None):
                    return None, err.getvalue().partition("error:")[2].strip()
    return yaml.safe_load(out.getvalue()), ""


def as_yaml(content: Mapping[str, Any]) -> str:
    """A config file's text."""
    return str(yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True))


def _callback(nested: dict[str, Any], config: Path, kind: str, name: str) -> Any:
    """The item of that class in the overlay, copied there if only config or defaults have it."""
    from tropism.cli import DEFAULT_CALLBACKS

    own = nested.get("trainer", {})
    in_file = (yaml.safe_load(config.read_text(encoding="utf-8")) or {}).get("trainer") or {}
    keys = ("callbacks+", "callbacks")
    lists = [place.get(key) or [] for place in (own, in_file) for key in keys]
    lists.append(DEFAULT_CALLBACKS)
    for place, items in enumerate(lists):
        for item in reversed(items if isinstance(items, list) else [items]):
            if item["class_path"].rsplit(".", 1)[-1] == kind:
                if place < 2:
                    return item
                copied = copy.deepcopy(item)
                nested.setdefault("trainer", {}).setdefault("callbacks+", []).append(copied)
                return copied
    raise ValueError(
        f"{name}: {config} has no callback {kind!r}, nor is it a default one: add it with "
        "trainer.callbacks+."
    )


def _put(tree: dict[str, Any], names: Sequence[str], value: Any) -> None:
    *inner, last = names
    for name in inner:
        tree = _arguments(tree, name)
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    _arguments(tree, last)[last] = value


def _arguments(tree: dict[str, Any], name: str) -> Any:
    """Where an object names its class, its arguments lie one level deeper."""
    is_argument = "class_path" in tree and name not in ("class_path", "init_args")
    return tree.setdefault("init_args", {}) if is_argument else tree
