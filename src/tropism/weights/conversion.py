"""A GGUF file becomes a folder of bf16 safetensors, once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tropism.provenance import whole_folder
from tropism.weights.wheels import say

SOURCE_FILE = "tropism_source.json"


def convert(
    gguf: Path, target: Path, source: Mapping[str, Any], notices: Mapping[str, bytes]
) -> None:
    """Dequantise to bf16 and save with the tokenizer; ``target`` appears only when it is whole.

    Raises:
        ValueError: The file lacks weights of its architecture.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.integrations.gguf.reader import read_gguf_metadata

    say(f"converting {gguf.name} to bf16, once, into {target}")
    metadata, _ = read_gguf_metadata(str(gguf))
    with tempfile.TemporaryDirectory() as alone, whole_folder(target) as folder:
        # A config.json beside the file would be read in the place of its own metadata.
        (Path(alone) / gguf.name).symlink_to(gguf)
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=gguf.name)
        _follow_bos(tokenizer, metadata)
        loader: Any = AutoModelForCausalLM  # typed as if it never returned the report
        model, report = loader.from_pretrained(
            alone,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            output_loading_info=True,
        )
        if missing := sorted(report["missing_keys"]):
            raise ValueError(
                f"{gguf.name} has no {', '.join(missing[:5])}: those weights would be random. "
                "Convert it with another tool and give the folder."
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for name, content in notices.items():
            (folder / name).write_bytes(content)
        facts = {"licence": metadata.get("general.license"), **source}
        (folder / SOURCE_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _follow_bos(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """Add BOS where the file says so: transformers 5.19 does not read that key.

    Gemma without its BOS is a different, babbling model. The default is llama.cpp's: yes for
    SentencePiece vocabularies only.
    """
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    should_add = bool(metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece))
    bos = tokenizer.bos_token_id
    if bos is not None and should_add != (tokenizer("")["input_ids"][:1] == [bos]):
        tokenizer.add_bos_token = should_add


def is_whole(folder: Path) -> bool:
    return (folder / SOURCE_FILE).exists() and problem_of(folder) is None


def problem_of(folder: Path) -> str | None:
    """What ``folder`` lacks to be loaded, or None."""
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            return "it is a LoRA adapter: give it as model.adapter, and its base as model.name."
        return "it has no config.json."
    for index in folder.glob("*.index.json"):
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if absent := sorted(shard for shard in shards if not (folder / shard).exists()):
            return f"it lacks {len(absent)} of {len(shards)} weight files, {absent[0]} for one."
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        return "it has no weights (*.safetensors)."
    return None
