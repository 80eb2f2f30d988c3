"""Rollouts from a real ``vllm serve`` of SmolLM2-135M in fp32: must be the trainer's to the digit.

What takes time is its start, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tropism.measurements import metrics as names
from tropism.measurements.layer_names import LinearSite
from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy
from tropism.rollouts.adapter_folders import AdapterFolders
from tropism.rollouts.collate import rows_of
from tropism.rollouts.engine import EngineUnreachableError, Sampling
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.rollouts.vllm_server_engine import VLLMServerEngine
from tropism.types import Prompt, Rollout

pytestmark = pytest.mark.vllm

PROMPTS = [
    Prompt(id=f"p{i}", task="t", messages=({"role": "user", "content": text},))
    for i, text in enumerate(["Count to ten.", "Write JSON with a name and an age."])
]
SAMPLING = Sampling(max_new_tokens=8, temperature=0.7)
ROUNDING = 2e-4


@pytest.fixture(scope="session")
def served(new_vllm_server: Callable[[Path], Any], smollm2: Path) -> Any:
    server = new_vllm_server(smollm2)
    server.start()
    server.wait()
    return server


def load(rank: int = 8, **model: Any) -> Policy:
    torch.manual_seed(1)
    settings = Model(name="smollm2-135m-instruct", dtype="float32", **model)
    policy = load_policy(settings, LoRA(rank=rank, alpha=16))
    policy.model.eval()
    return policy


@pytest.fixture(scope="module")
def trainer() -> Policy:
    return load()


@pytest.fixture(scope="module")
def engine(served: Any, trainer: Policy) -> VLLMServerEngine:
    found = VLLMServerEngine(url=served.url, max_sampler_gap=0.05)
    found.bind(trainer)
    return found


@pytest.fixture(autouse=True)
def no_adapter(trainer: Policy) -> None:
    adapt(trainer, lambda site: False)


def adapt(policy: Policy, plan: Callable[[LinearSite], bool], *, seed: int = 0) -> None:
    """A large B at the chosen linears, 0 elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for site in policy.sites:
            b = policy.adapter(site).b
            drawn = torch.randn(b.shape, generator=generator) * 0.15
            b.copy_(drawn if plan(site) else torch.zeros_like(b))


def draw(engine: VLLMServerEngine | TransformersEngine, **changed: Any) -> list[Rollout]:
    options = {"group_size": 3, "sampling": SAMPLING, "seed": 0, "rollout": 0} | changed
    return engine.generate(options.pop("prompts", PROMPTS), **options)


