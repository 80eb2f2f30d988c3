"""The command line: ``tropism fit|validate|test``, ``chat|matched|difficulty|trace``.

fit, validate and test are Lightning CLI: every constructor argument is a setting, classes are
chosen by ``class_path``, a misspelt key fails while parsing, ``--print_config`` prints a complete
config, and ``callbacks+:`` adds to the default callbacks (one of the same class replaces it).
test runs the benchmarks of ``suite``, with any number of models.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from tropism.evaluation.benchmarks import Suite
from tropism.matched import main as matched
from tropism.measure_difficulty import main as measure_difficulty
from tropism.measurements.disk import require_writable

# By name: the callbacks package stands above this one and is never imported from here.
DEFAULT_CALLBACKS = [
    {"class_path": f"tropism_callbacks.{name}"}
    for name in (
        "RunRecord",
        "Progress",
        "Evaluation",
        "UpdateNorms",
        "RolloutSamples",
        "Checkpoint",  # last: what it saves then holds the others' state of the same rollout
    )
]

TRAINER_DEFAULTS: dict[str, Any] = {
    "trainer.max_epochs": 1,  # one pass over data.num_rollouts rollout batches
    "trainer.devices": 1,
    "trainer.num_sanity_val_steps": -1,  # the whole validation set: the score before training
    "trainer.log_every_n_steps": 1,
    "trainer.enable_model_summary": False,
    "trainer.enable_checkpointing": False,  # tropism_callbacks.Checkpoint counts rollouts
    "trainer.use_distributed_sampler": False,
    "trainer.callbacks": DEFAULT_CALLBACKS,
}


class SaveConfig(SaveConfigCallback):
    """Writes the complete config into the run folder, once training really starts.

    A resumed run finds its own there, and replaces it only when its checkpoint was accepted.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.overwrite = self.config.get("ckpt_path") is not None
        if stage == "fit" and not self.overwrite and trainer.log_dir is not None:
            path = Path(trainer.log_dir) / self.config_filename
            if path.exists():
                raise ValueError(
                    f"{path} exists: another run has this folder. Resume it with --ckpt_path, or "
                    "give a new trainer.logger.init_args.version."
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")


class TropismCLI(LightningCLI):
    """Lightning CLI with this project's defaults."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {
            name: arguments
            for name, arguments in LightningCLI.subcommands().items()
            if name in {"fit", "validate", "test"}
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults(TRAINER_DEFAULTS)
        parser.add_argument(
            "--suite", type=Suite, default=Suite(), help="What `tropism test` asks, and of whom."
        )
        parser.link_arguments("model.init_args.group_size", "data.init_args.group_size")
        parser.link_arguments("seed_everything", "model.init_args.seed", compute_fn=_seed)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=_seed)

    def _parse_ckpt_path(self) -> None:
        """The config of this call decides; Lightning would overlay the checkpoint's settings."""

    def before_fit(self) -> None:
        """What would fail later and less clearly: in processes of their own, in an open folder."""
        from tropism.data import PromptDataModule
        from tropism.evaluation.contamination import hold_out

        self._check_devices()
        if isinstance(self.datamodule, PromptDataModule):
            hold_out(self._get(self.config_init, "suite"), self.datamodule)
        if self.trainer.log_dir is not None:
            require_writable(self.trainer.log_dir)

    def before_validate(self) -> None:
        self._check_devices()

    def _check_devices(self) -> None:
        from tropism.finetuning import check_one_device

        check_one_device(self.trainer)

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand] if self.subcommand else self.config
        config.trainer.callbacks = _last_of_each_class(config.trainer.callbacks or [])
        if config.trainer.logger in (None, True):
            files = config.get("config") or []
            name = Path(str(files[-1])).stem if files else "run"
            config.trainer.logger = {
                "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                "init_args": {"save_dir": "runs", "name": name, "version": None},
            }
        if self.subcommand == "fit" and config.get("ckpt_path"):
            _stay_in_the_run(config.trainer.logger, Path(str(config.ckpt_path)))
        if self.subcommand == "test":
            _stay_in_one_folder(config.trainer.logger)

    def test(
        self, model: Any, datamodule: Any = None, ckpt_path: str | None = None, **_: Any
    ) -> None:
        """Runs ``suite``, in place of Lightning's own loop over one model."""
        from tropism.evaluation.command import run_test

        run_test(
            self._get(self.config_init, "suite"),
            model,
            trainer=self.trainer,
            data=datamodule,
            ckpt_path=ckpt_path,
        )
        self._parser("test").save(
            self.config["test"],
            str(Path(str(self.trainer.log_dir)) / "config.yaml"),
            skip_unset=False,
            overwrite=True,
        )


