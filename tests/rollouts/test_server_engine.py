"""Rollouts over HTTP, from a server that answers as vLLM does and fails where it is told to."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tropism.lora.export import load_adapter_tensors
from tropism.measurements import metrics as names
from tropism.models import Model, load_policy
from tropism.policy import Policy
from tropism.rollouts import server_client
from tropism.rollouts.engine import (
    AheadEngine,
    EngineUnreachableError,
    RemoteEngine,
    Sampling,
)
from tropism.rollouts.pending import CancelledError
from tropism.rollouts.random_streams import request_seed
from tropism.rollouts.server_client import RefusedError
from tropism.rollouts.server_proof import trainer_logprobs
from tropism.rollouts.server_protocol import cache_and_queue
from tropism.rollouts.vllm_server_engine import VLLMServerEngine
from tropism.types import GenerationProgress, Prompt, Rollout

PROMPTS = [Prompt(id=f"p{i}", task="t", text=text) for i, text in enumerate(["12+30=", "cat: "])]
SAMPLING = Sampling(max_new_tokens=6, temperature=0.8)
COMPLETIONS = "/v1/completions"
AWAY = "ignore:engine.url=.*the run waits for it"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "FIRST_PAUSE", 0.01)


@pytest.fixture
def engine(server: Any, learner: Policy) -> VLLMServerEngine:
    found = VLLMServerEngine(url=server.url, wait_seconds=20)
    found.bind(learner)
    return found


def draw(engine: VLLMServerEngine, **changed: Any) -> list[Rollout]:
    options = {"group_size": 3, "sampling": SAMPLING, "seed": 0, "rollout": 0} | changed
    return engine.generate(options.pop("prompts", PROMPTS), **options)


def tokens(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [c.token_ids for rollout in rollouts for c in rollout.completions]


def gap(policy: Policy, rollouts: list[Rollout], temperature: float = 0.8) -> float:
    """Largest difference of a log-probability to the trainer's."""
    found: list[Tensor] = []
    for rollout in rollouts:
        for completion in rollout.completions:
            ids = (*rollout.prompt_token_ids, *completion.token_ids)
            given = len(rollout.prompt_token_ids)
            own = trainer_logprobs(policy, ids, num_given=given, temperature=temperature)
            found.append((own - completion.sampler_logprobs).abs())
    return float(torch.cat(found).max())


