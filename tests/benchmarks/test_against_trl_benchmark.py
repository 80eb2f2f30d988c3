"""The comparison with TRL, on the organism: gate, forced lengths, equal work, counted FLOPs."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = ["--model", "organism", "--prompt-tokens", "12", "--max-new-tokens", "12"]
PARITY = {
    "problems": [],
    "float32": {"loss_error": 1e-8, "worst_tensor_error": 1e-6},
    **{
        name: {"cosine": 0.9991, "norm_ratio": 1.002}
        for name in ("bfloat16", "tropism_bfloat16_with_float32", "trl_bfloat16_with_float32")
    },
}


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def small(organism: str, **changes):
    from tropism.weights import resolve

    settings = {"prompt_tokens": 12, "max_new_tokens": 10, "group_size": 4, **changes}
    return import_module("workload").Workload(
        model=organism, folder=str(resolve(organism)), **settings
    )


@pytest.fixture
def tokenizer(organism):
    from transformers import AutoTokenizer

    from tropism.weights import resolve

    return AutoTokenizer.from_pretrained(resolve(organism))


def test_lengths_are_spread_alike_over_the_groups():
    workload = import_module("workload").Workload(model="", folder="")
    lengths = workload.lengths
    assert len(lengths) == 16
    assert sum(lengths) == 16 * 77
    assert (min(lengths), max(lengths)) == (58, 96)
    assert abs(sum(lengths[:8]) - sum(lengths[8:])) < 8 * 4


@pytest.mark.parametrize("num_tokens", [9, 33, 100])
def test_prompts_have_exactly_the_wanted_tokens_and_differ(organism, tokenizer, num_tokens):
    texts = small(organism, prompt_tokens=num_tokens).prompts(tokenizer)
    assert [len(tokenizer(text)["input_ids"]) for text in texts] == [num_tokens] * 2
    assert len(set(texts)) == 2


def test_layers_of_each_placement(organism):
    assert small(organism, layers="top_third").adapted_layers() == [8, 9, 10, 11]
    assert small(organism, layers="top_half").adapted_layers() == [6, 7, 8, 9, 10, 11]
    assert small(organism).adapted_layers() == list(range(12))


def test_flops_by_hand():
    sizes = {"head": 1000, "0": 10, "1": 20, "2": 40}
    found = import_module("workload").least_flops(
        sizes, num_prompts=2, prompt_tokens=5, lengths=[3, 4, 2, 3], layers=[1, 2]
    )
    tokens = 2 * 5 + 12 - 4
    assert found["rollout"] == 2 * 70 * tokens + 2 * 1000 * 12
    assert found["train"] == 2 * (70 + 60) * tokens + 4 * 1000 * 12


def test_forced_lengths_of_trl_end_each_row_at_its_token():
    pytest.importorskip("trl", reason="needs the extra `bench`")
    force = import_module("trl_side").ForcedLengths([1, 3], [4, 5], prompt_width=7)
    for position, ending in enumerate(([True, False], [False, False], [False, True])):
        scores = force(torch.zeros(2, 7 + position), torch.ones(2, 6))
        for row, is_end in zip(scores, ending, strict=True):
            assert row.isfinite().nonzero().flatten().tolist() == ([4] if is_end else [0, 1, 2, 3])


def test_what_our_gate_compares(monkeypatch, organism):
    """The same gradients pass; a row left out on our side does not."""
    pytest.importorskip("trl", reason="needs the extra `bench`")
    parity = import_module("parity")
    workload = small(organism)
    found = parity.gate(workload, bf16=True)
    assert found["problems"] == []
    assert found["float32"]["worst_tensor_error"] < 1e-4
    whole = parity.prepare

    def one_row_short(batch, *args, **options):
        batch.advantages[0] = 0.0
        return whole(batch, *args, **options)

    monkeypatch.setattr(parity, "prepare", one_row_short)
    assert any(
        "float32 gradients" in problem for problem in parity.gate(workload, bf16=True)["problems"]
    )


def test_command_measures_both_sides_and_writes_the_ratios(monkeypatch, tmp_path, capsys):
    pytest.importorskip("trl", reason="needs the extra `bench`")
    command, processes = import_module("against_trl"), import_module("processes")
    run = processes.run
    monkeypatch.setattr(
        processes, "run", lambda name, *given: PARITY if name == "parity" else run(name, *given)
    )
    output = tmp_path / "result.json"
    command.main(
        [*SMALL, "--group-size", "2", "--steps", "1", "--rounds", "1", "--output", str(output)]
    )
    result = json.loads(output.read_text())
    sides = result["sides"]
    assert list(sides) == ["TRL 4 x 1", "tropism"]
    assert result["lengths"] == [7, 10, 9, 12]
    for side in sides.values():
        seconds = side["seconds"]
        assert side["num_steps"] == 1
        assert side["tokens_per_second"] == pytest.approx(38 / seconds["step"])
        assert 0 < seconds["reward"] < seconds["rollout"] < seconds["step"]
        phases = seconds["rollout"] + seconds["reward"] + seconds["train"]
        assert phases == pytest.approx(seconds["step"])
        assert side["megabytes"] > 200
    told = capsys.readouterr().out
    assert "cosine 0.9991" in told
    assert "the throughput" in told


def test_nothing_is_timed_after_a_failed_gate(monkeypatch):
    processes = import_module("processes")
    asked = []

    def run(name, workload, options):
        asked.append(name)
        return {"problems": ["float32 losses: 1 and 2"]}

    monkeypatch.setattr(processes, "run", run)
    with pytest.raises(SystemExit, match=r"(?s)not compute the same thing.*float32 losses"):
        import_module("against_trl").main(SMALL)
    assert asked == ["parity"]


def test_ratios_are_against_the_usual_and_the_best_setting():
    sides = {
        "TRL 4 x 4": {"tokens_per_second": 20.0, "megabytes": 2000.0},
        "TRL 16 x 1": {"tokens_per_second": 25.0, "megabytes": 4000.0},
        "tropism": {"tokens_per_second": 100.0, "megabytes": 1500.0},
    }
    assert import_module("report").ratios(sides, usual="TRL 4 x 4") == {
        "throughput_ratio": 5.0,
        "throughput_ratio_best": 4.0,
        "memory_ratio": 0.75,
    }


def test_different_work_is_refused():
    processes = import_module("processes")
    answer = {
        "prompt_token_ids": [[1, 2]], "trainable": 8, "layers": [0], "linear_sizes": {"head": 1},
        "threads": 2,
    }  # fmt: skip
    processes.check_same_work({"a": [answer], "b": [dict(answer)]})
    with pytest.raises(processes.SideFailedError, match="differ in prompt_token_ids"):
        processes.check_same_work(
            {"a": [answer], "b": [{**answer, "prompt_token_ids": [[0, 1, 2]]}]}
        )


def test_growth_appends_points_and_skips_finished_ones(monkeypatch, tmp_path, capsys):
    growth = import_module("growth")
    measured = []

    def measure(point, *, steps, bf16):
        measured.append(point["group_size"])
        return {**point, **dict.fromkeys(growth.MEASURED, 1.5), "steps": steps, "threads": 1}

    monkeypatch.setattr(growth, "measure", measure)
    monkeypatch.setattr(growth, "processes", SimpleNamespace(
        why_not_idle=lambda: None, SideFailedError=growth.processes.SideFailedError
    ))  # fmt: skip
    output = tmp_path / "growth.csv"
    call = ["--only", "group size", "--output", str(output)]
    growth.main(call)
    growth.main(call)
    assert measured == [4, 8, 16, 32]
    growth.main([*call[:1], "layers", *call[2:]])  # through the same point as group size 8
    assert measured == [4, 8, 16, 32, 8, 8]
    growth.main([*call, "--again"])
    assert measured[6:] == [4, 8, 16, 32]
    assert len(output.read_text().splitlines()) == 1 + 4 + 2 + 4
    assert "finished before" in capsys.readouterr().out
