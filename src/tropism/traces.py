"""What SFT learns from: for each prompt one or more answers, with their token ids.

Three sources: the task's gold answers, a JSONL file, or the starting policy's own answers that the
task's verifier passes (rejection sampling: 2203.14465 STaR, 2308.01825 RFT).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tropism.policy import Policy
from tropism.rollouts.engine import RolloutEngine, Sampling
from tropism.scoring import score_rollouts
from tropism.tasks.base import Task
from tropism.tasks.row_files import jsonl_rows
from tropism.types import GenerationProgress, Prompt


@dataclass(frozen=True)
class Trace:
    """An answer to learn: its text, and its token ids with the end-of-sequence token."""

    text: str
    token_ids: tuple[int, ...]


Traces = Mapping[str, Sequence[Trace]]
"""Prompt id -> its traces, at least one; prompts without any are absent."""


@dataclass(frozen=True)
class TraceContext:
    """What a source may use.

    Args:
        policy: The policy that the run starts from.
        engine: Samples from it.
        tasks: By name.
        seed: Of the run.
        progress: Told while completions are sampled.
    """

    policy: Policy
    engine: RolloutEngine
    tasks: Mapping[str, Task]
    seed: int
    progress: Callable[[GenerationProgress], None] | None = None


class TraceSource(ABC):
    """Gives traces for prompts."""

    @abstractmethod
    def collect(self, prompts: Sequence[Prompt], context: TraceContext) -> Traces:
        """Traces of the prompts that have some.

        Raises:
            ValueError: None of the prompts has any, or a file is malformed.
        """


@dataclass(frozen=True)
class Gold(TraceSource):
    """The tasks' own right answers (``Task.gold``)."""

    def collect(self, prompts: Sequence[Prompt], context: TraceContext) -> Traces:
        traces = {}
        for prompt in prompts:
            text = context.tasks[prompt.task].gold(prompt)
            if text is not None:
                traces[prompt.id] = [Trace(text, context.policy.encode_completion(prompt, text))]
        if not traces:
            names = sorted({prompt.task for prompt in prompts})
            raise ValueError(
                f"traces: Gold, and the tasks {names} know no gold answer of any training prompt; "
                "give `gold_column` (Rows), or take TraceFile or Sampled."
            )
        return traces


@dataclass(frozen=True)
class TraceFile(TraceSource):
    """Answers out of a JSONL file.

    A row has ``completion`` (a string) and names its prompt by ``prompt_id``, ``prompt`` (the text
    of a raw prompt, or of a lone user message) or ``messages``. A prompt may have several rows;
    rows of other prompts are skipped.

    Args:
        path: The file. ``traces.jsonl`` in the folder of an SFT run is one.
    """

    path: str

    def collect(self, prompts: Sequence[Prompt], context: TraceContext) -> Traces:
        known: dict[str, Prompt] = {}
        for prompt in prompts:
            known.update(dict.fromkeys(_keys(prompt), prompt))
        traces: dict[str, list[Trace]] = {}
        for where, row in self._rows():
            text = row.get("completion")
            if not isinstance(text, str):
                raise ValueError(f"{where}: `completion` must be a string, not {text!r}.")
            found = known.get(_row_key(row, where))
            if found is not None:
                ids = row.get("token_ids") or context.policy.encode_completion(found, text)
                traces.setdefault(found.id, []).append(Trace(text, tuple(ids)))
        if not traces:
            raise ValueError(f"{self.path}: no row belongs to any of the {len(prompts)} prompts.")
        return traces

    def _rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        path = Path(self.path)
        if not path.is_file():
            raise ValueError(f"traces.path={self.path!r}: there is no such file.")
        return jsonl_rows(path)


@dataclass(frozen=True)
class Sampled(TraceSource):
    """The starting policy's own answers, those that pass.

    Args:
        num_samples: Answers drawn for each training prompt, before training.
        max_new_tokens: Completion limit in tokens.
        temperature: Of the sampling.
        max_per_prompt: Different passing answers kept for a prompt.
        batch_size: Prompts sampled at the same time.
    """

    num_samples: int = 8
    max_new_tokens: int = 128
    temperature: float = 1.0
    max_per_prompt: int = 4
    batch_size: int = 32

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_per_prompt", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"traces.{name}={getattr(self, name)}: give at least 1.")

    def collect(self, prompts: Sequence[Prompt], context: TraceContext) -> Traces:
        sampling = Sampling(max_new_tokens=self.max_new_tokens, temperature=self.temperature)
        traces: dict[str, list[Trace]] = {}
        for start in range(0, len(prompts), self.batch_size):
            rollouts = context.engine.generate(
                prompts[start : start + self.batch_size],
                group_size=self.num_samples,
                sampling=sampling,
                seed=context.seed,
                rollout=-1,  # before the first
                progress=self._progress(context, start, len(prompts)),
            )
            for rollout, verdicts in zip(
                rollouts, score_rollouts(context.tasks, rollouts), strict=True
            ):
                primary = context.tasks[rollout.prompt.task].primary
                passing = {
                    completion.token_ids: Trace(completion.text, completion.token_ids)
                    for completion, scores in zip(rollout.completions, verdicts, strict=True)
                    if scores[primary] == 1 and completion.finish_reason == "stop"
                }
                if passing:
                    traces[rollout.prompt.id] = list(passing.values())[: self.max_per_prompt]
        if not traces:
            raise ValueError(
                f"traces: Sampled, and none of {self.num_samples} samples of each of "
                f"{len(prompts)} prompts passed; raise num_samples, or take Gold or TraceFile."
            )
        return traces

    def _progress(
        self, context: TraceContext, start: int, num_prompts: int
    ) -> Callable[[GenerationProgress], None]:
        """Reports completions of all batches together."""

        def report(progress: GenerationProgress) -> None:
            if context.progress is not None:
                done = start * self.num_samples + progress.done
                total = num_prompts * self.num_samples
                context.progress(GenerationProgress(done, total, progress.tokens))

        return report


def save_traces(path: Path, traces: Traces) -> None:
    """Write what ``TraceFile`` reads."""
    rows = [
        {"prompt_id": prompt_id, "completion": trace.text, "token_ids": trace.token_ids}
        for prompt_id, answers in traces.items()
        for trace in answers
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    temporary.replace(path)


def _keys(prompt: Prompt) -> list[str]:
    keys = [f"id {prompt.id}"]
    if prompt.text is not None:
        keys.append(f"prompt {prompt.text}")
    else:
        messages = [dict(message) for message in prompt.messages or ()]
        keys.append(f"messages {json.dumps(messages, sort_keys=True)}")
        if len(messages) == 1:
            keys.append(f"prompt {messages[0]['content']}")
    return keys


def _row_key(row: Mapping[str, Any], where: str) -> str:
    if "prompt_id" in row:
        return f"id {row['prompt_id']}"
    if "prompt" in row:
        return f"prompt {row['prompt']}"
    if "messages" in row:
        return f"messages {json.dumps(row['messages'], sort_keys=True)}"
    raise ValueError(f"{where}: name the prompt by `prompt_id`, `prompt` or `messages`.")
