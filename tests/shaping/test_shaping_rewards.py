"""Length, repetition and tags by hand, and what each of them would pay a cheat."""

from __future__ import annotations

import math
import random

import jsonargparse
import pytest
import torch

from tropism.objective.advantages import group_advantages
from tropism.objective.length import soft_overlong
from tropism.shaping import Format, Length, Repetition, SoftOverlong, TagCount
from tropism.tasks.extra import ExtraReward
from tropism.types import Completion, Prompt

PROMPT = Prompt(id="p", task="t", text="?")
CPU = torch.device("cpu")
EOS = 0


def completion(text: str, ids: tuple[int, ...] | None = None, *, cut: bool = False) -> Completion:
    """Of the given token ids, or a token for each word; an EOS behind them unless it was cut."""
    if ids is None:
        ids = tuple(1 + hash(word) % 10**9 for word in text.split())
    ids = ids if cut else (*ids, EOS)
    return Completion(ids, text, torch.zeros(len(ids)), "length" if cut else "stop")


def of_length(num_tokens: int, *, cut: bool = False) -> Completion:
    """``num_tokens`` different tokens, EOS included."""
    return completion("some text", tuple(range(1, num_tokens + cut)), cut=cut)


def score(reward: ExtraReward, answer: Completion) -> float:
    value = reward.score(PROMPT, answer)
    assert reward.score_batch([PROMPT, PROMPT], [answer, answer]) == [value, value]
    return value


# -- length ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "linear", "cosine"),
    [
        (2, 0.0, 0.0),
        (10, 0.0, 0.0),
        (15, 0.25, (1 - math.sqrt(0.5)) / 2),
        (20, 0.5, 0.5),
        (25, 0.75, (1 + math.sqrt(0.5)) / 2),
        (30, 1.0, 1.0),
        (40, 1.0, 1.0),
        (50, 1.0, 1.0),
        (55, 0.75, (1 + math.sqrt(0.5)) / 2),
        (60, 0.5, 0.5),
        (70, 0.0, 0.0),
        (700, 0.0, 0.0),
    ],
)
def test_length_by_hand(num_tokens: int, linear: float, cosine: float) -> None:
    answer = of_length(num_tokens)
    assert len(answer.token_ids) == num_tokens
    assert score(Length(30, 50, 20, shape="linear"), answer) == pytest.approx(linear)
    assert score(Length(30, 50, 20), answer) == pytest.approx(cosine, abs=1e-12)


def test_length_counts_tokens_whatever_they_say() -> None:
    reward = Length(5, 5, 2)
    for text in ("a", "a much longer text, of the same number of tokens"):
        assert score(reward, completion(text, (1, 2, 3, 4))) == 1.0


def test_length_pays_neither_blank_completions_nor_those_cut_at_the_limit() -> None:
    reward = Length(1, 100, 10)
    for blank in (completion("", ()), completion(" \n" * 20, tuple(range(1, 40)))):
        assert score(reward, blank) == 0.0
    assert score(reward, of_length(50)) == 1.0
    assert score(reward, of_length(50, cut=True)) == 0.0  # to run on until the limit is no length


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0, 10, 5), "Length.minimum=0, Length.maximum=10"),
        ((11, 10, 5), "Length.minimum=11, Length.maximum=10"),
        ((1, 10, 0), "Length.falloff=0"),
        ((1, 10, 5, "square"), "Length.shape='square': choose from"),
    ],
)
def test_lengths_that_are_refused(settings: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Length(*settings)


def test_a_length_out_of_reach_is_refused_before_anything_is_sampled() -> None:
    Length(32, 64, 5).prepare(max_new_tokens=32, device=CPU)
    with pytest.raises(ValueError, match=r"Length.minimum=33 with sampling.max_new_tokens=32"):
        Length(33, 64, 5).prepare(max_new_tokens=32, device=CPU)


# -- soft overlong --------------------------------------------------------------------------------


def overlong(buffer: int, limit: int) -> SoftOverlong:
    reward = SoftOverlong(buffer)
    reward.prepare(max_new_tokens=limit, device=CPU)
    return reward


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 1.0), (80, 1.0), (85, 0.75), (90, 0.5), (99, 0.05)]
)
def test_soft_overlong_by_hand(num_tokens: int, expected: float) -> None:
    assert score(overlong(20, 100), of_length(num_tokens)) == pytest.approx(expected)


