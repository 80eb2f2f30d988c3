"""A real classification model of the organism's shape, judged against what transformers gives."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from tropism.organism import weights_folder
from tropism.scoring import RewardError, score_rollouts
from tropism.shaping import RewardModel
from tropism.tasks.extra import carry
from tropism.tasks.skills import Skills
from tropism.types import Completion, Prompt, Rollout

CPU = torch.device("cpu")
TEXTS = ["42", "the answer is 42.", "", "no " * 20, "a", '{"name":"bob","age":7}', "12", "seven"]


def build(folder: Path, num_labels: int = 1, **settings: Any) -> Path:
    """A model with random weights, and the organism's tokenizer."""
    torch.manual_seed(num_labels)
    config = LlamaConfig.from_pretrained(weights_folder(), num_labels=num_labels, **settings)
    config.num_hidden_layers = 2
    model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(weights_folder() / file, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("reward_model"))


def completion(text: str) -> Completion:
    return Completion((5, 3), text, torch.zeros(2), "stop")


def loaded(folder: Path, **settings: Any) -> RewardModel:
    reward = RewardModel(str(folder), **{"dtype": "float32", **settings})
    reward.prepare(max_new_tokens=64, device=CPU)
    return reward


def prompts(num: int) -> list[Prompt]:
    return list(Skills().prompts("train", num, seed=0))


def judge(reward: RewardModel, texts: list[str] = TEXTS) -> list[float | None]:
    return reward.score_batch(prompts(len(texts)), [completion(text) for text in texts])


