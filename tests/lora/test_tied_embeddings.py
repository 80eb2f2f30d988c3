"""A model whose head is its embeddings, trained as a whole, comes back as the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tropism.models import Model, load_policy

IDS = torch.arange(5, 30)[None]


@pytest.mark.fault(24)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tuned_model_with_tied_embeddings_reloads_to_equal_logits(
    tmp_path: Path, dtype: str
) -> None:
    policy = load_policy(Model(name="organism", dtype=dtype), None)  # type: ignore[arg-type]
    embeddings, head = policy.base.get_input_embeddings(), policy.base.get_output_embeddings()
    assert head.weight is embeddings.weight
    assert not [name for name in policy.named_trainable() if "lm_head" in name]  # trained once
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        before = policy.model(input_ids=IDS).logits
        for parameter in policy.named_trainable().values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((0.02 * noise).to(parameter.dtype))
        policy.model.eval()
        tuned = policy.model(input_ids=IDS).logits
    assert (tuned - before).abs().max() > 0.1
    folder = policy.export(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    again = load_policy(Model(name=str(folder), dtype=dtype), None)  # type: ignore[arg-type]
    again.model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, tuned)
        assert torch.equal(again.model(input_ids=IDS).logits, tuned)
