"""``tropism matched --a X.yaml --b Y.yaml``: which settings of two experiments differ.

Both configs are completed with every default first, so that what neither file mentions is compared
too. A comparison of two ways of training means something where nothing but the intended differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentParser

ABSENT = "-"


def main(arguments: Sequence[str], read: Callable[[str], Mapping[str, Any]]) -> None:
    """Entry point of ``tropism matched``; ``read`` completes the config of a file."""
    from rich.console import Console
    from rich.table import Table

    parser = ArgumentParser(prog="tropism matched", description=__doc__)
    parser.add_argument("--a", type=str, required=True, help="config of one experiment")
    parser.add_argument("--b", type=str, required=True, help="config of the other")
    options = parser.parse_args(list(arguments))
    a, b = flatten(read(options.a)), flatten(read(options.b))
    rows = differences(a, b)
    table = Table()
    for heading in ("setting", options.a, options.b):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if rows:
        console.print(table)
    num_equal = sum(a[name] == b.get(name) for name in a)
    console.print(f"{len(rows)} settings differ, {num_equal} are the same.", highlight=False)


def flatten(config: Any, prefix: str = "") -> dict[str, str]:
    """``a.b.0.c`` -> JSON of the value, for every leaf; empty lists and mappings are leaves.

    Callbacks go by their class rather than their place in the list, and ``init_args`` is left out
    of the names: ``model.group_size``, ``trainer.callbacks.Checkpoint.keep``.
    """
    if isinstance(config, Mapping) and config:
        children = {str(key): value for key, value in config.items()}
    elif isinstance(config, list) and config:
        children = {_name(item, place): item for place, item in enumerate(config)}
    else:
        return {prefix: json.dumps(config)}
    flat: dict[str, str] = {}
    for key, value in children.items():
        inside = prefix if key == "init_args" else f"{prefix}.{key}".lstrip(".")
        flat.update(flatten(value, inside))
    return flat


def _name(item: Any, place: int) -> str:
    if isinstance(item, Mapping) and "class_path" in item:
        return str(item["class_path"]).rsplit(".", 1)[-1]
    return str(place)


def differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(setting, value in a, value in b) of all that differ.

    What one side has and the other does not even have a part of stands in one row, ``objective.*``.
    """
    rows: dict[str, tuple[str, str, str]] = {}
    for name in sorted(a.keys() | b.keys()):
        if name in a and name in b:
            if a[name] != b[name]:
                rows[name] = (name, a[name], b[name])
            continue
        own, other = (a, b) if name in a else (b, a)
        whole = _only_here(name, other)
        num = sum(_is_below(key, whole) for key in own)
        value = own[name] if whole == name else f"{num} settings"
        label = whole if whole == name else f"{whole}.*"
        rows[label] = (label, value, ABSENT) if own is a else (label, ABSENT, value)
    return list(rows.values())


def _only_here(name: str, other: Mapping[str, str]) -> str:
    """The shortest beginning of ``name`` that nothing on the other side has."""
    parts = name.split(".")
    beginnings = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return next(b for b in beginnings if not any(_is_below(key, b) for key in other))


def _is_below(key: str, beginning: str) -> bool:
    return key == beginning or key.startswith(beginning + ".")
