"""Pass rates: measured, kept, resumed; bands and curricula of the data module."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tropism.cli import TropismCLI, _cli
from tropism.data import PromptDataModule
from tropism.difficulty import (
    Difficulty,
    PassRate,
    PassRateFile,
    mixed_share,
    read_pass_rates,
    wording_sha256,
)
from tropism.measure_difficulty import histogram, main
from tropism.tasks.base import Scores, Split, Task
from tropism.types import Prompt

HEADER = {
    "model": {"name": "organism", "revision": None, "adapter": None},
    "sampling": {"max_new_tokens": 12, "temperature": 1.0},
    "num_samples": 8,
}


class Counted(Task):
    """Prompt i of a split; its pass rate is i / 8."""

    components = ("right",)
    primary = "right"

    def __init__(self, name: str = "a") -> None:
        self.name = name

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        return [
            Prompt(id=f"{self.name}-{split}-{i}", task=self.name, text=f"{self.name} {split} {i}")
            for i in range(num)
        ]

    def score(self, prompt: Prompt, completion: str) -> Scores:
        return {"right": 0.0}


def written(path: Path, *tasks: Task, num: int = 9, judged: int = 8) -> str:
    """A file with the pass rates i / 8 of the tasks' first training prompts."""
    file = PassRateFile(path, HEADER)
    for task in tasks:
        file.append(
            [
                PassRate(task.name, prompt.id, wording_sha256(prompt), min(i, judged), judged)
                for i, prompt in enumerate(task.prompts("train", num, 0))
            ]
        )
    return str(path)


def data(*tasks: Task, **settings: Any) -> PromptDataModule:
    defaults: dict[str, Any] = {
        "batch_size": 4,
        "group_size": 2,
        "num_rollouts": 9,
        "num_train_prompts": 9 * len(tasks),
        "num_validation_prompts": 4,
        "num_test_prompts": 4,
    }
    return PromptDataModule(list(tasks), **{**defaults, **settings})


def schedule(module: PromptDataModule) -> list[list[str]]:
    module.setup("fit")
    return [[prompt.id for prompt in batch] for batch in module.schedule()]


def places(batches: list[list[str]], task: str = "a") -> list[int]:
    prompts = [prompt for batch in batches for prompt in batch]
    return [int(p.rsplit("-", 1)[1]) for p in prompts if p.startswith(f"{task}-")]


# -- bands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        (0.0, 1.0, range(9)),
        (0.125, 0.875, range(1, 8)),
        (0.126, 0.874, range(2, 7)),
        (0.01, 1.0, range(1, 9)),
        (0.25, 0.375, range(2, 4)),
    ],
)
def test_both_edges_of_the_band_are_kept(
    tmp_path: Path, low: float, high: float, kept: range
) -> None:
    file = written(tmp_path / "rates.jsonl", Counted())
    module = data(Counted(), difficulty=Difficulty(file, low=low, high=high))
    batches = schedule(module)
    assert set(places(batches)) == set(kept)
    summary = module.summary()["training_prompts"]
    assert summary["outside_band"] == {"a": 9 - len(kept)}
    assert summary["kept"] == {"a": len(kept)}
    assert summary["difficulty"]["model"] == HEADER["model"]