def _stay_in_the_run(logger: Any, checkpoint: Path) -> None:
    """A run resumed from its own checkpoint goes on in its own folder, unless one is named."""
    run = checkpoint.absolute().parent.parent
    if checkpoint.parent.name != "checkpoints" or not (run / "run.json").is_file():
        return
    if not _is_tensorboard(logger):
        return
    if logger["init_args"].get("version") is None:
        place = {"save_dir": str(run.parent.parent), "name": run.parent.name, "version": run.name}
        for name, value in place.items():
            logger["init_args"][name] = value


def _stay_in_one_folder(logger: Any) -> None:
    """A suite goes on in the folder in which the same command wrote before: ``test``."""
    if not _is_tensorboard(logger):
        return
    if logger["init_args"].get("version") is None:
        logger["init_args"]["version"] = "test"


def _is_tensorboard(logger: Any) -> bool:
    """Whether it is the one logger; ``trainer.logger`` may be a list too, or false."""
    return not isinstance(logger, list | bool) and "TensorBoardLogger" in logger["class_path"]


def _last_of_each_class(callbacks: list[Any]) -> list[Any]:
    """A callback that a config adds takes the place of the default one of its class."""
    last: dict[str, Any] = {}
    for callback in callbacks:
        last[callback["class_path"].rsplit(".", 1)[-1]] = callback
    return list(last.values())


def _seed(value: int | bool) -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", "0")) if isinstance(value, bool) else value


def _is_news(record: logging.LogRecord) -> bool:
    """Drops Lightning's advertisement for another logger."""
    return "litlogger" not in record.getMessage()


class _ConfigReader(TropismCLI):
    """Parses a config against the real signatures, and builds nothing."""

    def instantiate_classes(self) -> None:
        pass


def read_config(path: str) -> dict[str, Any]:
    """The complete config of ``fit`` that a file stands for, as plain nested values."""
    reader = _cli(_ConfigReader, ["--config", path], run=False)
    text = reader.parser.dump(reader.config, format="json", skip_link_targets=False)
    complete: dict[str, Any] = json.loads(str(text))
    return complete


def _cli(kind: type[TropismCLI], arguments: list[str] | None, *, run: bool = True) -> TropismCLI:
    return kind(
        LightningModule,
        None,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=SaveConfig,
        seed_everything_default=0,
        args=arguments,
        run=run,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``tropism`` command."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["chat"]:
        from tropism.chat import main as chat

        chat(given[1:])
        return
    if given[:1] == ["trace"]:
        from tropism.trace import main as trace  # pandas: most of a second

        trace(given[1:])
        return
    # Users' own tasks and rewards live in the working directory, which the console script does not
    # have on its path, or beside their config: jsonargparse parses that in the folder it lies in.
    sys.path += [folder for folder in (os.getcwd(), "") if folder not in sys.path]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_news)
    # Lightning's own use of an attribute that torch deprecated.
    warnings.filterwarnings("ignore", message="`isinstance.treespec, LeafSpec.` is deprecated")
    if given[:1] == ["matched"]:
        matched(given[1:], read_config)
        return
    if given[:1] == ["difficulty"]:
        measure_difficulty(given[1:], lambda settings: _cli(TropismCLI, settings, run=False))
        return
    _cli(TropismCLI, None if arguments is None else given)


if __name__ == "__main__":
    main()
