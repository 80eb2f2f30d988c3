"""``tropism difficulty --config X.yaml``: how often the starting policy answers each prompt right.

Answers are sampled as training samples them, scored by the tasks, and the pass rates kept in a
JSONL file, which ``data.difficulty.file`` reads. What the file has already is not sampled again, so
an interrupted measurement goes on where it stopped. One device; other arguments are settings of the
config: ``--model.init_args.model.adapter RUN`` measures the policy that a run of SFT ended with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tropism.difficulty import PassRate, PassRateFile, mixed_share, wording_sha256

if TYPE_CHECKING:
    from rich.table import Table

    from tropism.finetuning import FineTuning
    from tropism.policy import Policy
    from tropism.rollouts.engine import RolloutEngine, Sampling
    from tropism.tasks.base import Task
    from tropism.types import Prompt

BINS = ("0", "to 1/4", "to 1/2", "to 3/4", "below 1", "1")


def main(arguments: Sequence[str], build: Callable[[list[str]], Any]) -> None:
    """Entry point of ``tropism difficulty``.

    Args:
        arguments: Behind ``difficulty`` on the command line.
        build: Makes the model, data module and trainer of a config: a LightningCLI that did not
            run.
    """
    from rich.console import Console

    from tropism.models import identity

    parser = argparse.ArgumentParser(
        prog="tropism difficulty",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--num_samples", type=_positive, default=8, help="answers to each prompt")
    parser.add_argument("--split", choices=("train", "validation", "test"), default="train")
    parser.add_argument("--file", type=Path, help="default: data.difficulty.file, else the cache")
    parser.add_argument("--batch_size", type=_positive, default=32, help="prompts between writes")
    options, settings = parser.parse_known_args(list(arguments))
    with warnings.catch_warnings():
        # Lightning's warning that it is not given the command line itself.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        built = build(settings)
    module, data = built.model, built.datamodule
    wanted, data.difficulty = data.difficulty, None  # its file is what is made here
    data.setup({"train": "fit", "validation": "validate", "test": "test"}[options.split])
    prompts: list[Prompt] = data.training_prompts()
    if options.split != "train":
        prompts = [p for pool in data.held_out_prompts(options.split).values() for p in pool]
    tasks = {task.name: task for task in (*data.tasks, *data.out_of_domain_tasks)}
    policy = _load(module, built.trainer.strategy.root_device)
    header = {
        "model": identity(module.model_settings, policy),
        "sampling": asdict(module.sampling),
        "num_samples": options.num_samples,
    }
    file = PassRateFile(options.file or _default_file(wanted, header), header)
    console = Console()
    todo = [prompt for prompt in prompts if (prompt.task, prompt.id) not in file.rates]
    console.print(
        f"{len(prompts)} prompts, {len(prompts) - len(todo)} of them in {file.path} already",
        highlight=False,
    )
    batches = measure(
        todo,
        tasks,
        policy=policy,
        engine=module.engine,
        sampling=module.sampling,
        num_samples=options.num_samples,
        batch_size=options.batch_size,
    )
    for rates in _with_progress(batches, len(todo), console):
        file.append(rates)
    found = [file.rates[prompt.task, prompt.id] for prompt in prompts]
    console.print(summary(found, group_size=max(module.group_size, 2)))
    console.print(f"data.difficulty.file: {file.path}", highlight=False, soft_wrap=True)


def measure(
    prompts: Sequence[Prompt],
    tasks: Mapping[str, Task],
    *,
    policy: Policy,
    engine: RolloutEngine,
    sampling: Sampling,
    num_samples: int,
    batch_size: int,
) -> Iterator[list[PassRate]]:
    """Pass rates, batch by batch; a prompt's do not depend on its batch.

    Raises:
        ValueError: A prompt and the completion limit do not fit into the model's context.
    """
    from tropism.rollouts.transformers_engine import check_context
    from tropism.scoring import score_rollouts

    if prompts:
        encoded = [policy.encode(prompt) for prompt in prompts]
        check_context(prompts, encoded, sampling, policy.context_length)
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        rollouts = engine.generate(
            batch,
            group_size=num_samples,
            sampling=sampling,
            seed=0,  # whatever the run's: a rate is one of the policy, not of a run
            rollout=-1,  # before the first
        )
        rates = []
        for prompt, scores in zip(batch, score_rollouts(tasks, rollouts), strict=True):
            primary = tasks[prompt.task].primary
            judged = [value for score in scores if (value := score[primary]) is not None]
            passed = sum(value >= 1.0 for value in judged)
            rates.append(
                PassRate(prompt.task, prompt.id, wording_sha256(prompt), passed, len(judged))
            )
        yield rates


def summary(rates: Sequence[PassRate], group_size: int) -> Table:
    """How many prompts of each task have which pass rate, and the share of mixed groups."""
    from rich.table import Table

    table = Table(title="Pass rates of the starting policy: prompts")
    for heading in ("task", *BINS, "mean", f"mixed groups of {group_size}"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for task in dict.fromkeys(rate.task for rate in rates):
        values = [v for r in rates if r.task == task and (v := r.value) is not None]
        if not values:
            table.add_row(task, *["0"] * len(BINS), "-", "-")
            continue
        mean, mixed = sum(values) / len(values), mixed_share(values, group_size)
        table.add_row(task, *map(str, histogram(values)), f"{mean:.3f}", f"{mixed:.3f}")
    return table


def histogram(values: Iterable[float]) -> list[int]:
    """How many values are 0, in (0, 1/4], (1/4, 1/2], (1/2, 3/4], (3/4, 1), and 1."""
    counts = [0] * len(BINS)
    for value in values:
        counts[5 if value == 1 else math.ceil(value * 4)] += 1
    return counts


def _load(module: FineTuning, device: Any) -> Policy:
    from tropism.models import load_policy

    policy = load_policy(module.model_settings, module.lora)
    policy.model.to(device)
    module.engine.bind(policy)
    return policy


def _default_file(wanted: Any, header: Mapping[str, Any]) -> Path:
    """The file that the config is to read, or one in the cache whose name says what it is of."""
    from tropism.weights import default_cache

    if wanted is not None:
        return Path(wanted.file)
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]
    return default_cache() / "difficulty" / f"{digest}.jsonl"


def _with_progress(
    batches: Iterable[list[PassRate]], total: int, console: Any
) -> Iterator[list[PassRate]]:
    """The batches, with a bar on a terminal and a line for each tenth elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    done = 0
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        line = bar.add_task("", total=total)
        for batch in batches:
            yield batch
            before, done = done, done + len(batch)
            bar.update(line, completed=done)
            if not console.is_terminal and before * 10 // total < done * 10 // total:
                console.print(f"{done} of {total} prompts", highlight=False)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least 1")
    return int(text)
