"""What is asked of ``vllm serve``, in its own terms (vLLM 0.32); imports no vLLM.

vLLM gives the G completions of one request the seeds s, s + 1, ..., s + G - 1, so that one request
per prompt is keyed as well as one per completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
import torch
from torch import Tensor

from tropism.measurements import metrics as names
from tropism.rollouts.requests import Answer, Request
from tropism.rollouts.server_client import RefusedError, ServerClient

# Said each time: a server may have others as its model's defaults.
PLAIN_SAMPLING: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
COUNTERS = {
    "cached": "vllm:prefix_cache_hits_total",
    "asked": "vllm:prefix_cache_queries_total",
    "waited": "vllm:request_queue_time_seconds_sum",
    "requests": "vllm:request_queue_time_seconds_count",
}
"""Names of Prometheus: prompt tokens, prompt tokens, seconds, completions; since the start."""


@dataclass(frozen=True)
class ServedModel:
    """What a server has loaded.

    Args:
        name: By which it is asked for.
        root: Name or folder that the server loaded it from.
        context_length: Most tokens of a prompt and its completion.
    """

    name: str
    root: str
    context_length: int


async def served_model(client: ServerClient, name: str | None) -> ServedModel:
    """The base model of a server that is well.

    Args:
        client: To the server.
        name: By which it must be served; its first name where None.

    Raises:
        ValueError: It is served under other names only.
    """
    await client.get("/health")
    cards = (await client.get("/v1/models")).json()["data"]
    found = {card["id"]: card for card in cards if card.get("parent") is None}
    chosen = next(iter(found)) if name is None else name
    if chosen not in found:
        raise ValueError(
            f"engine.model={name!r}: the server at {client.url} serves {', '.join(found)}. Give "
            "one of these names, leave engine.model out, or start the server with "
            f"--served-model-name {name}."
        )
    card = found[chosen]
    return ServedModel(chosen, card["root"], card["max_model_len"])


async def complete(
    client: ServerClient, model: str, request: Request, *, num_samples: int
) -> list[Answer]:
    """``num_samples`` completions of one prompt, with the seeds from ``request.seed`` on.

    Args:
        client: To the server.
        model: Name of the base model, or of an adapter.
        request: What to draw. The likeliest completion is drawn once, and given so many times.
        num_samples: G.
    """
    is_greedy = request.temperature == 0
    body = {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "n": 1 if is_greedy else num_samples,
        "seed": request.seed,
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        **PLAIN_SAMPLING,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # the stop tokens are the trainer's
        "logprobs": 0,  # of the drawn token alone
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # spares the server its tokenizer
    }
    response = await client.post("/v1/completions", body, unfinished=_aborted)
    choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    answers = [
        Answer(
            token_ids=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"],
            finish_reason=choice["finish_reason"],
        )
        for choice in choices
    ]
    return answers * num_samples if is_greedy else answers


async def score(client: ServerClient, model: str, token_ids: Sequence[int]) -> Tensor:
    """[N - 1] log-probabilities of the tokens after the first, each given those before it.

    At temperature 1, whatever the server's mode. Such requests find nothing in the prefix cache.
    """
    body = {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    response = await client.post("/v1/completions", body, unfinished=_aborted)
    (choice,) = response.json()["choices"]
    _, *rest = choice["prompt_logprobs"]
    pairs = zip(rest, token_ids[1:], strict=True)
    return torch.tensor([entry[str(token)]["logprob"] for entry, token in pairs])


async def load_adapter(client: ServerClient, name: str, folder: str) -> None:
    """Have the server load an adapter; completions are then asked for by its name.

    Raises:
        RefusedError: It cannot, and says why.
    """
    body = {"lora_name": name, "lora_path": folder}
    await client.post("/v1/load_lora_adapter", body, is_500_final=True)


async def unload_adapter(client: ServerClient, name: str) -> None:
    """Have the server forget an adapter, which a server started anew never knew."""
    try:
        await client.post("/v1/unload_lora_adapter", {"lora_name": name})
    except RefusedError as error:
        if error.status != httpx.codes.NOT_FOUND:
            raise


async def counters(client: ServerClient) -> dict[str, float]:
    """The server's ``COUNTERS`` of now; empty where it keeps none (``--disable-log-stats``)."""
    try:
        text = (await client.get("/metrics")).text
    except RefusedError:
        return {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        for key, name in COUNTERS.items():
            if line.startswith((f"{name}{{", f"{name} ")):  # several engines: a line for each
                found[key] = found.get(key, 0.0) + float(line.rpartition(" ")[2])
    return found


def cache_and_queue(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Share of prompt tokens cached and mean time queued between two looks at the counters.

    What other runs asked meanwhile is in it. What the server did not count is left out, all of it
    where it was started anew meanwhile.
    """
    moved = {key: after[key] - before[key] for key in after if key in before}
    found: dict[str, float] = {}
    if any(change < 0 for change in moved.values()):
        return found
    if moved.get("asked"):
        found[names.PREFIX_CACHE_HITS] = moved["cached"] / moved["asked"]
    if moved.get("requests"):
        found[names.QUEUE_SECONDS] = moved["waited"] / moved["requests"]
    return found


def _aborted(response: httpx.Response) -> str | None:
    """A server that is being stopped ends completions before their time."""
    reasons = {choice["finish_reason"] for choice in response.json()["choices"]}
    other = reasons - {"stop", "length"}
    return f"completions ended with {', '.join(map(str, other))}" if other else None
