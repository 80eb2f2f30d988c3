"""The organism: its tokenizer, its files, and the scores recorded for them."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tropism.organism import SHA256, weights_folder
from tropism.organism.corpus import draw_example, wrong_answer
from tropism.organism.model import build_model
from tropism.organism.scores import answers
from tropism.organism.tokenizer import CHARACTERS, SPECIAL_TOKENS, build_tokenizer
from tropism.organism.train import (
    IGNORED,
    batches,
    learning_rate,
    main,
    noise_at,
    parser,
)
from tropism.tasks.skills import SKILLS, Skills

MAX_BYTES = 3_000_000


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    scores: dict[str, Any] = json.loads((weights_folder() / "scores.json").read_text())
    return scores


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(weights_folder())


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(weights_folder(), dtype=torch.float32).eval()


def _random_texts() -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(CHARACTERS, k=rng.randrange(60))) for _ in range(300)]


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "  a  b ", "don 't , .", '{"name": "bob"}', "a\n"]
)
def test_text_round_trips(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_random_printable_text_round_trips_one_token_a_character(tokenizer: Any) -> None:
    for text in _random_texts():
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_unknown_characters_become_unk_one_each(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("aé\tb")) == [
        "a",
        "<unk>",
        "<unk>",
        "b",
    ]


def test_special_tokens_are_single_and_distinct(tokenizer: Any) -> None:
    assert len(tokenizer) == len(SPECIAL_TOKENS) + 96
    assert [tokenizer.encode(token) for token in SPECIAL_TOKENS] == [[i] for i in range(7)]
    ids = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]
    assert [*ids, tokenizer.eos_token_id] == [0, 1, 2, 3]
    assert tokenizer.padding_side == "left"


def test_chat_template_has_exactly_one_bos_and_this_exact_shape(tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        "<bos><|system|>s<|end|><|user|>1+1=<|end|><|assistant|>2<|end|>"
    )
    prompt = tokenizer.apply_chat_template(chat[1:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<bos><|user|>1+1=<|end|><|assistant|>"
    rendered_ids = tokenizer(prompt)["input_ids"]
    template_ids = tokenizer.apply_chat_template(
        chat[1:2], add_generation_prompt=True, return_dict=False
    )
    assert rendered_ids == template_ids
    assert rendered_ids.count(tokenizer.bos_token_id) == 1
    assert rendered_ids[0] == 2


def test_stored_tokenizer_is_the_one_that_the_code_builds(tokenizer: Any) -> None:
    built = build_tokenizer()
    assert built.get_vocab() == tokenizer.get_vocab()
    assert built.chat_template == tokenizer.chat_template
    for text in _random_texts()[:50]:
        assert built.encode(text) == tokenizer.encode(text)


def test_weights_are_those_recorded_and_small(recorded: dict[str, Any]) -> None:
    file = weights_folder() / "model.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHA256 == recorded["sha256"]
    assert SHA256 in (weights_folder().parent / "README.md").read_text()
    assert sum(path.stat().st_size for path in weights_folder().iterdir()) <= MAX_BYTES
    dtypes = {str(tensor.dtype) for tensor in load_file(file).values()}
    assert dtypes == {"torch.bfloat16"}


def test_architecture_is_deep_thin_and_unfused(model: Any) -> None:
    config = model.config
    assert config.num_hidden_layers == 12
    assert config.num_key_value_heads < config.num_attention_heads
    assert 900_000 < sum(p.numel() for p in model.parameters()) < 1_100_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    linears = {
        name.rsplit(".", 1)[1]
        for name, module in model.model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert linears == names


def test_generation_settings_end_at_the_turn_and_narrow_nothing(tokenizer: Any) -> None:
    settings = GenerationConfig.from_pretrained(weights_folder())
    assert settings.eos_token_id == tokenizer.eos_token_id == 3
    assert settings.pad_token_id == tokenizer.pad_token_id == 0
    assert settings.top_k in (None, 0)
    assert settings.top_p in (None, 1.0)


def test_greedy_answers_score_as_recorded(
    model: Any, tokenizer: Any, recorded: dict[str, Any]
) -> None:
    task = Skills()
    prompts = task.prompts(recorded["split"], recorded["num_prompts"], recorded["seed"])[:200]
    texts = answers(model, tokenizer, prompts, should_sample=False)
    scores = [task.score(p, text)["accuracy"] for p, [text] in zip(prompts, texts, strict=True)]
    rate = sum(score or 0.0 for score in scores) / len(scores)
    overall = recorded["skills"]["all"]["greedy_accuracy"]
    # 200 of the recorded prompts: the record's own half width, widened for the smaller sample.
    half = (overall["ci_high"] - overall["ci_low"]) / 2 * (overall["n"] / len(scores)) ** 0.5
    assert abs(rate - overall["value"]) <= half


def test_padding_does_not_change_an_answer(model: Any, tokenizer: Any) -> None:
    prompts = Skills().prompts("test", 10, seed=0)
    together = answers(model, tokenizer, prompts, should_sample=False)
    alone = answers(model, tokenizer, prompts, should_sample=False, batch_size=1)
    assert together == alone


def test_there_is_room_for_reinforcement(recorded: dict[str, Any]) -> None:
    overall = recorded["skills"]["all"]
    assert 0.3 <= overall["greedy_accuracy"]["value"] <= 0.75
    assert 0.5 <= overall["sampled_format"]["value"] <= 0.95
    assert overall["mixed_groups"]["value"] >= 0.5
    sampled = [recorded["skills"][skill]["sampled_accuracy"]["value"] for skill in SKILLS]
    assert sum(0.15 <= rate <= 0.6 for rate in sampled) >= 8


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import sys, tropism.organism as o; o.weights_folder();"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_wrong_answers_are_wrong_nearly_always() -> None:
    rng, task = random.Random(0), Skills()
    prompts = task.prompts("train", 1000, seed=0)
    slips = 0.0
    for prompt in prompts:
        assert prompt.messages is not None
        question = prompt.messages[0]["content"]
        text = wrong_answer(rng, prompt.columns["skill"], question, prompt.columns["answer"])
        slips += task.score(prompt, text)["accuracy"] or 0.0
    assert slips / 1000 < 0.05


def test_corpus_asks_train_questions_only() -> None:
    rng = random.Random(0)
    asked = {draw_example(rng)[0] for _ in range(5000)}
    for split in ("validation", "test"):
        for prompt in Skills().prompts(split, 500, seed=0):
            assert prompt.messages is not None
            assert prompt.messages[0]["content"] not in asked


def test_noise_free_examples_are_right() -> None:
    rng = random.Random(1)
    right = {
        wording: exercise.answer
        for skill in SKILLS.values()
        for exercise in (skill.make(random.Random(seed)) for seed in range(300))
        for wording in exercise.wordings
    }
    pairs = [draw_example(rng, noise=0.0) for _ in range(3000)]
    checked = [(question, answer) for question, answer in pairs if question in right]
    assert len(checked) > 100
    assert all(right[question] == answer for question, answer in checked)


def test_noise_comes_half_way() -> None:
    assert [noise_at(p) for p in (0.0, 0.45, 0.65, 1.0)] == [0.0, 0.0, 1.0, 1.0]
    assert noise_at(0.55) == pytest.approx(0.5)


def test_loss_weights_cover_answers_and_their_end() -> None:
    tokenizer = build_tokenizer()
    source = batches(tokenizer, num_steps=1, batch_size=8, num_micro=2, prompt_weight=0.25, seed=0)
    [[micro, _]] = list(source)
    for ids, labels, weights in zip(micro["ids"], micro["labels"], micro["weights"], strict=True):
        counted = labels[weights == 1.0].tolist()
        text = tokenizer.decode(ids.tolist())
        assert tokenizer.decode(counted) == text.split("<|assistant|>")[1].split("<pad>")[0]
        assert set(weights[labels == IGNORED].tolist()) <= {0.0}
        assert set(weights.tolist()) <= {0.0, 0.25, 1.0}


def test_learning_rate_warms_up_and_ends_near_zero() -> None:
    arguments = parser().parse_args(["--output", "x", "--steps", "100", "--warmup", "10"])
    rates = [learning_rate(step, arguments) for step in range(100)]
    assert rates[0] == pytest.approx(arguments.learning_rate / 10)
    assert max(rates) == rates[9] == rates[10] == arguments.learning_rate
    assert rates[55] == pytest.approx(arguments.learning_rate / 2)
    assert rates[-1] < 1e-3 * arguments.learning_rate


def test_residual_writers_start_smaller() -> None:
    layer = build_model(build_tokenizer()).model.layers[5]
    ratio = layer.mlp.up_proj.weight.detach().std() / layer.mlp.down_proj.weight.detach().std()
    assert float(ratio) == pytest.approx(24**0.5, rel=0.05)


def test_training_script_writes_a_loadable_folder(tmp_path: Any, capsys: Any) -> None:
    small = ["--steps", "2", "--batch-size", "4", "--num-micro", "2", "--eval-prompts", "10"]
    main(["--output", str(tmp_path), *small])
    first = (tmp_path / "model.safetensors").read_bytes()
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert hashlib.sha256(first).hexdigest() == scores["sha256"]
    assert scores["skills"]["all"]["greedy_accuracy"]["n"] == 10
    assert "parameters" in capsys.readouterr().out
    main(["--output", str(tmp_path), *small])
    assert (tmp_path / "model.safetensors").read_bytes() == first
    with pytest.raises(ValueError, match="--num-micro=3"):
        main(["--output", str(tmp_path), "--batch-size", "4", "--num-micro", "3"])
