import json
import shutil

import pytest
import torch

from tropism.models import LoRA, Model, load_policy
from tropism.organism import weights_folder


def test_unknown_model_names_the_setting_and_the_aliases():
    with pytest.raises(ValueError, match="smollm2-135m-instruct"):
        load_policy(Model(name="smollm2-135m-instrukt"), None)


def test_vocabulary_smaller_than_the_tokenizer(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(weights_folder(), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["\u00e9"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="token id 5000"):
        load_policy(Model(name=str(folder)), None)


@pytest.mark.parametrize(("rank", "alpha"), [(16, 24.0), (3, 32.0), (16, 0.0), (0, 16.0)])
def test_scaling_must_be_a_power_of_two(rank, alpha):
    with pytest.raises(ValueError, match=r"lora\.(alpha|rank)="):
        LoRA(rank=rank, alpha=alpha)


@pytest.mark.fault(25)
def test_modules_and_layers_are_checked_against_the_model():
    with pytest.raises(ValueError, match=r"lora\.modules=\['qkv_proj'\].*q_proj"):
        load_policy(Model(name="organism"), LoRA(modules=("qkv_proj",)))
    with pytest.raises(ValueError, match=r"lora\.layers=\[12\].*0 to 11"):
        load_policy(Model(name="organism"), LoRA(layers=(0, 12)))
    with pytest.raises(ValueError, match=r"lora\.layers=\(\): no linear is left"):
        load_policy(Model(name="organism"), LoRA(layers=()))
    policy = load_policy(Model(name="organism"), LoRA(modules=("q_proj",), layers=(3, 5)))
    adapted = [site for site in policy.sites if policy.adapter(site) is not None]
    assert [(site.layer, site.module) for site in adapted] == [(3, "q_proj"), (5, "q_proj")]


def test_adapter_of_a_higher_rank_or_without_lora_is_refused(tmp_path):
    source = load_policy(Model(name="organism"), LoRA(rank=8, alpha=8))
    folder = str(source.export(tmp_path))
    with pytest.raises(ValueError, match=r"raise lora\.rank from 4"):
        load_policy(Model(name="organism", adapter=folder), LoRA(rank=4, alpha=4))
    dropout = LoRA(rank=8, alpha=8, dropout=0.3)
    assert load_policy(Model(name="organism", adapter=folder), dropout).num_trainable() > 0
    with pytest.raises(ValueError, match="lora=null"):
        load_policy(Model(name="organism", adapter=folder), None)
    with pytest.raises(ValueError, match="this run puts no LoRA"):
        load_policy(
            Model(name="organism", adapter=folder), LoRA(rank=8, alpha=8, modules=("q_proj",))
        )


def test_adapters_have_fp32_masters_over_a_bf16_base():
    policy = load_policy(Model(name="organism", dtype="bfloat16"), LoRA(rank=4, alpha=4))
    assert {p.dtype for p in policy.named_trainable().values()} == {torch.float32}
    assert policy.linear(policy.sites[0]).weight.dtype == torch.bfloat16


def test_messages_without_a_chat_template_name_the_remedy(tmp_path):
    from tropism.types import Prompt

    folder = tmp_path / "model"
    shutil.copytree(weights_folder(), folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    prompt = Prompt(id="p", task="t", messages=({"role": "user", "content": "1+1="},))
    with pytest.raises(ValueError, match=r"model\.chat_template"):
        load_policy(Model(name=str(folder)), None).encode(prompt)
    plain = load_policy(Model(name=str(folder), chat_template="plain"), None)
    assert plain.decode(plain.encode(prompt)).endswith("user: 1+1=\nassistant:")


@pytest.mark.parametrize("should_checkpoint", [False, True])
def test_backward_stops_below_the_lowest_adapter(should_checkpoint):
    model = Model(name="organism", dtype="float32", gradient_checkpointing=should_checkpoint)
    policy = load_policy(model, LoRA(rank=4, alpha=4, layers=(10, 11)))
    reached = []
    for index in (9, 10):
        layer = policy.base.model.layers[index]
        layer.register_forward_hook(
            lambda module, inputs, output, index=index: reached.append(
                (index, output.requires_grad)
            )
        )
    policy.model(input_ids=torch.arange(5, 15)[None]).logits.sum().backward()
    assert (9, False) in reached
    assert (10, True) in reached
    assert (9, True) not in reached
