"""A server that answers as ``vllm serve`` does, has a policy of its own, and faults to order."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from tropism.lora.export import load_adapter_tensors
from tropism.lora.views import View
from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy
from tropism.rollouts.server_proof import base_alone, trainer_logprobs

Reply = tuple[int, Any]


@dataclass
class Server:
    """One run of it; stopped and started again on the same port as a real one is.

    Args:
        policy: What it samples.
        names: Under which it serves its base.
        reports_raw: Log-probabilities at temperature 1, as without --logprobs-mode.
        loads_adapters: Whether it has the routes for adapters.
        drops_adapters: Takes adapters, and computes with the base.
        faults: For each path, what to do before it answers as it should: a reply to give, or
            something to call.
        asked: Every request that it has seen: path and body.
    """

    policy: Policy
    names: list[str] = field(default_factory=lambda: ["base"])
    reports_raw: bool = False
    loads_adapters: bool = True
    drops_adapters: bool = False
    faults: dict[str, list[Reply | Callable[[], Reply | None]]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    port: int = 0
    _http: ThreadingHTTPServer | None = None
    _lock: Any = field(default_factory=threading.Lock)

    def start(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(*server.reply(self.path, {}))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self._send(*server.reply(self.path, json.loads(body)))

            def _send(self, status: int, content: Any) -> None:
                if status == 0:  # the line is cut
                    self.close_connection = True
                    return
                is_text = isinstance(content, str)
                data = (content if is_text else json.dumps(content)).encode()
                self.send_response(status)
                self.send_header("content-type", "text/plain" if is_text else "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        ThreadingHTTPServer.daemon_threads = True
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """As a crash: adapters are forgotten."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None
        self.adapters.clear()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def posted(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.asked if asked == path]

    def reply(self, path: str, body: dict[str, Any]) -> Reply:
        self.asked.append((path, body))
        if self.faults.get(path):
            fault = self.faults[path].pop(0)
            given = fault() if callable(fault) else fault
            if given is not None:
                return given
        with self._lock:
            return self._reply(path, body)

    def _reply(self, path: str, body: dict[str, Any]) -> Reply:
        known = {"/health": "", "/metrics": ""}
        if path in known:
            return 200, known[path]
        if path == "/v1/models":
            card = {"root": "/models/base", "parent": None, "max_model_len": 512}
            cards = [{"id": name, **card} for name in self.names]
            cards += [
                {"id": name, "root": root, "parent": "base", "max_model_len": None}
                for name, root in self.adapters.items()
            ]
            return 200, {"data": cards}
        if path == "/v1/completions":
            return self._complete(body)
        if not self.loads_adapters:
            return 404, {"detail": "Not Found"}
        name = body["lora_name"]
        if path == "/v1/load_lora_adapter":
            self.adapters[name] = body["lora_path"]
        elif self.adapters.pop(name, None) is None:
            return 404, {"error": {"message": f"The lora adapter '{name}' cannot be found."}}
        return 200, "Success"

    def _complete(self, body: dict[str, Any]) -> Reply:
        model = body["model"]
        if model not in self.names and model not in self.adapters:
            return 404, {"error": {"message": f"The model `{model}` does not exist."}}
        with self._serving(model):
            if "prompt_logprobs" in body:
                ids = body["prompt"]
                logprobs = trainer_logprobs(self.policy, ids).tolist()
                entries = [
                    {str(token): {"logprob": value}}
                    for token, value in zip(ids[1:], logprobs, strict=True)
                ]
                choice = {
                    "index": 0,
                    "finish_reason": "length",
                    "prompt_logprobs": [None, *entries],
                }
                return 200, {"choices": [choice]}
            choices = [{"index": i, **self._draw(body, seed=i)} for i in range(body["n"])]
        return 200, {"choices": choices[::-1]}  # whoever ended first

    @contextmanager
    def _serving(self, model: str) -> Iterator[None]:
        if model in self.names or self.drops_adapters:
            with base_alone(self.policy):
                yield
            return
        _, pairs = load_adapter_tensors(self.adapters[model])
        with View() as view:
            for site in self.policy.sites:
                own = self.policy.adapter(site)
                if site.name in pairs:
                    a, b, scaling = pairs[site.name]
                    view.show(own.a, a)
                    view.show(own.b, b * scaling / own.scaling)
                else:
                    view.disable(self.policy.lora_layer(site))
            yield

    @torch.no_grad()
    def _draw(self, body: dict[str, Any], *, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed((body["seed"] + seed) % 2**63)
        ids, logprobs = [], []
        while len(ids) < body["max_tokens"] and not (ids and ids[-1] in body["stop_token_ids"]):
            tokens = torch.tensor([body["prompt"] + ids])
            logits = self.policy.model(input_ids=tokens).logits[0, -1].float()
            warmed = (logits / (body["temperature"] or 1.0)).log_softmax(-1)
            drawn = torch.multinomial(warmed.exp(), 1, generator=generator)
            ids.append(int(drawn if body["temperature"] else warmed.argmax()))
            reported = logits.log_softmax(-1) if self.reports_raw else warmed
            logprobs.append(float(reported[ids[-1]]))
        reason = "stop" if ids[-1] in body["stop_token_ids"] else "length"
        drawn_logprobs = {"token_logprobs": logprobs}
        return {"token_ids": ids, "logprobs": drawn_logprobs, "finish_reason": reason}


def small_policy(folder: Path) -> Policy:
    torch.manual_seed(1)
    policy = load_policy(Model(name=str(folder), dtype="float32"), LoRA(rank=4, alpha=8))
    policy.model.eval()
    return policy


@pytest.fixture
def server(wide_heads: Path) -> Iterator[Server]:
    """It has a tiny model, and is running."""
    found = Server(small_policy(wide_heads))
    found.start()
    yield found
    found.stop()


@pytest.fixture
def learner(wide_heads: Path) -> Policy:
    """The trainer's policy: the same model, with adapters that do nothing yet."""
    return small_policy(wide_heads)
