"""Whole runs that sample from a real ``vllm serve``, which is killed in the middle of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tropism.measurements import metrics as names
from tropism.measurements.records import read
from tropism.rollouts.engine import EngineUnreachableError

NUM_ROLLOUTS = 5


def settings(folder: Path, url: str, **init_args: Any) -> list[str]:
    engine = {
        "class_path": "tropism.rollouts.vllm_server_engine.VLLMServerEngine",
        "init_args": {"url": url, **init_args},
    }
    reward = {"class_path": "tropism.shaping.Repetition", "init_args": {"n": 1}}
    sampling = {"max_new_tokens": 200, "temperature": 1.0}  # long enough to be caught at it
    return [
        *("--model.init_args.model.name", str(folder)),
        *("--model.init_args.extra_rewards", json.dumps([reward])),
        *("--model.init_args.engine", json.dumps(engine)),
        *("--model.init_args.sampling", json.dumps(sampling)),
        *("--data.init_args.num_rollouts", str(NUM_ROLLOUTS)),
    ]


def num_rows(runs: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in runs.glob("*/*/records/steps.jsonl"))


def kill_while_it_draws(server: Any, runs: Path, *, after: int, should_restart: bool) -> Any:
    """Once ``after`` rollouts are done and another one is being drawn; in a thread."""

    def watch() -> None:
        while num_rows(runs) < after or running(server) == 0:
            time.sleep(0.02)
        server.kill()
        if should_restart:
            server.start()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def running(server: Any) -> float:
    lines = (server.get("/metrics") or "").splitlines()
    counts = (
        line.rpartition(" ")[2] for line in lines if line.startswith("vllm:num_requests_running{")
    )
    return sum(map(float, counts))


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:engine.url=.*the run waits for it")
def test_a_run_outlives_its_server(
    tropism: Callable[..., Path],
    wide_heads: Path,
    tmp_path: Path,
    new_vllm_server: Callable[[Path], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = new_vllm_server(wide_heads)
    server.start()
    server.wait()

    # Killed while it draws the third rollout, and not started again: the run waits, then stops.
    watching = kill_while_it_draws(server, tmp_path / "runs", after=2, should_restart=False)
    with pytest.raises(EngineUnreachableError, match=r"away for 3 s .*Start it again, then resume"):
        tropism(*settings(wide_heads, server.url, wait_seconds=3))
    watching.join(timeout=60)
    (run,) = (tmp_path / "runs").glob("*/version_*")
    last = run / "checkpoints" / "last.ckpt"
    assert last.samefile(last.with_name("rollout=000002.ckpt"))
    assert f"--ckpt_path {last.relative_to(tmp_path)}" in capsys.readouterr().err
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    before = read(run, "steps")
    assert before["rollout"].tolist() == [0, 1]

    # Started again the run goes on; killed once more and started anew at once, it only waits.
    server.start()
    server.wait()
    watching = kill_while_it_draws(server, tmp_path / "runs", after=3, should_restart=True)
    patient = settings(wide_heads, server.url, wait_seconds=900)
    assert tropism(*patient, "--ckpt_path", str(last)) == run
    watching.join(timeout=60)
    steps = read(run, "steps")
    assert steps["rollout"].tolist() == list(range(NUM_ROLLOUTS))
    assert steps["tokens"].tolist()[:2] == before["tokens"].tolist()
    assert steps["loss"].notna().any()  # so that later rollouts are an adapter's
    assert steps["sampler_gap"].max() < 1e-4

    events = EventAccumulator(str(run)).Reload()
    for name in (
        names.TOKENS_PER_SECOND,
        names.SYNC_SECONDS,
        names.SYNC_MEGABYTES,
        names.QUEUE_SECONDS,
        names.PREFIX_CACHE_HITS,
    ):
        assert {event.step for event in events.Scalars(name)} >= {0, 1, 2, 4}, name
    sent = {event.step: event.value for event in events.Scalars(names.SYNC_MEGABYTES)}
    assert sent[0] == 0  # B is 0 still
    assert sent[1] > 0
