"""``tropism test``: a suite from its settings to its records, table and scalars.

    tropism test --config experiments/quickstart.yaml --ckpt_path runs/quickstart/version_0

Whatever can be wrong with the settings is refused before any weights are loaded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning import Trainer
from rich.console import Console

from tropism.evaluation import contamination, report
from tropism.evaluation.benchmarks import DataTask, Job, Suite, plan, tasks_of
from tropism.evaluation.comparison import Result, results, wins
from tropism.evaluation.contestants import Contestant, contestants
from tropism.evaluation.samples import SampleTable
from tropism.evaluation.suite import Answered, Progress, run_suite
from tropism.finetuning import FineTuning, check_one_device
from tropism.measurements.disk import explained_disk_full, require_writable
from tropism.measurements.records import RecordTable
from tropism.models import load_policy
from tropism.policy import Policy
from tropism.provenance import RunFile, collect
from tropism.tasks.optional import data_sources, sandbox_modes
from tropism.types import Prompt
from tropism.weights import source_of

BASE = "base"


def run_test(
    suite: Suite,
    module: FineTuning,
    *,
    trainer: Trainer,
    data: Any = None,
    ckpt_path: str | None = None,
) -> list[Result]:
    """Run a suite and leave its results in the trainer's run folder.

    Args:
        suite: What is asked, and of which models.
        module: Its ``model``, ``sampling``, ``engine`` and ``seed`` are used; nothing of it trains.
        trainer: Its device, loggers and run folder are used.
        data: The data module, whose test prompts are asked too.
        ckpt_path: One more model, before those of ``suite.checkpoints``.

    Raises:
        ValueError: Settings that cannot work, or weights that do not fit the model.
    """
    _check_trainer(trainer)
    paths = [*([ckpt_path] if ckpt_path else []), *suite.checkpoints]
    models = contestants(module.model_settings, paths, base=suite.base)
    asked = [] if data is None else _data_tasks(data, is_asked=suite.data_tasks is not None)
    jobs = plan(suite, asked, sampling=module.sampling, seed=module.seed)
    folder = Path(str(trainer.log_dir))
    console = Console()
    shared = contamination.compared(jobs, data)
    for line in contamination.lines(shared):
        console.print(line, highlight=False, markup=False)
    file = _open(folder, module, models, jobs)
    file.update(shared_with_training=shared, sandbox=sandbox_modes(tasks_of(jobs).values()))

    policy = load_policy(replace(module.model_settings, adapter=None), None)
    policy.model.to(trainer.strategy.root_device)
    module.engine.bind(policy)
    file.update(model_source=policy.provenance)
    answered = _answer(
        suite, models, jobs, module=module, policy=policy, folder=folder, console=console
    )
    found = results(answered, base=BASE, seed=module.seed)
    counts = wins(found)
    _record(folder, report.rows(found, counts))
    for rollout, values in report.scalars(found):
        for logger in trainer.loggers:
            logger.log_metrics(values, step=rollout)
    file.finish(report.summary(found, counts))
    for table in report.tables(found, answered):
        console.print(table)
    for line in report.lines(counts):
        console.print(line, highlight=False)
    console.print(f"Records: {folder}", highlight=False)
    return found


def _check_trainer(trainer: Trainer) -> None:
    check_one_device(trainer)
    if trainer.log_dir is None:
        raise ValueError(
            "trainer.logger gives no folder to write to: set trainer.logger to "
            "lightning.pytorch.loggers.TensorBoardLogger (save_dir, name, version)."
        )


def _data_tasks(data: Any, *, is_asked: bool) -> list[DataTask]:
    prompts: Mapping[str, Sequence[Prompt]] = {}
    if is_asked:
        data.setup("test")
        prompts = data.held_out_prompts("test")
    return [
        DataTask(task, "in" if task in data.tasks else "out", tuple(prompts.get(task.name, ())))
        for task in (*data.tasks, *data.out_of_domain_tasks)
    ]


def _open(
    folder: Path, module: FineTuning, models: Sequence[Contestant], jobs: Sequence[Job]
) -> RunFile:
    require_writable(folder)
    file = RunFile(folder)
    if (before := file.read()) and "suite" not in before:
        raise ValueError(
            f"{folder} is the folder of a training run, whose records a suite would replace: give "
            "another --trainer.logger.init_args.version (null for `test`)."
        )
    file.start(
        {
            **collect(
                seed=module.seed,
                model=asdict(module.model_settings),
                data=data_sources(tasks_of(jobs).values()),
            ),
            "suite": {
                "models": {m.name: None if m.path is None else str(m.path) for m in models},
                "benchmarks": {job.benchmark: len(job.prompts) for job in jobs},
            },
        }
    )
    return file


def _answer(
    suite: Suite,
    models: Sequence[Contestant],
    jobs: Sequence[Job],
    *,
    module: FineTuning,
    policy: Policy,
    folder: Path,
    console: Console,
) -> list[Answered]:
    """Run it, saying what is being asked and what is done."""
    answered: list[Answered] = []
    total, started = len(models) * len(jobs), time.monotonic()
    with console.status("") as status:

        def show(progress: Progress) -> None:
            status.update(
                f"{_title(progress.contestant, progress.job)}: {progress.done} of "
                f"{progress.total} prompts ({len(answered)} of {total} done)"
            )

        for one in run_suite(
            models,
            jobs,
            policy=policy,
            engine=module.engine,
            table=SampleTable(folder),
            model=_identity(policy, module),
            seed=module.seed,
            batch_size=suite.batch_size,
            progress=show,
        ):
            answered.append(one)
            seconds = time.monotonic() - started
            console.print(
                f"{len(answered)}/{total} {_title(one.contestant, one.job)}: {len(one.rows)} "
                f"prompts, {seconds:.0f} s",
                highlight=False,
            )
    return answered


def _title(contestant: Contestant, job: Job) -> str:
    return f"{contestant.name}, {job.benchmark}, {job.mode}"


def _identity(policy: Policy, module: FineTuning) -> dict[str, Any]:
    """What the weights of the loaded network are, and how prompts are put to it."""
    settings = asdict(module.model_settings)
    source: dict[str, Any] = dict(policy.provenance)
    if source.get("source") == "folder":  # whose files may have changed
        source = source_of(policy.source, with_hashes=True)
    how = {name: settings[name] for name in ("dtype", "chat_template")}
    return {**how, "source": source}


def _record(folder: Path, rows: Any) -> None:
    """Replace ``records/evals.jsonl``: it holds what the latest suite found, all of it."""
    with explained_disk_full(folder):
        RecordTable(folder, "evals").replace(rows)