def test_the_whole_band_without_a_curriculum_changes_nothing(tmp_path: Path) -> None:
    file = written(tmp_path / "rates.jsonl", Counted())
    plain = schedule(data(Counted()))
    assert schedule(data(Counted(), difficulty=Difficulty(file))) == plain
    assert schedule(data(Counted(), decontaminate="off")) == plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 0.6, "high": 0.5}, r"low=0.6, difficulty.high=0.5: give 0 <= low <= high"),
        ({"low": -0.1}, r"low=-0.1"),
        ({"high": 1.5}, r"high=1.5"),
        ({"curriculum": "random"}, r"curriculum='random': choose from \['none', 'easy_first'"),
        ({"fade_rollouts": 4}, r"fade_rollouts=4 with curriculum='none'"),
        ({"fade_rollouts": 0, "curriculum": "easy_first"}, r"fade_rollouts=0"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Difficulty("rates.jsonl", **settings)
    with pytest.raises(ValueError, match=r"decontaminate='yes': choose from \['drop', 'warn'"):
        data(Counted(), decontaminate="yes")


def test_too_few_prompts_in_the_band(tmp_path: Path) -> None:
    file = written(tmp_path / "rates.jsonl", Counted())
    module = data(Counted(), difficulty=Difficulty(file, low=0.5, high=0.5))
    message = (
        r"task 'a' has 1 training prompts with a pass rate from 0.5 to 0.5; one rollout takes 2"
    )
    with pytest.raises(ValueError, match=message):
        module.setup("fit")


def test_what_was_never_judged_is_not_trained_on(tmp_path: Path) -> None:
    file = written(tmp_path / "rates.jsonl", Counted(), judged=0)
    with pytest.raises(ValueError, match="'a' has 0 training prompts with a pass rate from 0 to 1"):
        data(Counted(), difficulty=Difficulty(file)).setup("fit")


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    with pytest.raises(ValueError, match=r"there is no such file; `tropism difficulty .*writes it"):
        data(Counted(), difficulty=Difficulty(str(path))).setup("fit")
    file = written(path, Counted(), num=7)
    lacking = r"lacks 11 of 18 training prompts \(\{'a': 2, 'b': 9\}\): run `tropism difficulty`"
    with pytest.raises(ValueError, match=lacking):
        data(Counted(), Counted("b"), difficulty=Difficulty(file)).setup("fit")
    with pytest.raises(ValueError, match=r"has pass rates of another num_samples: give another"):
        PassRateFile(path, {**HEADER, "num_samples": 4})
    path.write_text(path.read_text().replace('"judged"', '"judge"'))
    with pytest.raises(ValueError, match=r"rates.jsonl, line 2: no pass rate"):
        read_pass_rates(path)


class Reworded(Counted):
    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        return [Prompt(p.id, p.task, text=f"{p.text}!") for p in super().prompts(split, num, seed)]


def test_another_wording_is_another_prompt(tmp_path: Path) -> None:
    file = written(tmp_path / "rates.jsonl", Counted())
    with pytest.raises(ValueError, match="has prompt 'a-train-0' of task 'a' in another wording"):
        data(Reworded(), difficulty=Difficulty(file)).setup("fit")


# -- curricula ------------------------------------------------------------------------------------


def test_each_task_has_its_order_and_the_mix_its_shares(tmp_path: Path) -> None:
    file = written(tmp_path / "rates.jsonl", Counted("a"), Counted("b"), num=27)
    module = data(
        Counted("a"),
        Counted("b"),
        mix={"a": 3, "b": 1},
        batch_size=8,
        num_train_prompts=36,
        difficulty=Difficulty(file, high=0.99, curriculum="hard_first"),
    )
    batches = schedule(module)  # 27 prompts of a, rates 0 to 7/8, 8 and above pass always
    assert all(sum(p.startswith("a-") for p in batch) == 3 for batch in batches)
    kept = module.summary()["training_prompts"]["kept"]
    assert kept == {"a": 8, "b": 8}
    assert places(batches, "a")[:8] == list(range(8))
    assert places(batches, "b")[:8] == list(range(8))
    assert sorted(places(batches, "a")[8:16]) == list(range(8))  # the second epoch is whole too


def test_the_fade_counts_rollouts_of_the_run(tmp_path: Path) -> None:
    file = written(tmp_path / "rates.jsonl", Counted())
    strict, faded = (
        data(Counted(), difficulty=Difficulty(file, curriculum="hard_first", fade_rollouts=fade))
        for fade in (None, 1)
    )
    assert places(schedule(strict))[:9] == list(range(9))
    order = places(schedule(faded))[:9]
    assert order[:2] == [0, 1]  # rollout 0
    assert sorted(order) == list(range(9))
    assert order != list(range(9))


class Recorder(L.LightningModule):
    def __init__(self, save_at: int | None = None, path: Path | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.save_at, self.path = save_at, path
        self.seen: list[list[str]] = []

    def training_step(self, batch: list[Prompt], batch_idx: int) -> None:
        self.seen.append([prompt.id for prompt in batch])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.save_at:
            self.trainer.save_checkpoint(self.path)

    def validation_step(self, batch: list[Prompt], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> None:
        return None


def fit(module: Recorder, difficulty: Difficulty, ckpt: Path | None = None) -> list[list[str]]:
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    datamodule = data(Counted(), difficulty=difficulty)
    trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt, weights_only=False)
    return module.seen


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("fade", [None, 5])
@pytest.mark.parametrize("save_at", [0, 3, 4, 8])  # epochs meet within rollout 4
def test_a_resumed_run_sees_what_the_whole_run_saw(
    tmp_path: Path, fade: int | None, save_at: int
) -> None:
    file = written(tmp_path / "rates.jsonl", Counted())
    difficulty = Difficulty(file, curriculum="mixed_first", fade_rollouts=fade)
    path = tmp_path / "saved.ckpt"
    whole = fit(Recorder(save_at, path), difficulty)
    assert fit(Recorder(), difficulty, path) == whole[save_at + 1 :]
    other = Difficulty(file, curriculum="hard_first", fade_rollouts=fade)
    with pytest.raises(ValueError, match=r"curriculum: mixed_first then, hard_first now"):
        fit(Recorder(), other, path)


# -- contamination --------------------------------------------------------------------------------


class Contaminated(Counted):
    """Training prompts 2 and 5 are test prompt 1 and validation prompt 0, in other letters."""

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        prompts = list(super().prompts(split, num, seed))
        if split == "train":
            for place, text in ((2, "A  test 1"), (5, "A validation 0")):
                prompts[place] = Prompt(prompts[place].id, self.name, text=text)
        return prompts


def test_contaminated_prompts_are_dropped_and_counted() -> None:
    module = data(Contaminated())
    message = r"2 of 9 training prompts of task 'a' .* are left out: 'a-train-2' with 'a-test-1' "
    with pytest.warns(UserWarning, match=message):
        batches = schedule(module)
    assert set(places(batches)) == {0, 1, 3, 4, 6, 7, 8}
    summary = module.summary()["training_prompts"]
    assert (summary["contaminated"], summary["kept"]) == ({"a": 2}, {"a": 7})
    with pytest.warns(UserWarning, match=r"1 of 7 .*'a-train-8' with 'q' \(exam\): 'a train 8'"):
        module.hold_out({"exam": [Prompt("q", "exam", text="A TRAIN 8")]})
    early = data(Counted())
    early.hold_out({"exam": [Prompt("q", "exam", text="A TRAIN 8")]})
    with pytest.warns(UserWarning, match=r"'a-train-8' with 'q' \(exam\)"):
        assert set(places(schedule(early))) == set(range(8))
    assert 8 not in places([[p.id for p in batch] for batch in module.schedule()])
    assert module.summary()["training_prompts"]["contaminated"] == {"a": 3}


def test_contaminated_prompts_may_be_kept() -> None:
    module = data(Contaminated(), decontaminate="warn")
    with pytest.warns(UserWarning, match="are trained on all the same"):
        assert set(places(schedule(module))) == set(range(9))
    silent = data(Contaminated(), decontaminate="off")
    assert set(places(schedule(silent))) == set(range(9))
    assert silent.summary()["training_prompts"] == {"decontaminate": "off", "kept": {"a": 9}}


def test_too_few_prompts_without_the_contaminated() -> None:
    module = data(Contaminated(), num_train_prompts=6, batch_size=10, num_rollouts=1)
    message = r"has 4 training prompts that share no text with a held-out prompt; .* takes 5"
    with (
        pytest.warns(UserWarning, match="2 of 6 training prompts"),
        pytest.raises(ValueError, match=message),
    ):
        module.setup("fit")


# -- numbers --------------------------------------------------------------------------------------


def test_share_of_mixed_groups() -> None:
    assert mixed_share([0.5], 2) == 0.5
    assert mixed_share([0.0, 1.0], 8) == 0.0
    assert mixed_share([0.25, 0.5], 4) == pytest.approx(
        ((1 - 0.25**4 - 0.75**4) + (1 - 2 * 0.5**4)) / 2
    )
    with pytest.raises(ValueError, match="no pass rates"):
        mixed_share([], 4)


def test_bins_of_the_histogram() -> None:
    assert histogram([i / 8 for i in range(9)]) == [1, 2, 2, 2, 1, 1]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    written(path, Counted(), num=3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert len(read_pass_rates(path)[1]) == 2
    assert len(PassRateFile(path, HEADER).rates) == 2
    written(path, Counted(), num=3)  # the rows again: the last of each prompt counts
    assert len(read_pass_rates(path)[1]) == 3


# -- the command ----------------------------------------------------------------------------------

CONFIG = """
model:
  class_path: tropism.GRPO
  init_args:
    model: {name: organism, dtype: float32}
    lora: {rank: 4, alpha: 8}
    group_size: 4
    sampling: {max_new_tokens: 12}
data:
  class_path: tropism.PromptDataModule
  init_args:
    tasks: [{class_path: tropism.tasks.skills.Skills}]
    batch_size: 8
    num_rollouts: 4
    num_train_prompts: 10
    num_validation_prompts: 4
    difficulty: {file: rates.jsonl, low: 0.2, curriculum: easy_first}
trainer: {accelerator: cpu}
"""


@pytest.fixture
def difficulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(CONFIG)

    def run(*arguments: str) -> None:
        given = ["--config", "x.yaml", "--num_samples", "4", *arguments]
        main(given, lambda settings: _cli(TropismCLI, settings, run=False))

    return run


def test_the_command_measures_once_and_training_reads_it(
    difficulty: Callable[..., None], tmp_path: Path, capsys: Any
) -> None:
    difficulty("--batch_size", "4")
    out = capsys.readouterr().out
    assert "10 prompts, 0 of them in rates.jsonl already" in out
    assert "mixed" in out
    path = tmp_path / "rates.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    header = json.loads(lines[0])
    assert header["model"]["name"] == "organism"
    assert header["sampling"] == {"max_new_tokens": 12, "temperature": 1.0}
    assert header["num_samples"] == 4
    rates = [PassRate(**json.loads(line)) for line in lines[1:]]
    assert len(rates) == 10
    assert len({rate.passed for rate in rates}) > 1  # the organism knows some of them

    # Interrupted after 3 prompts and in the middle of a line: the rest, and nothing twice.
    path.write_text("".join(lines[:4]) + lines[4][:9])
    difficulty("--batch_size", "3")
    assert "10 prompts, 3 of them in rates.jsonl already" in capsys.readouterr().out
    assert path.read_text() == "".join(lines)  # and a rate does not depend on its batch

    cli = _cli(TropismCLI, ["--config", "x.yaml"], run=False)
    cli.datamodule.setup("fit")
    order = [prompt.id for batch in cli.datamodule.schedule() for prompt in batch]
    passed = {rate.prompt_id: rate.passed for rate in rates}
    kept = sum(num >= 1 for num in passed.values())
    first = [passed[prompt_id] for prompt_id in order[:kept]]
    assert first == sorted(first, reverse=True)
    assert min(first) >= 1


def test_the_command_refuses_to_mix_measurements(
    difficulty: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROPISM_CACHE", str(tmp_path / "cache"))
    difficulty("--split", "validation", "--file", "validation.jsonl")
    assert len(read_pass_rates(tmp_path / "validation.jsonl")[1]) == 4
    with pytest.raises(ValueError, match="has pass rates of another sampling"):
        difficulty(
            "--file", "validation.jsonl", "--model.init_args.sampling.temperature", "0.7"
        )  # fmt: skip
    difficulty("--data.init_args.difficulty", "null", "--split", "validation")
    [cached] = (tmp_path / "cache/difficulty").glob("*.jsonl")
    assert cached.read_text() == (tmp_path / "validation.jsonl").read_text()
