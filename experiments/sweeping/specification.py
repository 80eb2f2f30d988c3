"""What a sweep file says, checked: arms with their settings, in an order in which they can run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
SWEEP_KEYS = ("name", "question", "seeds", "overrides", "grid", "arms", "results", "collect")
ARM_KEYS = ("config", "overrides", "grid", "seeds", "needs")
SET_BY_THE_SWEEP = ("seed_everything", "trainer.logger", "ckpt_path", "config")
_NAME = re.compile(r"[\w.+-]+")
_PLACEHOLDER = re.compile(r"\{(seed|other_seed|run:[^{}]*)\}")


@dataclass(frozen=True)
class Arm:
    """One way of training. Settings are dotted CLI settings; common ones are among them."""

    name: str
    config: Path
    overrides: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    seeds: tuple[int, ...]
    needs: tuple[str, ...]
    named_needs: tuple[str, ...]  # those of the key ``needs``: the others are references

    def other_seed(self, seed: int) -> int:
        """The next seed of the list, the first after the last."""
        return self.seeds[(self.seeds.index(seed) + 1) % len(self.seeds)]


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file; an arm comes after those that it needs."""

    path: Path
    name: str
    question: str
    arms: Mapping[str, Arm]
    results: Path | None
    collect: str | None


def load(path: str | Path) -> Sweep:
    """Read a sweep file.

    Raises:
        ValueError: It is no sweep; the message names the file, the arm, the key and the remedy.
    """
    path = Path(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as a sweep file: {error}") from error
    content = _mapping(content, str(path), "the file")
    _known(content, SWEEP_KEYS, f"{path}")
    for key in ("name", "question", "arms"):
        if not content.get(key):
            raise ValueError(f"{path} has no {key!r}: add it (see experiments/README.md).")
    for key in ("name", "question", "results", "collect"):
        if not isinstance(content.get(key, ""), str):
            raise ValueError(f"{path}: {key} is {content[key]!r}: give text, in quotes.")
    if not _NAME.fullmatch(content["name"]):
        raise ValueError(f"{path}: name {content['name']!r} names a folder: use letters, -, _.")
    if "collect" in content and "results" not in content:
        raise ValueError(f"{path} has 'collect' but no 'results': name the CSV file of the rows.")
    arms = _mapping(content["arms"], str(path), "arms")
    results = content.get("results")
    return Sweep(
        path=path,
        name=content["name"],
        question=content["question"].strip(),
        arms=_in_order({name: _arm(name, arms, content, path) for name in arms}, path),
        results=None if results is None else path.parent / results,
        collect=content.get("collect"),
    )


def merged(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Later settings win; lists under a name that ends in ``+`` are joined."""
    result: dict[str, Any] = {}
    for name, value in (pair for mapping in settings for pair in mapping.items()):
        is_joined = name.endswith("+") and name in result
        result[name] = [*_listed(result[name]), *_listed(value)] if is_joined else value
    return result


def fill(value: Any, answer: Callable[[str], Any]) -> Any:
    """``value`` with each placeholder replaced; one that is the whole text keeps its type."""
    if isinstance(value, Mapping):
        return {key: fill(item, answer) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, answer) for item in value]
    if not isinstance(value, str):
        return value
    if whole := _PLACEHOLDER.fullmatch(value):
        return answer(whole[1])
    return _PLACEHOLDER.sub(lambda match: str(answer(match[1])), value)


def placeholders(value: Any) -> list[str]:
    """``seed``, ``other_seed``, ``run:ARM`` or ``run:ARM:other_seed``, each once."""
    return list(dict.fromkeys(_PLACEHOLDER.findall(json.dumps(value, default=str))))


def _arm(name: Any, arms: Mapping[str, Any], sweep: Mapping[str, Any], path: Path) -> Arm:
    where = f"{path}: arm {name!r}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}: an arm names a folder: use letters, digits, -, _ and quotes.")
    arm = _mapping(arms[name], where, "the arm")
    _known(arm, ARM_KEYS, where)
    own_grid = _mapping(arm.get("grid"), where, "grid")
    common_grid = _mapping(sweep.get("grid"), str(path), "grid")
    own = _overrides(arm.get("overrides"), path, where)
    common = _overrides(sweep.get("overrides"), path, str(path))
    grid = {**common_grid, **own_grid}
    for setting, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{where}: grid {setting}={values!r}: give a list of values.")
    for setting in grid.keys() & (own.keys() | (common.keys() & common_grid.keys())):
        if not setting.endswith("+"):
            raise ValueError(f"{where}: {setting} is in overrides and in grid: take one away.")
    settings = merged(common, own)
    for setting in (*settings, *grid):
        for taken in SET_BY_THE_SWEEP:
            if setting == taken or setting.startswith(taken + "."):
                raise ValueError(f"{where}: {setting} is set by the sweep itself: take it away.")
    needs = tuple(_listed(arm.get("needs", [])))
    referred = []
    for reference in placeholders([settings, grid]):
        kind, _, rest = reference.partition(":")
        target, colon, other = rest.partition(":")
        if kind == "run" and (colon and other != "other_seed"):
            raise ValueError(
                f"{where}: {{{reference}}} is no reference: write {{run:ARM}} or "
                "{run:ARM:other_seed}."
            )
        referred += [target] if kind == "run" else []
    for target in (*needs, *referred):
        if target not in arms:
            raise ValueError(
                f"{where} needs arm {target!r}, which the file has not; it has {sorted(arms)}."
            )
    return Arm(
        name=name,
        config=_config(arm.get("config"), path, where),
        overrides=settings,
        grid=grid,
        seeds=_seeds(arm.get("seeds", sweep.get("seeds")), where),
        needs=tuple(dict.fromkeys((*needs, *referred))),
        named_needs=needs,
    )


def _overrides(value: Any, path: Path, where: str) -> Mapping[str, Any]:
    """A mapping, the name of a file beside the sweep file that has one, or a list of these."""
    if isinstance(value, list):
        return merged(*(_overrides(item, path, where) for item in value))
    if not isinstance(value, str):
        return _mapping(value, where, "overrides")
    file = path.parent / value
    if not file.is_file():
        raise ValueError(f"{where}: overrides {value!r}: there is no {file}; name a file or list.")
    content = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    return _mapping(content, where, f"the content of {value}")


def _config(config: Any, path: Path, where: str) -> Path:
    for folder in (path.parent, REPOSITORY):
        if isinstance(config, str) and (folder / config).is_file():
            return folder / config
    raise ValueError(
        f"{where}: config {config!r} is neither beside the sweep file nor in {REPOSITORY}: "
        "name an existing file."
    )


def _seeds(seeds: Any, where: str) -> tuple[int, ...]:
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"{where}: seeds={seeds!r}: give a list of different whole numbers.")
    return tuple(seeds)


def _in_order(arms: Mapping[str, Arm], path: Path) -> dict[str, Arm]:
    """The file's order, but for arms that need a later one."""
    placed: dict[str, Arm] = {}
    while len(placed) < len(arms):
        waiting = {name: arm for name, arm in arms.items() if name not in placed}
        ready = [name for name, arm in waiting.items() if placed.keys() >= set(arm.needs)]
        if not ready:
            raise ValueError(
                f"{path}: arms {', '.join(waiting)} need each other in a circle: take away one "
                "of their 'needs' or {run:...}."
            )
        placed[ready[0]] = arms[ready[0]]
    return placed


def _known(content: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    unknown = [key for key in content if key not in keys]
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(keys)}.")


def _mapping(value: Any, where: str, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {what} must be a mapping, not {value!r}.")
    return value


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Takes 1e-3 for a number, as the CLI does, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=True) for key in own]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} is there twice{node.start_mark}")
        return dict(super().construct_mapping(node, deep=deep))


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)