def stock_logits(folder: Path, texts: list[str] = TEXTS) -> torch.Tensor:
    """What transformers gives for each conversation alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for prompt, text in zip(prompts(len(texts)), texts, strict=True):
        messages = [*map(dict, prompt.messages), {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            rows.append(model(input_ids=ids["input_ids"]).logits[0])
    return torch.stack(rows)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_scores_are_those_of_transformers_through_the_stated_map(
    folder: Path, batch_size: int
) -> None:
    logits = stock_logits(folder)[:, 0]
    assert logits.std() > 0.1
    found = judge(loaded(folder, batch_size=batch_size))
    torch.testing.assert_close(torch.tensor(found), logits.sigmoid(), atol=1e-5, rtol=0)
    scaled = judge(loaded(folder, batch_size=batch_size, mean=0.25, scale=2.0))
    expected = ((logits - 0.25) / 2).sigmoid()
    torch.testing.assert_close(torch.tensor(scaled), expected, atol=1e-5, rtol=0)


def test_the_order_of_completions_changes_nothing(folder: Path) -> None:
    reward = loaded(folder, batch_size=3)
    asked, answers = prompts(len(TEXTS)), [completion(text) for text in TEXTS]
    forward = reward.score_batch(asked, answers)
    backward = reward.score_batch(asked[::-1], answers[::-1])
    assert forward == pytest.approx(backward[::-1], abs=1e-5)
    assert reward.score(asked[1], answers[1]) == pytest.approx(forward[1], abs=1e-5)


def test_a_model_without_a_padding_token_judges_the_last_token_in_batches_too(
    tmp_path: Path,
) -> None:
    folder = build(tmp_path / "unpadded", pad_token_id=None)
    logits = stock_logits(folder)[:, 0]
    found = judge(loaded(folder, batch_size=4))
    torch.testing.assert_close(torch.tensor(found), logits.sigmoid(), atol=1e-5, rtol=0)


def test_of_several_outputs_one_is_chosen_by_index_or_name(tmp_path: Path) -> None:
    names = {0: "bad", 1: "fair", 2: "good"}
    label2id = {name: index for index, name in names.items()}
    folder = build(tmp_path / "three", num_labels=3, id2label=names, label2id=label2id)
    probabilities = stock_logits(folder).softmax(dim=1)
    for label in (2, "good"):
        found = torch.tensor(judge(loaded(folder, label=label)))
        torch.testing.assert_close(found, probabilities[:, 2], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"label=null, and .* has 3 outputs: choose .*'fair'"):
        loaded(folder)
    for label in (3, "best"):
        with pytest.raises(ValueError, match=rf"label={label!r}: .* has the outputs .*'bad'"):
            loaded(folder, label=label)


def test_a_label_of_a_model_with_one_output(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"label=0: .* or null where there is one"):
        loaded(folder, label=0)


def test_pairs_are_encoded_as_the_tokenizer_does(tmp_path: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    found = judge(loaded(folder, conversation="pair"), ["42", "seven"])
    for prompt, text, value in zip(prompts(2), ["42", "seven"], found, strict=True):
        pair = tokenizer(prompt.messages[0]["content"], text, return_tensors="pt")
        with torch.no_grad():
            logit = model(input_ids=pair["input_ids"]).logits[0, 0]
        assert value == pytest.approx(float(logit.sigmoid()), abs=1e-5)


def test_what_is_too_long_is_an_error_is_not_judged_or_is_cut(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (prompt,) = prompts(1)
    texts = ["ok", "z" * 60]
    answers = [completion(text) for text in texts]
    limit = 40
    strict = loaded(folder, max_tokens=limit)
    with pytest.raises(ValueError, match=rf"has \d+ tokens, more than {limit}: raise"):
        strict.score_batch([prompt] * 2, answers)
    lenient = loaded(folder, max_tokens=limit, too_long="abstain")
    first, second = lenient.score_batch([prompt] * 2, answers)
    assert first == pytest.approx(strict.score(prompt, answers[0]), abs=1e-5)
    assert second is None

    cutting = loaded(folder, max_tokens=limit, too_long="cut_left")
    _, second = cutting.score_batch([prompt] * 2, answers)
    messages = [*map(dict, prompt.messages), {"role": "assistant", "content": texts[1]}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    kept = [ids[0], *ids[-(limit - 1) :]]
    assert ids[0] == tokenizer.bos_token_id
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logit = model(input_ids=torch.tensor([kept])).logits[0, 0]
    assert second == pytest.approx(float(logit.sigmoid()), abs=1e-5)


def test_a_completion_that_is_too_long_stops_the_run_with_the_row(folder: Path) -> None:
    (prompt,) = prompts(1)
    answers = tuple(completion(text) for text in ("ok", "z" * 60, "z" * 90))
    tasks = carry([Skills()], [loaded(folder, max_tokens=40)])
    message = r"reward_model\.RewardModel raised ValueError: the conv.*prompt .*completion 'z{60}'"
    with pytest.raises(RewardError, match=message):
        score_rollouts(tasks, [Rollout(prompt, (1,), answers)])


def test_raw_prompts_are_what_a_user_said(folder: Path) -> None:
    reward = loaded(folder)
    chat = Prompt(id="a", task="t", messages=({"role": "user", "content": "1+1="},))
    raw = Prompt(id="b", task="t", text="1+1=")
    assert reward.score(chat, completion("2")) == reward.score(raw, completion("2"))


def test_it_is_frozen_in_its_dtype_and_loaded_once(folder: Path) -> None:
    reward = loaded(folder, dtype="bfloat16")
    network = reward._network
    parameters = list(network.parameters())
    assert not any(parameter.requires_grad for parameter in parameters)
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    assert not network.training
    reward.prepare(max_new_tokens=64, device=CPU)
    assert reward._network is network
    exact = torch.tensor(judge(loaded(folder)))
    torch.testing.assert_close(torch.tensor(judge(reward)), exact, atol=0.05, rtol=0)


def test_models_that_are_refused(tmp_path: Path, folder: Path, organism: str) -> None:
    with pytest.raises(ValueError, match=r"'organism' lacks \['score.weight'\].*random"):
        loaded(Path(organism))
    with pytest.raises(ValueError, match=r"RewardModel.model='no-such-model' was not found"):
        loaded(Path("no-such-model"))
    with pytest.raises(ValueError, match=r"max_tokens=513: the context .* is 512 tokens"):
        loaded(folder, max_tokens=513)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    tokenizer = AutoTokenizer.from_pretrained(bare)
    tokenizer.chat_template = None
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(bare)
    with pytest.raises(ValueError, match="no chat template; set conversation: pair"):
        loaded(bare)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": 0.0}, r"RewardModel.scale=0.0: give finite numbers"),
        ({"scale": -1.0}, "the scale above 0 .a negative weight"),
        ({"mean": float("nan")}, "RewardModel.mean=nan"),
        ({"batch_size": 0}, "RewardModel.batch_size=0"),
        ({"max_tokens": 0}, "RewardModel.max_tokens=0"),
        ({"conversation": "text"}, "RewardModel.conversation='text'"),
        ({"too_long": "cut"}, "RewardModel.too_long='cut'"),
        ({"too_long": "cut_left", "conversation": "pair"}, "would cut off what marks"),
    ],
)
def test_settings_are_checked_before_anything_is_loaded(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RewardModel("some/model", **settings)