def test_soft_overlong_gives_the_advantages_of_the_objectives_option() -> None:
    answers = [of_length(n) for n in (3, 40, 50, 55, 60, 63)] + [of_length(64, cut=True)] * 2
    scores = torch.tensor([score(overlong(16, 64), answer) for answer in answers])
    assert scores.min() == 0.0
    assert scores.max() == 1.0
    own = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    lengths = torch.tensor([len(answer.token_ids) for answer in answers])
    added = own + soft_overlong(lengths, max_completion_length=64, buffer=16)
    for scale in ("none", "group"):
        as_component, as_option = (
            group_advantages(rewards, group_size=4, scale=scale).values
            for rewards in (own + scores, added)
        )
        torch.testing.assert_close(as_component, as_option)


def test_soft_overlong_settings() -> None:
    with pytest.raises(ValueError, match=r"SoftOverlong.buffer=0"):
        SoftOverlong(0)
    with pytest.raises(ValueError, match=r"SoftOverlong.buffer=65 with .*max_new_tokens=64"):
        SoftOverlong(65).prepare(max_new_tokens=64, device=CPU)


# -- repetition -----------------------------------------------------------------------------------


def test_repetition_by_hand() -> None:
    bigrams = Repetition(n=2, unit="word")
    # (a b) (b c) (c a) (a b) (b d): four of five are distinct
    assert score(bigrams, completion("a b c a b d")) == 0.8
    assert score(bigrams, completion("a b c d e f")) == 1.0
    # Of 8 - 3 trigrams of x y x y x y x y two are distinct
    assert score(Repetition(n=3, unit="word"), completion("x y " * 4)) == pytest.approx(2 / 6)
    assert score(Repetition(n=1, unit="character"), completion("aab b")) == 0.5


def test_what_is_tolerated_costs_nothing() -> None:
    answer = completion("a b c a b d")
    for tolerance, expected in ((0.0, 0.8), (0.1, 0.8 / 0.9), (0.2, 1.0), (0.5, 1.0)):
        reward = Repetition(n=2, unit="word", tolerance=tolerance)
        assert score(reward, answer) == pytest.approx(expected)


@pytest.mark.parametrize("unit", ["token", "word", "character"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_long_row_of_the_same_earns_next_to_nothing(unit: str, n: int) -> None:
    reward = Repetition(n=n, unit=unit)
    for num in (50, 100, 200):
        row = completion("yes " * num, (7,) * num)
        assert score(reward, row) <= 3 / (num - n)
        phrase = completion("I think so. " * num, (1, 2, 3, 4) * num)
        assert score(reward, phrase) < 12 / num
    assert score(reward, completion("yes " * 200, (7,) * 200, cut=True)) < 0.02


def test_a_blank_completion_has_nothing_and_a_short_one_does_not_beat_a_long_one() -> None:
    reward = Repetition(n=3)
    fluent = completion("some text", tuple(range(1, 60)))
    assert score(reward, fluent) == 1.0
    assert score(reward, completion("Paris")) == 1.0
    assert score(reward, completion("no no no no no")) == 1.0  # 5 units: too short for trigrams
    assert score(reward, completion("no no no no no no")) == 0.25
    for blank in (completion("", ()), completion("\n" * 30, tuple(range(1, 31)))):
        assert score(reward, blank) == 0.0


def test_a_completion_that_ends_is_not_better_for_its_end() -> None:
    reward = Repetition(n=2)
    row = (5, 6, 5, 6, 5, 6)
    assert score(reward, completion("x", row)) == score(reward, completion("x", row, cut=True))
    assert score(reward, completion("x", row)) == pytest.approx(2 / 5)


def test_tokens_need_no_blanks_and_words_no_case() -> None:
    ids = (11, 12, 13, 11, 12, 13, 11, 12)
    assert score(Repetition(n=2), completion("我想我想", ids)) == pytest.approx(3 / 7)
    words = Repetition(n=2, unit="word")
    assert score(words, completion("Yes, it is. YES, IT IS.")) == score(
        words, completion("yes , it is . yes , it is .")
    )
    assert score(words, completion("Straße strasse STRASSE straße")) == pytest.approx(1 / 3)


def test_renaming_units_changes_nothing() -> None:
    rng = random.Random(0)
    reward = Repetition(n=3)
    for _ in range(50):
        ids = [rng.randrange(1, 6) for _ in range(rng.randrange(6, 60))]
        names = rng.sample(range(100, 200), 6)
        renamed = tuple(names[i] for i in ids)
        value = score(reward, completion("x", tuple(ids)))
        assert value == score(reward, completion("x", renamed))
        assert value == score(reward, completion("x", renamed[::-1]))
        assert 0 < value <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "Repetition.n=0"),
        ({"unit": "line"}, "Repetition.unit='line': choose from"),
        ({"tolerance": 1.0}, "Repetition.tolerance=1.0"),
        ({"tolerance": -0.1}, "Repetition.tolerance=-0.1"),
    ],
)
def test_repetitions_that_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Repetition(**settings)


