"""The data module: quotas, permutations, disjoint splits, resuming in mid-epoch."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tropism.data import PromptDataModule
from tropism.mixing import quota, quota_order
from tropism.rollout_loader import RolloutLoader
from tropism.tasks.base import Scores, Split, Task
from tropism.tasks.splits import NotEnoughPromptsError
from tropism.tasks.structured import StructuredOutput
from tropism.types import Prompt


class Counted(Task):
    """Prompt i of a split is called ``name-split-i``; there are ``num_available`` of them."""

    components = ("right",)
    primary = "right"

    def __init__(self, name: str = "counted", num_available: int = 1000) -> None:
        self.name, self.num_available = name, num_available

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        if num > self.num_available:
            raise NotEnoughPromptsError(self.name, split, num, self.num_available, "count on")
        return [self.prompt(split, i) for i in range(num)]

    def prompt(self, split: str, i: int) -> Prompt:
        return Prompt(
            id=f"{self.name}-{split}-{i}", task=self.name, text=f"{self.name} {split} {i}"
        )

    def score(self, prompt: Prompt, completion: str) -> Scores:
        return {"right": 0.0}


def data(*tasks: Task, **settings: Any) -> PromptDataModule:
    defaults: dict[str, Any] = {
        "batch_size": 8,
        "group_size": 2,
        "num_rollouts": 10,
        "num_validation_prompts": 5,
        "num_test_prompts": 5,
    }
    return PromptDataModule(list(tasks) or [Counted()], **{**defaults, **settings})


def ids(batches: Sequence[Sequence[Prompt]]) -> list[list[str]]:
    return [[prompt.id for prompt in batch] for batch in batches]


def schedule(module: PromptDataModule) -> list[list[str]]:
    module.setup("fit")
    return ids(module.schedule())


def flattened(batches: Sequence[Sequence[str]]) -> list[str]:
    return [prompt for batch in batches for prompt in batch]


# -- order ----------------------------------------------------------------------------------------


def test_each_epoch_is_another_permutation_of_all_prompts() -> None:
    flat = flattened(schedule(data(num_rollouts=10, num_train_prompts=20)))
    assert len(flat) == 40
    assert sorted(flat[:20]) == sorted(flat[20:]) == sorted(f"counted-train-{i}" for i in range(20))
    assert flat[:20] != flat[20:]


def test_prompts_of_a_rollout_depend_on_the_seed_and_its_index_alone() -> None:
    short = schedule(data(num_rollouts=7, num_train_prompts=30))
    long = schedule(data(num_rollouts=19, num_train_prompts=30))
    assert long[:7] == short
    assert schedule(data(num_rollouts=7, num_train_prompts=30, seed=1)) != short


def test_no_rollout_has_a_prompt_twice_even_where_epochs_meet() -> None:
    batches = schedule(data(num_rollouts=300, num_train_prompts=5))  # 4 of 5 in each rollout
    assert all(len(set(batch)) == 4 for batch in batches)
    flat = flattened(batches)
    for start in range(0, 1200, 5):
        assert len(set(flat[start : start + 5])) == 5


@pytest.mark.parametrize(
    "shares",
    [
        {"a": 0.5, "b": 0.5},
        {"a": 0.7, "b": 0.3},
        {"a": 0.6, "b": 0.3, "c": 0.1},
        {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3},
        {"a": 0.905, "b": 0.05, "c": 0.03, "d": 0.015},
    ],
)
def test_quotas_hold_to_within_one_at_every_point(shares: dict[str, float]) -> None:
    given: Counter[str] = Counter()
    for total, name in enumerate(islice(quota_order(shares), 2000), start=1):
        given[name] += 1
        for one, share in shares.items():
            assert abs(given[one] - share * total) < 1 + 1e-9
    assert quota(shares, 2000) == given


def test_tasks_are_mixed_by_share() -> None:
    module = data(Counted("a"), Counted("b"), mix={"b": 1, "a": 3}, num_validation_prompts=8)
    batches = schedule(module)
    tasks = [Counter(prompt.split("-")[0] for prompt in batch) for batch in batches]
    assert tasks == [Counter(a=3, b=1)] * 10
    (validation,) = list(module.val_dataloader())
    assert Counter(prompt.task for prompt in validation) == Counter(a=6, b=2)


# -- how many -------------------------------------------------------------------------------------


def test_by_default_no_prompt_repeats_while_there_are_enough() -> None:
    assert len(set(flattened(schedule(data(num_rollouts=50))))) == 200
    few = flattened(schedule(data(Counted(num_available=30), num_rollouts=50)))
    assert len(set(few)) == 30
    assert set(Counter(few).values()) <= {6, 7}


def test_held_out_prompts_are_fixed_and_in_batches() -> None:
    module = data(num_validation_prompts=5, num_test_prompts=4, validation_batch_size=2)
    module.setup()
    assert ids(list(module.val_dataloader())) == [
        ["counted-validation-0", "counted-validation-1"],
        ["counted-validation-2", "counted-validation-3"],
        ["counted-validation-4"],
    ]
    assert [len(batch) for batch in module.test_dataloader()] == [2, 2]
    assert len(module.val_dataloader()) == 3
    assert len(module.all_prompts()) == 40 + 5 + 4


def test_no_validation_prompts_means_no_loader() -> None:
    module = data(num_validation_prompts=0)
    module.setup("fit")
    assert module.val_dataloader() == []


def test_out_of_domain_tasks_are_evaluated_and_never_trained_on() -> None:
    others: dict[str, Any] = {
        "out_of_domain_tasks": [Counted("x"), Counted("y")],
        "num_out_of_domain_prompts": 5,
    }
    module = data(Counted("a"), Counted("b"), num_validation_prompts=4, **others)
    batches = schedule(module)
    assert batches == schedule(data(Counted("a"), Counted("b")))
    module.setup("test")
    for split, in_domain in (("validation", 4), ("test", 5)):
        pools = module.held_out_prompts(split)  # type: ignore[arg-type]
        assert list(pools) == ["a", "b", "x", "y"]
        assert len(pools["a"]) + len(pools["b"]) == in_domain
        assert [len(pools["x"]), len(pools["y"])] == [3, 2]
        assert {prompt.task for prompt in pools["y"]} == {"y"}
    validation = [prompt.task for batch in module.val_dataloader() for prompt in batch]
    assert Counter(validation) == Counter(a=2, b=2, x=3, y=2)
    assert {prompt.task for prompt in module.training_prompts()} == {"a", "b"}
    assert "y-test-1" in {prompt.id for prompt in module.all_prompts()}  # checked for length


class TrainsOnTheirs(Counted):
    def prompt(self, split: str, i: int) -> Prompt:
        text = f"x validation {i + 3}" if split == "train" else f"own {split} {i}"
        return Prompt(id=f"own-{split}-{i}", task=self.name, text=text)


def test_out_of_domain_prompts_are_held_out_too() -> None:
    module = data(TrainsOnTheirs("own"), out_of_domain_tasks=[Counted("x")])
    with pytest.raises(ValueError, match=r"'x-validation-3' .* is in split 'train' of task 'own'"):
        module.setup("fit")


class WithoutTest(Counted):
    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        if split == "test":
            raise NotEnoughPromptsError(self.name, split, num, 0, "give test_path")
        return super().prompts(split, num, seed)


def test_training_needs_no_test_prompts_but_testing_does() -> None:
    module = data(WithoutTest())
    module.setup("fit")
    assert len(list(module.train_dataloader())) == 10
    with pytest.raises(NotEnoughPromptsError, match="give test_path"):
        module.setup("test")


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "group_size=0: give at least 1"),
        ({"batch_size": 30, "group_size": 8}, "group_size=8; the nearest that are: 24 or 32"),
        ({"batch_size": 5, "group_size": 8}, "group_size=8; the nearest that are: 8 or 16"),
        ({"batch_size": 0, "group_size": 8}, "the nearest that are: 8 or 16"),
        ({"batch_size": -8, "group_size": 8}, "the nearest that are: 8 or 16"),
        ({"num_rollouts": 0}, "num_rollouts=0: give at least 1"),
        ({"num_validation_prompts": -1}, "num_validation_prompts=-1: give at least 0"),
        ({"validation_batch_size": 0}, "validation_batch_size=0"),
        ({"num_train_prompts": 3}, "num_train_prompts=3: give at least the 4 prompts"),
        (
            {"out_of_domain_tasks": [Counted("x"), Counted("y")], "num_out_of_domain_prompts": 1},
            "num_out_of_domain_prompts=1: give at least 2",
        ),
        ({"num_out_of_domain_prompts": -1}, "num_out_of_domain_prompts=-1: give at least 0"),
        ({"out_of_domain_tasks": [Counted()]}, r"tasks are called \['counted', 'counted'\]"),
        ({"mix": {"counting": 1.0}}, r"mix names \['counting'\], the tasks are \['counted'\]"),
        ({"mix": {"counted": 0.0}}, "mix.counted=0.0: give a share above 0"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data(**settings)


def test_tasks_that_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"tasks=\[\]: give at least one"):
        PromptDataModule([], batch_size=8, group_size=2, num_rollouts=1)
    with pytest.raises(ValueError, match=r"tasks are called \['counted', 'counted'\]"):
        data(Counted(), Counted())
    with pytest.raises(NotEnoughPromptsError, match="5 prompts of split 'validation' wanted, 4"):
        data(Counted(num_available=4)).setup("fit")
    with pytest.raises(NotEnoughPromptsError, match="40 prompts of split 'train' wanted, 30"):
        data(Counted(num_available=30), num_train_prompts=40).setup("fit")
    with pytest.raises(ValueError, match="'counted' has 3 training prompts; one rollout takes 4"):
        data(Counted(num_available=3), num_validation_prompts=1).setup("fit")


class Empty(Counted):
    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        return []


class SameText(Counted):
    def prompt(self, split: str, i: int) -> Prompt:
        return Prompt(id=f"{split}-{i}", task=self.name, text=f"question {i}")


class SameId(Counted):
    def prompt(self, split: str, i: int) -> Prompt:
        return Prompt(id=f"{i}", task=self.name, text=f"{split} {i}")


class Twice(Counted):
    def prompt(self, split: str, i: int) -> Prompt:
        return super().prompt(split, i // 2)


class Stray(Counted):
    def prompt(self, split: str, i: int) -> Prompt:
        return Prompt(id=f"{split}-{i}", task="other", text=f"{split} {i}")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Empty(), "gave 0 prompts of split 'train' where 40 were asked for; its data may be empty"),
        (SameText(), "'validation-0' of split 'validation', .* is in split 'train' .*'question 0'"),
        (SameId(), "'0' of split 'validation', task 'counted', is in split 'train'.*'id 0'"),
        (Twice(), "gave a prompt id twice in split 'train'"),
        (Stray(), r"gave prompts of tasks \['other'\]"),
    ],
)
def test_broken_tasks_are_found_at_setup(task: Task, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data(task).setup("fit")


# -- Lightning ------------------------------------------------------------------------------------


class Recorder(L.LightningModule):
    """Takes an optimizer step per rollout and notes which prompts it saw."""

    def __init__(self, save_at: int | None = None, folder: Path | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.save_at, self.folder = save_at, folder
        self.seen: list[list[str]] = []
        self.validated: list[list[str]] = []

    def training_step(self, batch: list[Prompt], batch_idx: int) -> None:
        assert type(batch) is list
        assert all(type(prompt) is Prompt for prompt in batch)
        if self.save_at == batch_idx and self.folder and self.folder.name == "inside":
            self.trainer.save_checkpoint(self.folder / "saved.ckpt")
        self.seen.append([prompt.id for prompt in batch])
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.weight.sum())
        optimizer.step()
        self.log("loss", 0.0, batch_size=len(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.save_at == batch_idx and self.folder and self.folder.name == "between":
            self.trainer.save_checkpoint(self.folder / "saved.ckpt")

    def validation_step(self, batch: list[Prompt], batch_idx: int) -> None:
        self.validated.append([prompt.id for prompt in batch])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    module: Recorder,
    folder: Path,
    ckpt_path: Path | None = None,
    **settings: Any,
) -> list[list[str]]:
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    # Prompts repeat within the run, so that a wrong order shows too.
    datamodule = data(num_train_prompts=17, **settings)
    trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=False)
    return module.seen


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("where", ["between", "inside"])
@pytest.mark.parametrize("save_at", [0, 4, 9])
def test_a_resumed_run_sees_what_the_whole_run_saw(
    tmp_path: Path, num_workers: int, where: str, save_at: int
) -> None:
    folder = tmp_path / where
    whole = fit(Recorder(save_at, folder), tmp_path, num_workers=num_workers)
    assert len(whole) == 10
    resumed = fit(Recorder(), tmp_path, ckpt_path=folder / "saved.ckpt", num_workers=num_workers)
    # A checkpoint out of a training step was written before that rollout was learnt from.
    assert resumed == whole[save_at + 1 if where == "between" else save_at :]


def test_more_rollouts_may_be_asked_for_when_resuming(tmp_path: Path) -> None:
    whole = fit(Recorder(), tmp_path, num_rollouts=14)
    first = fit(Recorder(7, tmp_path / "between"), tmp_path)
    more = fit(Recorder(), tmp_path, tmp_path / "between" / "saved.ckpt", num_rollouts=14)
    assert first[:8] + more == whole


def test_resuming_with_other_prompts_is_refused(tmp_path: Path) -> None:
    fit(Recorder(4, tmp_path / "between"), tmp_path)
    path = tmp_path / "between" / "saved.ckpt"
    with pytest.raises(ValueError, match=r"differently .*seed: 0 then, 3 now.* Resume with its"):
        fit(Recorder(), tmp_path, ckpt_path=path, seed=3)


def test_validation_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    module = Recorder()
    fit(module, tmp_path)
    assert module.validated == [[f"counted-validation-{i}" for i in range(5)]]


def test_a_loader_without_a_trainer_counts_what_it_handed_out() -> None:
    batches = [[Counted().prompt("train", i)] for i in range(6)]
    loader = RolloutLoader(batches, identity={"seed": 0})
    assert ids(list(islice(loader, 2))) == [["counted-train-0"], ["counted-train-1"]]
    state = loader.state_dict()
    other = RolloutLoader(batches, identity={"seed": 0})
    other.load_state_dict(state)
    assert ids(list(other)) == ids(batches[2:])
    assert ids(list(other)) == ids(batches)  # the next epoch is a whole one
    assert len(other) == 6


def test_a_real_task_fits_the_data_module() -> None:
    module = data(StructuredOutput(tier=1), num_validation_prompts=64, num_test_prompts=64)
    module.setup()
    assert len({prompt.id for prompt in module.all_prompts()}) == 40 + 64 + 64
