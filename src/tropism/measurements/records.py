"""The record tables of a run: append-only JSON lines, one table a file, read back as pandas.

The columns are a contract with the figures: a row with a missing or unknown column is refused.
Loads neither torch nor Lightning, so that a laptop redraws every figure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1

TABLES: Mapping[str, tuple[str, ...]] = {
    "steps": (
        "seconds_rollout",
        "seconds_reward",
        "seconds_train",
        "seconds_probe",
        "seconds_processor",
        "tokens",
        "loss",
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "kl",
        "entropy",
        "grad_norm",
        "lr",
        "completion_length",
        "clipped_ratio",
        "sampler_gap",
        "trainable_params",
    ),
    "rewards": ("component", "weight", "mean", "group_std", "gradient_share"),
    "reward_gradients": ("layer", "module", "component", "other", "norm_sq", "cosine"),
    "update_norms": ("layer", "module", "state", "rank", "lr_scale", "update_norm", "step_norm"),
    "pressure": (
        "layer",
        "module",
        "raw_sq",
        "debiased_sq",
        "null_z",
        "consistency",
        "captured_energy",
        "probes_pooled",
    ),
    "gains": ("layer", "module", "gain", "gain_z", "kl", "probes_pooled"),
    "moves": ("prompt", "advantage", "changes"),
    "plans": ("policy", "layer", "module", "state", "rank", "lr_scale", "score"),
    "decisions": (
        "kind",
        "policy",
        "observation",
        "state_before",
        "rng",
        "decision",
        "status",
    ),
    "evals": (
        "benchmark",
        "domain",
        "split",
        "n",
        "value",
        "ci_low",
        "ci_high",
        "k",
        "temperature",
        "max_tokens",
        "model",
        "metric",
        "num_samples",
        "difference",
        "difference_low",
        "difference_high",
        "p",
        "p_corrected",
    ),
    "eval_samples": (
        "key",
        "model",
        "benchmark",
        "mode",
        "prompt_id",
        "prompt_sha",
        "verdicts",
        "answers",
        "texts",
        "num_tokens",
        "is_cut",
    ),
    "kl_drift": (
        "task",
        "domain",
        "source",
        "scope",
        "direction",
        "kl",
        "ci_low",
        "ci_high",
        "num_prompts",
        "num_tokens",
        "num_dropped",
    ),
    "causal_tracing": (
        "prompt",
        "subject",
        "answer",
        "answer_tokens",
        "is_known",
        "clean",
        "corrupted",
        "tokens",
        "roles",
        "state",
        "mlp",
        "attention",
    ),
    "alarms": ("alarm", "event", "value", "threshold", "message"),
    "completions": (
        "prompt_id",
        "sample",
        "text",
        "num_tokens",
        "finish_reason",
        "components",
        "advantage",
    ),
}


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: what is undefined is written as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class RecordTable:
    """One table of one run, open for appending.

    Args:
        run_folder: The run's folder; rows go to ``records/<table>.jsonl`` below it.
        table: A key of ``TABLES``.

    Raises:
        ValueError: No such table.
    """

    def __init__(self, run_folder: str | Path, table: str) -> None:
        if table not in TABLES:
            raise ValueError(f"record table {table!r} is unknown; choose from {sorted(TABLES)}.")
        self.table = table
        self.path = Path(run_folder) / "records" / f"{table}.jsonl"
        self._columns = frozenset(TABLES[table])

    def append(self, rows: Iterable[Mapping[str, Any]], *, rollout: int, step: int) -> None:
        """Write the rows of one rollout with a single flush.

        Raises:
            ValueError: A row lacks a column of the table, or has one that it does not know.
        """
        lines = [self._line(row, rollout, step) for row in rows]
        if not lines:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(lines))

    def replace(self, rows: Iterable[tuple[int, int, Mapping[str, Any]]]) -> None:
        """Let (rollout, step, row) take the place of all rows, in one rename.

        Raises:
            ValueError: A row lacks a column of the table, or has one that it does not know.
        """
        lines = [self._line(row, rollout, step) for rollout, step, row in rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write(lines)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every whole row as it was written, nothing where there is no file yet.

        Raises:
            ValueError: A line is no row; names the file and the line.
        """
        if self.path.exists():
            yield from (row for _, row in _rows(self.path))

    def mend(self) -> None:
        """Cut off a last row that a killed process left torn: the next one is appended to it."""
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            whole = 0
            for line in file:
                whole += len(line) if line.endswith(b"\n") else 0
            file.truncate(whole)

    def truncate(self, rollout: int) -> None:
        """Keep the rows of rollouts before ``rollout``: a resumed run writes the others again."""
        if not self.path.exists():
            return
        self._write([line for line, row in _rows(self.path) if row["rollout"] < rollout])

    def _line(self, row: Mapping[str, Any], rollout: int, step: int) -> str:
        if row.keys() != self._columns:
            missing, unknown = self._columns - row.keys(), row.keys() - self._columns
            raise ValueError(
                f"records/{self.table}: missing columns {sorted(missing)}, "
                f"unknown columns {sorted(unknown)}."
            )
        full = {"schema": SCHEMA_VERSION, "rollout": rollout, "step": step, **row}
        return json.dumps(_finite(full), ensure_ascii=False, allow_nan=False) + "\n"

    def _write(self, lines: Iterable[str]) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(lines), encoding="utf-8", newline="\n")
        temporary.replace(self.path)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line and its row. Whole ones only: a killed process can leave the last one torn.

    Splits at line feeds alone. Sampled text may hold any of Unicode's other line separators.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                text = line.decode()
                row = json.loads(text)
            except ValueError as error:  # of either
                raise _damaged(path, number, str(error)) from error
            if not isinstance(row, dict):
                raise _damaged(path, number, "it holds no JSON object")
            yield text, row


def _damaged(path: Path, number: int, reason: str) -> ValueError:
    return ValueError(
        f"{path}, line {number}: {reason}. Delete that line (its row is lost), or move the file "
        "away."
    )


def read(run_folder: str | Path, table: str) -> pd.DataFrame:
    """All rows of one table, in the order written; empty with the right columns if none were.

    Raises:
        ValueError: No such table, or a row of another schema version.
    """
    import pandas as pd

    source = RecordTable(run_folder, table)
    columns = ["schema", "rollout", "step", *TABLES[table]]
    rows = list(source.rows())
    versions = {row["schema"] for row in rows} - {SCHEMA_VERSION}
    if versions:
        raise ValueError(
            f"{source.path} has rows of schema {sorted(versions)}; this version reads "
            f"{SCHEMA_VERSION}. Use the tropism version that wrote it (see its run.json)."
        )
    return pd.DataFrame(rows, columns=columns)
