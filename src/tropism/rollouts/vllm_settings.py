"""What vLLM is started with: this project's part, the user's part, and who may set what.

Imports no vLLM, so that settings are refused before it is loaded, and where it is missing.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Literal

from tropism.policy import Policy

Sync = Literal["merged", "adapter"]
SleepLevel = Literal[0, 1, 2]
EngineArgs = dict[str, bool | int | float | str | list[Any] | dict[str, Any] | None]

OWNED = {
    "model": "it is the policy's (model.name)",
    "revision": "it is the policy's (model.revision)",
    "tokenizer": "prompts are encoded by the trainer",
    "skip_tokenizer_init": "prompts are encoded by the trainer",
    "seed": "every completion has its own, from seed_everything",
    "logprobs_mode": "the trainer needs log-probabilities at the sampling temperature",
    "generation_config": "sampling is as `sampling` says",
    "override_generation_config": "sampling is as `sampling` says",
    "logits_processors": "the trainer would have to process its logits so too",
    "speculative_config": "drafts have no log-probabilities of the policy",
    "quantization": "the policy that samples must be the one that trains",
    "runner": "it generates",
    "disable_log_stats": "metrics are made of them",
    "enable_lora": "it follows from engine.sync",
    "max_lora_rank": "it follows from lora.rank",
    "max_loras": "it follows from engine.sync",
    "lora_dtype": "it is that of the model",
    "enable_sleep_mode": "it follows from engine.sleep_level",
    "tensor_parallel_size": "this engine runs in the trainer's process, on its device",
    "pipeline_parallel_size": "this engine runs in the trainer's process, on its device",
    "data_parallel_size": "this engine runs in the trainer's process, on its device",
    "distributed_executor_backend": "this engine runs in the trainer's process",
}
"""Arguments of vLLM that are not the user's, and why."""

DTYPES = ("bfloat16", "float16", "float32")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM has kernels for
# A cache that does not take the machine, blocks in which short prompts are found again, and no
# compilation, which takes minutes on CPUs. Beside a trainer on the same GPU vLLM's own share of
# memory would leave it none.
CPU_DEFAULTS: Mapping[str, Any] = {
    "kv_cache_memory_bytes": 1 << 30,
    "block_size": 32,
    "enforce_eager": True,
}
CUDA_DEFAULTS: Mapping[str, Any] = {"gpu_memory_utilization": 0.4}


def check_settings(
    engine_args: Mapping[str, Any],
    *,
    sync: str,
    sleep_level: int,
    max_sampler_gap: float | None,
) -> None:
    """Refuse settings that cannot work, whether vLLM is there or not.

    Raises:
        ValueError: Names the setting, its value and the remedy.
    """
    for name, value in engine_args.items():
        if name in OWNED:
            raise ValueError(
                f"engine.engine_args.{name}={value!r}: {OWNED[name]}. Leave it out of engine_args."
            )
    dtype = engine_args.get("dtype")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"engine.engine_args.dtype={dtype!r}: give one of {', '.join(DTYPES)}.")
    if sync == "adapter" and sleep_level == 2:
        raise ValueError(
            "engine.sleep_level=2 with engine.sync=adapter: the base weights are lost in that "
            "sleep, and adapters alone do not bring them back. Use sleep_level 1, or sync merged."
        )
    if sync == "adapter" and engine_args.get("load_format") == "dummy":
        raise ValueError(
            "engine.engine_args.load_format='dummy' with engine.sync=adapter: nothing would send "
            "the base weights. Leave load_format out, or use sync merged."
        )
    if max_sampler_gap is not None and not max_sampler_gap > 0:
        raise ValueError(
            f"engine.max_sampler_gap={max_sampler_gap}: give nats above 0, or null for no limit."
        )


def arguments(
    engine_args: Mapping[str, Any],
    *,
    folder: str,
    dtype: str,
    context_length: int,
    sync: Sync,
    lora_rank: int,
    sleep_level: SleepLevel,
    is_cpu: bool,
    known: Collection[str],
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``.

    Args:
        engine_args: The user's, already checked by ``check_settings``.
        folder: With the policy's config and weights.
        dtype: Of the policy's weights.
        context_length: Most tokens of a prompt and its completion.
        sync: How weights follow the trainer's.
        lora_rank: Of the policy's adapters.
        sleep_level: As in the engine.
        is_cpu: Whether vLLM runs on CPUs.
        known: What vLLM's ``EngineArgs`` takes.

    Raises:
        ValueError: An argument that vLLM does not know, a rank it has no kernels for, or sleep
            without a GPU.
    """
    for name, value in engine_args.items():
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=3)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise ValueError(
                f"engine.engine_args.{name}={value!r}: this vLLM has no such argument.{hint}"
            )
    if sleep_level and is_cpu:
        raise ValueError(
            f"engine.sleep_level={sleep_level}: vLLM sleeps on CUDA devices only; use 0 here."
        )
    chosen: dict[str, Any] = {
        **(CPU_DEFAULTS if is_cpu else CUDA_DEFAULTS),
        "dtype": dtype,
        "max_model_len": context_length,
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        **engine_args,
        "model": folder,
        "skip_tokenizer_init": True,
        "seed": 0,  # every request has its own
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": False,
        "enable_sleep_mode": sleep_level > 0,
    }
    if sync == "adapter":
        ranks = [rank for rank in LORA_RANKS if rank >= lora_rank]
        if not ranks:
            raise ValueError(
                f"lora.rank={lora_rank} with engine.sync=adapter: vLLM has LoRA up to rank "
                f"{LORA_RANKS[-1]}. Use sync merged."
            )
        chosen |= {"enable_lora": True, "max_lora_rank": ranks[0], "max_loras": 1}
    return chosen


def require_head_size(policy: Policy, sizes: Collection[int]) -> None:
    """Refuse a model whose attention heads have a size that vLLM's kernels lack.

    Raises:
        ValueError: Names the size, and those that there are.
    """
    config = policy.base.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in sizes:
        raise ValueError(
            f"engine: the model has attention heads of size {size}; vLLM's on CPUs are of "
            f"{', '.join(map(str, sizes))}. Leave `engine` out: the trainer's own engine samples "
            "any model."
        )
