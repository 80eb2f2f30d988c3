"""vLLM against the trainer on SmolLM2, token by token: what ``benchmarks/vllm_parity.py`` reports.

In bf16 the trainer's own cached decoding does not quite agree with its own full forward; vLLM may
be one point below that.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tropism.models import LoRA, Model, load_policy

pytestmark = pytest.mark.vllm
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("vllm_parity")


@pytest.fixture(params=["bfloat16", "float32"])
def sides(request, parity, smollm2) -> Iterator[tuple]:
    policy = load_policy(Model(name=str(smollm2), dtype=request.param), LoRA(rank=8, alpha=16))
    policy.model.eval()
    engine = parity.Forced(engine_args={"max_model_len": 512, "kv_cache_memory_bytes": 1 << 28})
    engine.bind(policy)
    yield request.param, policy, engine
    engine.close()


def test_the_likeliest_tokens_are_the_trainers(parity, sides):
    dtype, policy, engine = sides
    num_rows = 32 if dtype == "bfloat16" else 8
    task = parity.StructuredOutput(tier=1)
    prompts = list(task.prompts("validation", num_rows // 4, seed=0))
    found = parity.agreement(policy, engine, prompts, 4)
    assert found["tokens"] == num_rows * 64
    assert found["mean_ratio"] == pytest.approx(1.0, abs=0.02)
    own = found["trainer_cached_against_full"]
    if dtype == "float32":
        assert found["argmax_agreement"] >= 0.995
        assert found["gap"]["mean"] < 1e-4
    else:
        assert found["argmax_agreement"] >= own["argmax_agreement"] - 0.01
        assert found["gap"]["mean"] < 1.5 * own["gap"]["mean"]
    (row,) = parity.by_plan(policy, engine, prompts[:4], ["k_proj alone"]).values()
    assert row["gap_to_trainer"]["mean"] < 1.5 * max(own["gap"]["mean"], 1e-4)
    assert row["mean_gap_to_base"] > 0.1
