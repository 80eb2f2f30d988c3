"""Facts files: good rows, every kind of bad one, and where subjects are among tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tropism.measurements.facts import Fact, read_facts, tokenize

SHIPPED = Path(__file__).resolve().parents[2] / "experiments" / "scalpel" / "facts.jsonl"
GOOD = {"prompt": "The sky over Rome is", "subject": "sky over Rome", "answer": " blue"}


def written(folder: Path, *lines: str) -> Path:
    path = folder / "facts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_good_rows_are_read_in_order(tmp_path):
    other = {**GOOD, "prompt": "Over there the sky over Rome is"}
    path = written(tmp_path, json.dumps(GOOD), "", json.dumps(other))
    assert read_facts(path) == [Fact(**GOOD), Fact(**other)]


def test_the_shipped_ones_are_many_and_sound():
    assert len(read_facts(SHIPPED)) >= 80


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("[1]", "nothing else"),
        (json.dumps({**GOOD, "source": "x"}), "nothing else"),
        (json.dumps({**GOOD, "answer": 7}), "no text"),
        (json.dumps({**GOOD, "answer": " "}), "answer is empty"),
        (json.dumps({**GOOD, "subject": "Paris"}), "'Paris' stands 0 times"),
        (json.dumps({**GOOD, "subject": "e"}), "'e' stands 3 times"),
        (json.dumps({**GOOD, "subject": "Rome is"}), "ends with its subject"),
        (json.dumps({**GOOD, "answer": "blue"}), "begin the answer with a space"),
        (json.dumps(GOOD), "stood there before"),
    ],
)
def test_bad_rows_are_refused_by_line_and_reason(line, said, tmp_path):
    path = written(tmp_path, json.dumps(GOOD), line)
    with pytest.raises(ValueError, match=r"has 1 bad rows:\nline 2: ") as refused:
        read_facts(path)
    assert said in str(refused.value)


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_facts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="is empty"):
        read_facts(written(tmp_path))


# -- tokens -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def characters():
    from transformers import AutoTokenizer

    from tropism.organism import weights_folder

    return AutoTokenizer.from_pretrained(weights_folder())


def test_characters_of_a_prompt_have_their_roles(characters):
    [fact] = tokenize([Fact("1 abc is ", "abc", "79")], characters)
    assert "".join(fact.texts[fact.start : fact.end]) == "abc"
    assert [fact.texts[i] for i in fact.traced] == list("abc is ")
    assert fact.roles == (
        "first subject", "middle subject", "last subject", "first subsequent",
        "further", "further", "last",
    )  # fmt: skip
    assert (characters.decode([fact.answer_id]), fact.num_answer_tokens) == ("7", 2)


def test_one_token_subjects_are_last_and_the_end_is_last(characters):
    [fact] = tokenize([Fact("so a=", "a", "b")], characters)
    assert fact.roles == ("last subject", "last")


def test_answers_that_share_a_token_with_the_prompt_are_refused():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pieces = {"a": 0, "b": 1, "c": 2, "d": 3, "cd": 4}
    model = models.BPE(vocab=pieces, merges=[("c", "d")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    with pytest.raises(ValueError, match="share a token"):
        tokenize([Fact("abc", "a", "d")], tokenizer)
    [fact] = tokenize([Fact("abc", "a", "b")], tokenizer)
    assert (fact.ids, fact.start, fact.end, fact.answer_id) == ((0, 1, 2), 0, 1, 1)