def tokens(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [c.token_ids for rollout in rollouts for c in rollout.completions]


@torch.no_grad()
def gap(policy: Policy, rollouts: list[Rollout], temperature: float = 0.7) -> torch.Tensor:
    """[N] absolute difference of each token's log-probability to the trainer's."""
    found, size = [], len(rollouts[0].completions)
    for i in range(len(rollouts)):
        part = rows_of(rollouts, range(i * size, (i + 1) * size), pad_token_id=policy.pad_token_id)
        logprobs, _ = policy.completion_logprobs(part, temperature=temperature)
        found.append(logprobs[part.mask])
    drawn = [c.sampler_logprobs for rollout in rollouts for c in rollout.completions]
    return (torch.cat(found) - torch.cat(drawn)).abs()


def likeliest(policy: Policy) -> list[tuple[int, ...]]:
    """Greedy completions by the trainer's own engine."""
    own = TransformersEngine()
    own.bind(policy)
    return tokens(draw(own, group_size=1, greedy=True))


def test_completions_are_the_policys_whatever_is_drawn_beside_them(trainer, engine):
    together = draw(engine)
    assert float(gap(trainer, together).max()) < ROUNDING
    assert float(gap(trainer, together, 1.0).mean()) > 0.02
    alone = [draw(engine, prompts=[prompt], group_size=2) for prompt in PROMPTS]
    firsts = [c.token_ids for rollout in together for c in rollout.completions[:2]]
    assert [ids for rollouts in alone for ids in tokens(rollouts)] == firsts
    assert tokens(draw(engine, rollout=1)) != tokens(together)
    assert tokens(draw(engine, group_size=1, greedy=True)) == likeliest(trainer)


def test_only_the_trainers_tokens_end_a_completion(trainer, engine, monkeypatch):
    usual = tokens(draw(engine, group_size=1))
    stop = usual[0][3]
    monkeypatch.setattr(trainer, "eos_token_ids", frozenset({stop}))
    (rollout, _) = draw(engine, group_size=1)
    (completion,) = rollout.completions
    assert completion.finish_reason == "stop"
    assert completion.token_ids == usual[0][: usual[0].index(stop) + 1]
    assert len(completion.sampler_logprobs) == len(completion.token_ids)


@pytest.mark.fault(15)
@pytest.mark.fault(16)
@pytest.mark.parametrize("module", ["k_proj", "gate_proj", None])
def test_after_any_plan_the_server_is_the_trainer_and_not_the_base(served, trainer, engine, module):
    base = likeliest(trainer)
    adapt(trainer, lambda site: module in (None, site.module), seed=2)
    rollouts = draw(engine)
    assert float(gap(trainer, rollouts).max()) < ROUNDING
    size = sum(a.a.nbytes + a.b.nbytes for s in trainer.sites if (a := trainer.adapter(s)).b.any())
    assert engine.metrics()[names.SYNC_MEGABYTES] == pytest.approx(size / 1e6)
    assert tokens(draw(engine, group_size=1, greedy=True)) == likeliest(trainer)
    assert engine.metrics()[names.SYNC_MEGABYTES] == 0
    assert served.get("/v1/models").count('"tropism-') == 1  # older versions are unloaded
    adapt(trainer, lambda site: False)
    assert float(gap(trainer, rollouts).mean()) > 0.02
    assert tokens(draw(engine, group_size=1, greedy=True)) == base
    assert served.get("/v1/models").count('"tropism-') == 0


@pytest.mark.fault(19)
def test_a_prompt_seen_before_an_update_is_computed_anew_after_it(trainer, engine):
    adapt(trainer, lambda site: site.module == "v_proj", seed=4)
    prompt = [Prompt(id="long", task="t", text="The cat sat on the mat, and then " * 8)]
    draw(engine, prompts=prompt, group_size=1)
    draw(engine, prompts=prompt, group_size=1)
    assert engine.metrics()[names.PREFIX_CACHE_HITS] > 0.5
    assert 0 <= engine.metrics()[names.QUEUE_SECONDS] < 5
    adapt(trainer, lambda site: site.module == "v_proj", seed=5)
    rollouts = draw(engine, prompts=prompt, group_size=1)
    assert engine.metrics()[names.PREFIX_CACHE_HITS] == 0
    assert float(gap(trainer, rollouts).max()) < ROUNDING


@pytest.mark.fault(15)
def test_the_first_rollout_is_of_the_adapter_that_the_run_starts_from(served, trainer, tmp_path):
    adapt(trainer, lambda site: site.module in ("q_proj", "up_proj"), seed=3)
    trainer.export(tmp_path)
    second = load(adapter=str(tmp_path / "adapter"))
    engine = VLLMServerEngine(url=served.url)
    engine.bind(second)
    rollouts = draw(engine)
    assert float(gap(second, rollouts).max()) < ROUNDING
    adapt(trainer, lambda site: False)
    assert float(gap(trainer, rollouts).mean()) > 0.02


def test_what_nobody_waits_for_any_more_is_not_drawn_on(served, trainer, engine, monkeypatch):
    draw(engine)
    monkeypatch.setattr(trainer, "eos_token_ids", frozenset())
    monkeypatch.setattr(engine, "request_seconds", 2.0)
    monkeypatch.setattr(engine, "wait_seconds", 0.0)
    with pytest.raises(EngineUnreachableError, match="ReadTimeout"):
        draw(engine, sampling=Sampling(max_new_tokens=400, temperature=0.7), group_size=8)
    until = time.monotonic() + 60
    while time.monotonic() < until and running(served):
        time.sleep(0.1)
    assert running(served) == 0


def running(served: Any) -> float:
    lines = (served.get("/metrics") or "").splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("vllm:num_requests_running{")
    )


# -- refusals, in vLLM's own words ----------------------------------------------------------------


def test_a_server_of_another_model_is_refused(served):
    other = load()
    with torch.no_grad():
        for site in other.sites:
            other.weight(site).mul_(1.2)
    engine = VLLMServerEngine(url=served.url)
    engine.bind(other)
    with pytest.raises(ValueError, match=r"is not the trainer's base .*nats a token off"):
        draw(engine)


def test_a_rank_above_the_servers_is_refused_before_anything_is_sampled(served):
    engine = VLLMServerEngine(url=served.url)
    engine.bind(load(rank=16))
    with pytest.raises(ValueError, match=r"rank 16 is greater.*--max-lora-rank 16"):
        draw(engine)


def test_a_folder_that_the_server_does_not_see_is_refused(served, trainer, monkeypatch, tmp_path):
    write = AdapterFolders.write
    monkeypatch.setattr(
        AdapterFolders, "write", lambda *args: (write(*args)[0], tmp_path / "elsewhere")
    )
    engine = VLLMServerEngine(url=served.url)
    engine.bind(trainer)
    with pytest.raises(ValueError, match=r"elsewhere.*engine\.adapter_folder"):
        draw(engine)


@pytest.mark.fault(17)
def test_an_adapter_that_vllm_drops_is_found_out(trainer, engine, monkeypatch):
    """A wrong prefix in the file: vLLM finds no module for it (vllm#34186)."""
    from tropism.lora import export

    draw(engine)
    adapt(trainer, lambda site: True)
    monkeypatch.setattr(export, "PREFIX", "base_model.model.wrapped.")
    with pytest.raises((RuntimeError, ValueError)):
        draw(engine)
    monkeypatch.undo()
    assert float(gap(trainer, draw(engine)).max()) < ROUNDING
