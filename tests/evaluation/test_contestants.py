"""Models under test: each kind shows exactly the weights that were trained, and none stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tropism.evaluation.contestants import Checkpoint, TunedAdapter, TunedModel, contestants
from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy

MODEL = Model(name="organism")
IDS = torch.arange(5, 40)[None]


@pytest.fixture(scope="module")
def bare() -> Policy:
    return load_policy(MODEL, None)


@pytest.fixture(scope="module")
def tuned() -> Policy:
    """With LoRA of rank 4 whose B is no longer zero."""
    policy = load_policy(MODEL, LoRA(rank=4, alpha=8))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in policy.named_trainable().items():
            if "lora_B" in name:
                value.normal_(std=0.02, generator=generator)
    return policy


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = policy.base(input_ids=IDS, use_cache=False).logits
    return found


def save_checkpoint(path: Path, policy: Policy, lora: dict[str, Any] | None, **model: str) -> Path:
    """What Lightning writes of a run, as far as a test of it goes."""
    state = {f"network.{name}": value for name, value in policy.named_trainable().items()}
    content = {
        "state_dict": {name: value.detach() for name, value in state.items()},
        "hyper_parameters": {"model": {"name": "organism", **model}, "lora": lora},
        "tropism": {"rollout": 3},
        "global_step": 5,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def test_adapter_and_checkpoint_show_what_the_sampler_saw_in_training(
    tmp_path: Path, bare: Policy, tuned: Policy
) -> None:
    with torch.no_grad(), tuned.merged():
        expected = logits(tuned)
    before = logits(bare)
    assert not torch.equal(before, expected)
    tuned.export(tmp_path)
    file = save_checkpoint(tmp_path / "x.ckpt", tuned, {"rank": 4, "alpha": 8.0})
    adapter, compact, checkpoint = contestants(
        MODEL, [str(tmp_path / "adapter"), str(tmp_path / "adapter_compact"), str(file)], base=False
    )
    assert isinstance(adapter, TunedAdapter)
    assert isinstance(checkpoint, Checkpoint)
    assert (checkpoint.rollout, checkpoint.step) == (3, 5)
    for one in (adapter, checkpoint):
        with one.shown(bare):
            assert torch.equal(logits(bare), expected)
        assert torch.equal(logits(bare), before)
    with compact.shown(bare):
        assert torch.allclose(logits(bare).float(), expected.float(), atol=0.1)


def test_a_whole_model(tmp_path: Path, bare: Policy) -> None:
    policy = load_policy(MODEL, None)
    with torch.no_grad():
        for value in policy.named_trainable().values():
            value.mul_(1.0625)
    expected, before = logits(policy), logits(bare)
    policy.export(tmp_path)
    file = save_checkpoint(tmp_path / "x.ckpt", policy, None)
    model, checkpoint = contestants(MODEL, [str(tmp_path / "model"), str(file)], base=False)
    assert isinstance(model, TunedModel)
    for one in (model, checkpoint):
        with one.shown(bare):
            assert torch.equal(logits(bare), expected)
    assert torch.equal(logits(bare), before)


def test_a_run_folder_stands_for_what_it_exported(tmp_path: Path, tuned: Policy) -> None:
    run = tmp_path / "version_0"
    last = save_checkpoint(run / "checkpoints" / "last.ckpt", tuned, {"rank": 4, "alpha": 8.0})
    (run / "run.json").write_text(json.dumps({"summary": {"rollouts": 12}}))
    (stopped,) = contestants(MODEL, [str(run)], base=False)  # nothing is exported yet
    assert (stopped.name, stopped.path, stopped.rollout) == ("version_0", last, 3)
    tuned.export(run)
    (ended,) = contestants(MODEL, [str(run)], base=False)
    assert (ended.path, ended.rollout) == (run / "adapter", 12)


def test_the_base_is_what_the_config_starts_from(
    tmp_path: Path, bare: Policy, tuned: Policy
) -> None:
    (base,) = contestants(MODEL, [], base=True)
    assert (base.name, base.fingerprint()) == ("base", {})
    tuned.export(tmp_path)
    start = Model(name="organism", adapter=str(tmp_path / "adapter"))
    (started,) = contestants(start, [], base=True)
    assert started.name == "base"
    with torch.no_grad(), tuned.merged():
        expected = logits(tuned)
    with started.shown(bare):
        assert torch.equal(logits(bare), expected)


def test_names_are_as_short_as_they_can_be(tmp_path: Path, tuned: Policy) -> None:
    paths = [tmp_path / name / "checkpoints" / "last.ckpt" for name in ("a", "b")]
    for path in paths:
        save_checkpoint(path, tuned, {"rank": 4, "alpha": 8.0})
    found = contestants(MODEL, [str(path) for path in paths], base=True)
    assert [one.name for one in found] == [
        "base", "a/checkpoints/last.ckpt", "b/checkpoints/last.ckpt"
    ]  # fmt: skip
    (alone,) = contestants(MODEL, [str(paths[0])], base=False)
    assert alone.name == "last.ckpt"


def test_fingerprints_follow_the_weights(tmp_path: Path, tuned: Policy) -> None:
    tuned.export(tmp_path)
    (adapter,) = contestants(MODEL, [str(tmp_path / "adapter")], base=False)
    first = adapter.fingerprint()
    assert set(first) == {"adapter_config.json", "adapter_model.safetensors"}
    assert adapter.fingerprint() == first
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert adapter.fingerprint() != first


def test_what_is_no_model_is_refused(tmp_path: Path, tuned: Policy, bare: Policy) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"empty'.*give a \.ckpt file"):
        contestants(MODEL, [str(empty)], base=True)
    with pytest.raises(ValueError, match=r"nowhere\.ckpt'.*give a \.ckpt file"):
        contestants(MODEL, [str(tmp_path / "nowhere.ckpt")], base=True)
    with pytest.raises(ValueError, match="names one model twice"):
        contestants(MODEL, [str(empty), str(tmp_path / "." / "empty")], base=True)
    with pytest.raises(ValueError, match=r"suite\.base=false and no checkpoint"):
        contestants(MODEL, [], base=False)
    text = tmp_path / "text.ckpt"
    text.write_text("not a checkpoint")
    with pytest.raises(ValueError, match=r"text\.ckpt' is no checkpoint of `tropism fit`"):
        contestants(MODEL, [str(text)], base=True)
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(
        ValueError, match=r"other\.ckpt' is no checkpoint.*no hyper_parameters, tropism"
    ):
        contestants(MODEL, [str(tmp_path / "other.ckpt")], base=True)
    elsewhere = save_checkpoint(tmp_path / "else.ckpt", tuned, None, name="smollm2-135m-instruct")
    with pytest.raises(ValueError, match=r"model\.name='smollm2-135m-instruct', the config has"):
        contestants(MODEL, [str(elsewhere)], base=True)
    partial = save_checkpoint(tmp_path / "partial.ckpt", tuned, None)
    (one,) = contestants(MODEL, [str(partial)], base=False)
    with pytest.raises(ValueError, match="is of another network"), one.shown(bare):
        pass
