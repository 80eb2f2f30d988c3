"""How often the starting policy answers each prompt right, and training by it.

``tropism difficulty`` measures pass rates into a JSONL file, and ``data.difficulty`` reads it. The
first line says of which model, sampling and number of samples the rates are; each other line is a
prompt:

    {"schema": 1, "model": {...}, "sampling": {...}, "num_samples": 8}
    {"task": "skills", "prompt_id": "skills/add/0f...", "prompt_sha256": "9c...", "passed": 3, ...}
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from tropism.mixing import CURRICULA, Curriculum
from tropism.types import Prompt

SCHEMA_VERSION = 1
Key = tuple[str, str]
"""(task, prompt id)"""


@dataclass(frozen=True)
class Difficulty:
    """Which prompts to train on, and in which order, by the starting policy's pass rates.

    Rates of k samples are noisy: of prompts with a true rate of 0.05, two thirds fail all of 8.

    Args:
        file: Written by ``tropism difficulty``; it must have every training prompt of the run.
        low: Prompts are kept whose pass rate is from ``low`` ...
        high: ... to ``high``, both included. 0.01 and 0.99 leave out what never or always passes.
        curriculum: The order of each epoch over the kept prompts, task by task: ``none`` (by
            chance), ``easy_first``, ``hard_first``, or ``mixed_first`` (rates near 1/2 first:
            there groups are most often mixed). Equal rates come by chance.
        fade_rollouts: Over so many rollouts the order fades into chance: the prompt that comes
            next in rollout r is the next in order with probability 1 - r / fade_rollouts. Null:
            it never does.

    Raises:
        ValueError: An empty band, an unknown curriculum, or a fade of none.
    """

    file: str
    low: float = 0.0
    high: float = 1.0
    curriculum: Curriculum = "none"
    fade_rollouts: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ValueError(
                f"difficulty.low={self.low}, difficulty.high={self.high}: give 0 <= low <= high "
                "<= 1."
            )
        if self.curriculum not in CURRICULA:
            raise ValueError(
                f"difficulty.curriculum={self.curriculum!r}: choose from {list(CURRICULA)}."
            )
        if self.fade_rollouts is not None and (self.fade_rollouts < 1 or self.curriculum == "none"):
            raise ValueError(
                f"difficulty.fade_rollouts={self.fade_rollouts} with curriculum="
                f"{self.curriculum!r}: give at least 1 and an order that can fade, or null."
            )

    def rates_of(self, prompts: Sequence[Prompt]) -> tuple[dict[str, Any], dict[Key, float | None]]:
        """The file's first line, and the pass rates of ``prompts``: None where none was judged.

        Raises:
            ValueError: The file is missing or malformed, or lacks some of the prompts.
        """
        header, measured = read_pass_rates(self.file)
        keys = {(prompt.task, prompt.id): prompt for prompt in prompts}
        missing = Counter(task for task, prompt_id in keys.keys() - measured.keys())
        again = "run `tropism difficulty` with the config of this run (it adds what is missing)"
        if missing:
            raise ValueError(
                f"difficulty.file={self.file!r} lacks {missing.total()} of {len(keys)} training "
                f"prompts ({dict(sorted(missing.items()))}): {again}."
            )
        for key, prompt in keys.items():
            if measured[key].prompt_sha256 != wording_sha256(prompt):
                raise ValueError(
                    f"difficulty.file={self.file!r} has prompt {prompt.id!r} of task "
                    f"{prompt.task!r} in another wording (prompt format?): {again} and another "
                    "file."
                )
        return header, {key: measured[key].value for key in keys}


@dataclass(frozen=True)
class PassRate:
    """A prompt, and how many of its judged answers passed."""

    task: str
    prompt_id: str
    prompt_sha256: str
    passed: int
    judged: int

    @property
    def key(self) -> Key:
        return self.task, self.prompt_id

    @property
    def value(self) -> float | None:
        """In [0, 1]; None where the task abstained on every answer."""
        return self.passed / self.judged if self.judged else None


def wording_sha256(prompt: Prompt) -> str:
    """What the model is shown, before its chat template."""
    shown = prompt.text if prompt.messages is None else [dict(m) for m in prompt.messages]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def warn_of_another_model(header: Mapping[str, Any], settings: Any) -> None:
    """Warn where a file's rates are of another model than the run starts from.

    Args:
        header: The file's first line.
        settings: The run's model (``tropism.models.Model``); None where it is not known.
    """
    for setting in () if settings is None else ("name", "revision", "adapter"):
        then, now = header["model"][setting], getattr(settings, setting)
        if then != now:
            rank_zero_warn(
                f"data.difficulty: the pass rates are of model.{setting}={then!r}, and the run "
                f"starts from {now!r}; what is easy for one may be hard for the other."
            )


def mixed_share(rates: Iterable[float], group_size: int) -> float:
    """Mean of 1 - p^G - (1 - p)^G: the groups of G with both right and wrong answers in them.

    Raises:
        ValueError: No rates.
    """
    shares = [1 - p**group_size - (1 - p) ** group_size for p in rates]
    if not shares:
        raise ValueError("there are no pass rates to average.")
    return sum(shares) / len(shares)


def read_pass_rates(path: str | Path) -> tuple[dict[str, Any], dict[Key, PassRate]]:
    """What a file's rates are of, and the rates; a last line cut off by a kill is passed over.

    Raises:
        ValueError: No such file, or it is not one of pass rates; the line is named.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"difficulty.file={str(path)!r}: there is no such file; `tropism difficulty --config "
            f"... --file {path}` writes it."
        )
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # behind the last newline: cut off
    header: dict[str, Any] = {}
    rates: dict[Key, PassRate] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if number == 1:
                header = _checked_header(row)
            else:
                rate = PassRate(**row)
                rates[rate.key] = rate
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: no pass rate ({error}).") from error
    if not header:
        raise ValueError(f"{path} is empty: remove it, and run `tropism difficulty` again.")
    return header, rates


def _checked_header(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict) or row.get("schema") != SCHEMA_VERSION:
        raise ValueError(f"the first line must have schema {SCHEMA_VERSION}")
    return row


class PassRateFile:
    """A file of pass rates that grows; what is in it is never measured again.

    Args:
        path: Made, with its folder, where it does not exist.
        header: What its rates are of.

    Raises:
        ValueError: The file holds rates of something else.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        header = {"schema": SCHEMA_VERSION, **header}
        self.rates: dict[Key, PassRate] = {}
        if path.is_file() and path.read_bytes().find(b"\n") >= 0:
            self._drop_half_a_line()
            found, self.rates = read_pass_rates(path)
            if found != json.loads(json.dumps(header)):
                differing = sorted(k for k in header if found.get(k) != header[k])
                raise ValueError(
                    f"{path} has pass rates of another {' and '.join(differing)}: give another "
                    "--file."
                )
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(header) + "\n", encoding="utf-8")

    def append(self, rates: Sequence[PassRate]) -> None:
        """Keep these rates, on disk when this returns."""
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(json.dumps(asdict(rate)) + "\n" for rate in rates))
        self.rates.update({rate.key: rate for rate in rates})

    def _drop_half_a_line(self) -> None:
        content = self.path.read_bytes()
        if not content.endswith(b"\n"):
            with self.path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)