# -- tags -----------------------------------------------------------------------------------------

THOUGHT = "<think>\n2 and 2\n</think>\n4"


def test_blocks_of_ones_own() -> None:
    reward = Format(("plan", "code", "check"))
    text = "<plan>\na\n</plan>\n<code>\nb\n</code>\n<check>\nc\n</check>"
    assert score(reward, completion(text)) == 1.0
    assert score(reward, completion(text.replace("plan", "code"))) == 0.0
    swapped = "<code>\nb\n</code>\n<plan>\na\n</plan>\n<check>\nc\n</check>"
    assert score(reward, completion(swapped)) == 0.0
    assert score(TagCount(reward.blocks), completion(swapped)) == 1.0
    assert score(TagCount(reward.blocks), completion(text + "<plan>")) == pytest.approx(5 / 6)


def test_text_behind_the_last_block_where_it_may_be() -> None:
    assert score(Format(("think",)), completion(THOUGHT)) == 0.0
    reward = Format(("think",), can_continue=True)
    assert score(reward, completion(THOUGHT)) == 1.0
    assert score(reward, completion("so " + THOUGHT)) == 0.0
    assert score(reward, completion(THOUGHT + "<think>")) == 0.0
    assert score(reward, completion("<think>\n\n</think>\n4")) == 0.0


def test_tags_alone_and_tags_spammed() -> None:
    alone = completion("<think>\n</think>\n<answer>\n</answer>")
    assert score(Format(), alone) == 0.0
    assert score(TagCount(), alone) == 1.0  # which is why it should weigh little
    for text in ("", "<think>" * 500, "<think>\n</think>\n<answer>\n</answer>\n" * 100):
        assert score(Format(), completion(text)) == score(TagCount(), completion(text)) == 0.0


@pytest.mark.parametrize("blocks", [(), ("a", "a"), ("<a>",), ("a b",), ("",)])
def test_names_that_are_no_tags(blocks: tuple[str, ...]) -> None:
    for kind in (Format, TagCount):
        with pytest.raises(ValueError, match=rf"{kind.__name__}.blocks=.*without its brackets"):
            kind(blocks)


def test_configs_name_them_by_dotted_path() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=list[ExtraReward])
    rewards = [
        {"class_path": "tropism.shaping.Length",
         "init_args": {"minimum": 2, "maximum": 9, "falloff": 3}},
        {"class_path": "tropism.shaping.SoftOverlong", "init_args": {"buffer": 8}},
        {"class_path": "tropism.shaping.Repetition", "init_args": {"unit": "word"}},
        {"class_path": "tropism.shaping.TagCount", "init_args": {"blocks": ["plan"]}},
        {"class_path": "tropism.shaping.Format"},
    ]  # fmt: skip
    found = parser.instantiate(parser.parse_object({"rewards": rewards})).rewards
    assert found == [
        Length(2, 9, 3), SoftOverlong(8), Repetition(unit="word"), TagCount(("plan",)), Format()
    ]  # fmt: skip
    names = [reward.name for reward in found]
    assert names == ["length", "soft_overlong", "repetition", "tag_count", "format"]
