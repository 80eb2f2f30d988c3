"""Log-likelihoods of options: against one by one, at the boundary, in any company."""

import pytest
import torch

from tropism.evaluation.likelihood import option_logprobs
from tropism.models import Model, load_policy
from tropism.tasks.base import Options
from tropism.types import Prompt


@pytest.fixture(scope="module")
def policy():
    return load_policy(Model(name="organism", dtype="float32"), None)


def raw(text):
    return Prompt(id=text, task="t", text=text)


def chat(text):
    return Prompt(id=text, task="t", messages=({"role": "user", "content": text},))


ASKED = [
    (raw("12+30="), Options(("42", "41", "7", "100000"), 0)),
    (chat("larger of 7 and 31"), Options(("31", "7"), 0)),
    (raw("reverse tilo and what else there may be"), Options((" olit", " tilo", "x"), 0)),
    (chat("sort dbca"), Options(("abcd", "a", "dbca"), 0)),
]
PROMPTS, OPTIONS = zip(*ASKED, strict=True)


def one_by_one(policy, prompt, text):
    """Of the whole sequence by the model's own head, no batch and no cache."""
    before = list(policy.encode(prompt))
    ids = before + policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    every = logits.float().log_softmax(-1)
    return sum(float(every[i - 1, ids[i]]) for i in range(len(before), len(ids)))


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_sums_are_those_of_one_by_one(policy, max_tokens):
    found = option_logprobs(policy, PROMPTS, OPTIONS, max_tokens=max_tokens)
    for prompt, options, one in zip(PROMPTS, OPTIONS, found, strict=True):
        wanted = [one_by_one(policy, prompt, text) for text in options.texts]
        assert one.sums == pytest.approx(wanted, abs=1e-4)
        lengths = [
            len(policy.tokenizer(t, add_special_tokens=False).input_ids) for t in options.texts
        ]
        assert list(one.counts) == lengths
        assert one.per_token == pytest.approx(
            [total / length for total, length in zip(wanted, lengths, strict=True)], abs=1e-4
        )


def test_the_tiny_model_finds_right_answers_likeliest(policy):
    asked = [("larger of 7 and 31", "31", "7"), ("reverse tilo", "olit", "tilo"),
             ("count a in banana", "3", "1"), ("close ([{", "}])", ")]}")]  # fmt: skip
    prompts = [chat(question) for question, *_ in asked]
    options = [Options(tuple(answers), 0) for _, *answers in asked]
    found = option_logprobs(policy, prompts, options)
    assert sum(one.sums.index(max(one.sums)) == 0 for one in found) >= 3


def test_options_of_one_token_share_one_row(policy, monkeypatch):
    rows = []
    decoder = policy.base.get_decoder()
    hook = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    option_logprobs(policy, [chat("pick 3+4: A 6 B 7 C 9")], [Options(("A", "B", "C"), 1)])
    hook.remove()
    assert rows == [1]


def test_repeated_options_and_empty_batches(policy):
    (found,) = option_logprobs(policy, [PROMPTS[0]], [Options(("42", "42"), 0)])
    assert found.sums[0] == found.sums[1]
    assert option_logprobs(policy, [], []) == []


class Merging:
    """A tokenizer that has a token for "=4", which spans prompt and option, as BPE does."""

    bos_token_id = None
    pad_token_id = 0

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def __call__(self, text, **_):
        ids = []
        while text:
            piece = max((p for p in self.vocabulary if text.startswith(p)), key=len)
            ids.append(self.vocabulary.index(piece))
            text = text[len(piece) :]
        return {"input_ids": ids}


def test_a_token_across_the_boundary_counts_for_every_option(policy, monkeypatch):
    """From "1" on: "=4" "2" for one option, "=" "7" for the other; both say what follows "1"."""
    tokenizer = Merging(["<pad>", "1", "=", "=4", "2", "7", "4"])
    monkeypatch.setattr(policy, "tokenizer", tokenizer)
    (found,) = option_logprobs(policy, [raw("1=")], [Options(("42", "7"), 0)])
    assert found.counts == (2, 2)
    with torch.no_grad():
        for ids, total in zip(([1, 3, 4], [1, 2, 5]), found.sums, strict=True):
            logits = policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            every = logits.float().log_softmax(-1)
            assert total == pytest.approx(float(every[0, ids[1]] + every[1, ids[2]]), abs=1e-4)


def test_the_models_mode_is_left_as_it_was(policy):
    policy.model.train()
    option_logprobs(policy, PROMPTS[:1], OPTIONS[:1])
    assert policy.model.training
    policy.model.eval()


def test_what_is_too_long_is_named(policy, monkeypatch):
    monkeypatch.setattr(policy, "context_length", 5)
    with pytest.raises(ValueError, match=r"prompt '12\+30=' with an option has .* context is 5"):
        option_logprobs(policy, PROMPTS[:1], OPTIONS[:1])


def test_options_that_cannot_be():
    with pytest.raises(ValueError, match="gold=2"):
        Options(("a", "b"), 2)
    with pytest.raises(ValueError, match="not empty"):
        Options(("a", ""), 0)