def adapt(policy: Policy, seed: int = 0, scale: float = 0.3) -> None:
    """A large B at every linear."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for site in policy.sites:
            b = policy.adapter(site).b
            b.copy_(torch.randn(b.shape, generator=generator) * scale)


# -- sampling -------------------------------------------------------------------------------------


def test_completions_are_the_policys_in_order_with_a_seed_for_each_prompt(server, engine, learner):
    rollouts = draw(engine)
    assert isinstance(engine, RemoteEngine)
    assert gap(learner, rollouts) < 1e-4
    assert tokens(draw(engine, group_size=2)) == [
        c.token_ids for rollout in rollouts for c in rollout.completions[:2]
    ]
    assert tokens(draw(engine, prompts=PROMPTS[1:])) == tokens(rollouts[1:])
    assert tokens(draw(engine, rollout=1)) != tokens(rollouts)
    asked = [body for body in server.posted(COMPLETIONS) if body["max_tokens"] == 6][:2]
    for body, prompt in zip(
        sorted(asked, key=lambda b: len(b["prompt"])), PROMPTS[::-1], strict=True
    ):
        assert body["prompt"] == list(learner.encode(prompt))
        assert body["seed"] == request_seed(seed=0, rollout=0, prompt_id=prompt.id, sample=0)
        assert (body["n"], body["temperature"], body["top_p"], body["top_k"]) == (3, 0.8, 1, 0)
        assert set(body["stop_token_ids"]) == learner.eos_token_ids


def test_the_likeliest_completion_is_asked_for_once(server, engine):
    (rollout, _) = draw(engine, greedy=True)
    assert len(set(tokens([rollout]))) == 1
    assert len(rollout.completions) == 3
    assert {
        b["n"] for b in server.posted(COMPLETIONS) if b.get("temperature") == 0 and "n" in b
    } == {1}


def test_progress_reaches_the_total_and_stopping_leaves_nothing_behind(server, engine):
    seen: list[GenerationProgress] = []
    draw(engine)  # the server is proved, which asks for completions too
    server.faults[COMPLETIONS] = [lambda: time.sleep(0.5)]  # else both may be done at once
    expected = draw(engine, progress=seen.append)
    assert [(p.done, p.total) for p in seen] == [(3, 6), (6, 6)]
    assert seen[-1].tokens == sum(map(len, tokens(expected)))

    class Stopped(Exception):
        pass

    def stop(progress: GenerationProgress) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        draw(engine, progress=stop)
    assert tokens(draw(engine)) == tokens(expected)


def test_a_prompt_longer_than_the_servers_context_is_refused_by_id(engine):
    long = Prompt(id="long", task="t", text="1+" * 300)
    with pytest.raises(ValueError, match=r"'long' has \d+ tokens"):
        draw(engine, prompts=[long])


def test_vllm_need_not_be_installed(engine, learner, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert gap(learner, draw(engine)) < 1e-4


# -- adapters -------------------------------------------------------------------------------------


def test_only_an_adapter_that_moved_is_sent_under_a_name_of_its_own(server, engine, learner):
    base = draw(engine)
    assert server.adapters == {}  # the one of the try-out is unloaded
    assert engine.metrics()[names.SYNC_MEGABYTES] == 0
    adapt(learner)
    first = draw(engine)
    assert gap(learner, first) < 1e-4
    assert tokens(first) != tokens(base)
    ((name, folder),) = server.adapters.items()
    _, pairs = load_adapter_tensors(folder)
    num_bytes = sum(a.nbytes + b.nbytes for a, b, _ in pairs.values())
    assert engine.metrics()[names.SYNC_MEGABYTES] == pytest.approx(num_bytes / 1e6)
    assert engine.metrics()[names.SYNC_SECONDS] > 0
    assert tokens(draw(engine)) == tokens(first)
    assert list(server.adapters) == [name]
    assert engine.metrics()[names.SYNC_MEGABYTES] == 0
    adapt(learner, seed=1)
    assert gap(learner, draw(engine)) < 1e-4
    ((second, other_folder),) = server.adapters.items()
    assert (second == name, other_folder == folder) == (False, False)
    loaded = [body["lora_name"] for body in server.posted("/v1/load_lora_adapter")]
    assert len(loaded) == len(set(loaded)) == 3
    adapt(learner, scale=0)
    assert tokens(draw(engine)) == tokens(base)
    assert server.adapters == {}


def test_another_run_at_the_same_server_has_other_names(server, engine, learner):
    adapt(learner)
    draw(engine)
    (first,) = server.adapters
    other = VLLMServerEngine(url=server.url)
    other.bind(learner)
    draw(other)
    assert first in server.adapters
    assert len(server.adapters) == 2


def test_adapters_are_written_where_the_server_sees_them(server, learner, tmp_path):
    engine = VLLMServerEngine(url=server.url, adapter_folder=str(tmp_path))
    engine.bind(learner)
    adapt(learner)
    draw(engine)
    (folder,) = server.adapters.values()
    assert Path(folder).is_relative_to(tmp_path)
    missing = VLLMServerEngine(adapter_folder=str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"engine\.adapter_folder=.*no such folder"):
        missing.bind(learner)


# -- a server that is away ------------------------------------------------------------------------


def aborted(server: Any) -> Callable[[], tuple[int, Any]]:
    choice = {"index": 0, "finish_reason": "abort", "token_ids": [5], "text": ""}
    return lambda: (200, {"choices": [choice]})


@pytest.mark.parametrize("kind", ["503", "500", "cut", "abort"])
def test_what_a_server_did_not_answer_is_asked_again(server, engine, kind):
    expected = tokens(draw(engine))
    num_asked = len(server.posted(COMPLETIONS))
    faults = {
        "503": (503, {"error": {"message": "loading"}}),
        "500": (500, "Internal Server Error"),
        "cut": (0, ""),
        "abort": aborted(server),
    }
    server.faults[COMPLETIONS] = [faults[kind]] * 3
    with pytest.warns(UserWarning, match=r"does not answer \(.*\); the run waits.*up to 20 s"):
        assert tokens(draw(engine)) == expected
    assert len(server.posted(COMPLETIONS)) == num_asked + 2 + 3


def test_a_refusal_is_final(server, engine):
    draw(engine)
    num_asked = len(server.posted(COMPLETIONS))
    server.faults[COMPLETIONS] = [(400, {"error": {"message": "no such token"}})] * 9
    with pytest.raises(RefusedError, match=r"HTTP 400.*no such token"):
        draw(engine, prompts=PROMPTS[:1])
    assert len(server.posted(COMPLETIONS)) == num_asked + 1


@pytest.mark.filterwarnings(AWAY)
def test_a_server_that_stays_away_stops_the_run_after_the_time_to_wait(server, learner):
    engine = VLLMServerEngine(url=server.url, wait_seconds=0.3)
    engine.bind(learner)
    draw(engine)
    server.stop()
    started = time.monotonic()
    with pytest.raises(EngineUnreachableError, match=r"away for 0\.3 s .*engine\.wait_seconds"):
        draw(engine)
    assert 0.3 <= time.monotonic() - started < 5


@pytest.mark.filterwarnings(AWAY)
def test_a_server_that_does_not_answer_in_time_is_away(server, learner):
    engine = VLLMServerEngine(url=server.url, wait_seconds=0)
    engine.bind(learner)
    draw(engine)
    engine.request_seconds = 0.5
    server.faults[COMPLETIONS] = [lambda: time.sleep(2)] * 2
    with pytest.raises(EngineUnreachableError, match=r"ReadTimeout"):
        draw(engine)


@pytest.mark.filterwarnings(AWAY)
@pytest.mark.parametrize("is_adapted", [True, False])
def test_a_server_started_anew_is_proved_and_sent_the_adapter_again(
    server, engine, learner, is_adapted
):
    if is_adapted:
        adapt(learner)
    expected = tokens(draw(engine))

    def crash() -> tuple[int, str]:
        server.stop()
        server.start()
        return 0, ""

    server.faults[COMPLETIONS] = [crash]
    assert tokens(draw(engine)) == expected
    assert len(server.adapters) == is_adapted
    scored = [body for body in server.posted(COMPLETIONS) if "prompt_logprobs" in body]
    assert len(scored) == (4 if is_adapted else 1)  # base and adapter, twice


def begin(engine: VLLMServerEngine) -> Any:
    return engine.begin(PROMPTS, group_size=3, sampling=SAMPLING, seed=0, rollout=0)


def test_what_is_begun_is_of_the_adapter_of_then_and_the_rest_waits_for_it(engine, learner):
    learner.model.train()
    adapt(learner)
    expected = draw(engine)
    sent = engine.metrics()
    pending = begin(engine)
    assert isinstance(engine, AheadEngine)
    assert engine.metrics() is sent  # still of the rollout that was taken last
    adapt(learner, seed=1)
    assert gap(learner, draw(engine)) < 1e-4
    assert tokens(pending.result()) == tokens(expected)
    assert engine.metrics()[names.SYNC_MEGABYTES] == 0
    assert learner.model.training  # as it was


@pytest.mark.filterwarnings(AWAY)
def test_a_server_started_anew_while_it_draws_ahead_is_asked_again_with_the_adapter_of_now(
    server, engine, learner
):
    adapt(learner)
    expected = draw(engine)

    def crash() -> tuple[int, str]:
        server.stop()
        server.start()
        return 0, ""

    server.faults[COMPLETIONS] = [crash]
    pending = begin(engine)
    pending.wait()
    adapt(learner, seed=1)
    again = pending.result()
    assert gap(learner, again) < 1e-4
    assert tokens(again) != tokens(expected)


def test_what_is_begun_can_be_cancelled_and_what_a_server_refuses_is_raised(server, engine):
    expected = tokens(draw(engine))
    server.faults[COMPLETIONS] = [lambda: time.sleep(3)] * 2
    pending = begin(engine)
    started = time.monotonic()
    pending.cancel()
    assert time.monotonic() - started < 2
    with pytest.raises(CancelledError):
        pending.result()
    server.faults[COMPLETIONS] = [(400, {"error": {"message": "no such token"}})] * 2
    with pytest.raises(RefusedError, match="no such token"):
        begin(engine).result()
    assert tokens(draw(engine)) == expected


def test_a_server_started_anew_with_another_model_is_found_out(server, engine, learner):
    adapt(learner)
    draw(engine)

    def change() -> tuple[int, str]:
        server.stop()
        disturb(server.policy)
        server.start()
        return 0, ""

    server.faults[COMPLETIONS] = [change]
    with (
        pytest.warns(UserWarning, match="does not answer"),
        pytest.raises(ValueError, match="is not the trainer's base"),
    ):
        draw(engine, prompts=PROMPTS[:1])  # of two, the other may be refused before this is broken


# -- a server that does not fit -------------------------------------------------------------------


def disturb(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.base.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.3 * parameter.std())


def test_a_server_of_another_model_is_refused_before_anything_is_sampled(server, engine):
    disturb(server.policy)
    with pytest.raises(ValueError, match=r"'base' \(loaded from '/models/base'\) is not the "):
        draw(engine)
    assert all("prompt_logprobs" in body for body in server.posted(COMPLETIONS))


def test_raw_log_probabilities_are_refused(server, engine):
    server.reports_raw = True
    with pytest.raises(ValueError, match=r"--logprobs-mode processed_logprobs"):
        draw(engine)


def test_an_adapter_that_is_dropped_is_found_out(server, engine, learner):
    draw(engine)
    server.drops_adapters = True
    engine.max_sampler_gap = engine._proof.limit = None
    adapt(learner, scale=0.05)
    with pytest.raises(RuntimeError, match=r"does not compute with the adapter"):
        draw(engine)


def test_a_server_that_takes_no_adapters_is_refused_at_the_start(server, engine):
    server.loads_adapters = False
    with pytest.raises(ValueError, match=r"--max-lora-rank 4 .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        draw(engine)


def test_what_the_server_has_against_an_adapter_is_said(server, engine):
    reason = "LoRA rank 4 is greater than max_lora_rank 1."
    server.faults["/v1/load_lora_adapter"] = [(500, {"error": {"message": reason}})]
    with pytest.raises(ValueError, match=re.escape(reason)):
        draw(engine)


def test_the_name_that_is_asked_for_must_be_served(server, learner):
    server.names = ["base", "alias"]
    by_alias = VLLMServerEngine(url=server.url + "/v1/", model="alias")
    by_alias.bind(learner)
    draw(by_alias)
    other = VLLMServerEngine(url=server.url, model="llama")
    other.bind(learner)
    with pytest.raises(ValueError, match=r"engine\.model='llama'.*serves base, alias"):
        draw(other)


def test_full_parameter_training_is_refused(organism):
    engine = VLLMServerEngine()
    with pytest.raises(ValueError, match=r"lora: null"):
        engine.bind(load_policy(Model(name=organism, dtype="float32"), None))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("url", "localhost:8000"),
        ("max_sampler_gap", 0.0),
        ("wait_seconds", -1),
        ("wait_seconds", float("inf")),
        ("request_seconds", 0),
    ],
)
def test_settings_that_cannot_work_are_refused(setting, value):
    with pytest.raises(ValueError, match=rf"engine\.{setting}="):
        VLLMServerEngine(**{setting: value})


# -- metrics --------------------------------------------------------------------------------------


def test_the_servers_counters_give_hits_and_time_in_the_queue(server, engine):
    def page(hits: int, queries: int, seconds: float, requests: int) -> tuple[int, str]:
        lines = [
            "# TYPE vllm:prefix_cache_hits_total counter",
            f'vllm:prefix_cache_hits_total{{engine="0"}} {hits}',
            'vllm:prefix_cache_hits_created{engine="0"} 1.7e9',
            f'vllm:prefix_cache_queries_total{{engine="0"}} {queries}',
            'vllm:prefix_cache_queries_total{engine="1"} 100.0',
            f'vllm:request_queue_time_seconds_sum{{engine="0"}} {seconds}',
            f'vllm:request_queue_time_seconds_count{{engine="0"}} {requests}',
        ]
        return 200, "\n".join(lines)

    server.faults["/metrics"] = [page(10, 100, 1.0, 4), page(40, 160, 1.6, 10)]
    draw(engine)
    assert engine.metrics()[names.PREFIX_CACHE_HITS] == pytest.approx(30 / 60)
    assert engine.metrics()[names.QUEUE_SECONDS] == pytest.approx(0.1)
    draw(engine)  # a server without log stats
    assert set(engine.metrics()) == {names.SYNC_SECONDS, names.SYNC_MEGABYTES}


def test_counters_of_a_server_started_anew_say_nothing():
    before = {"cached": 10.0, "asked": 20.0, "waited": 1.0, "requests": 5.0}
    assert cache_and_queue(before, {**before, "asked": 4.0}) == {}
    assert cache_and_queue(before, before) == {}
