"""Science questions: which letters count, what shuffling keeps, options for likelihoods."""

import time
from collections import Counter

import pytest

from tropism.tasks.choice import ARC, MMLU, SCIENCE, OpenBookQA
from tropism.tasks.choice_answers import chosen_letter, chosen_text
from tropism.tasks.choice_task import Choice
from tropism.tasks.prompt_format import PromptFormat

CHOICES = ["a marsh", "a tundra", "the plains", "A desert"]
ROW = {"id": "r", "question": "Where is fog?", "choices": CHOICES, "answer_idx": 1}
LISTED = "A. a marsh\nB. a tundra\nC. the plains\nD. A desert\n"
TAGS = PromptFormat(style="tags")
RAW = PromptFormat(style="raw")


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("B", 1),
        (" B.\n", 1),
        ("(B)", 1),
        ("**B**", 1),
        ("B) a tundra", 1),
        ("B. A tundra.", 1),
        ("B: a tundra", 1),
        ("Answer: B", 1),
        ("The answer is B.", 1),
        ("The answer is (B) a tundra.", 1),
        ("\\boxed{B}", 1),
        ("Fog needs water.\nThe answer is: A", 0),
        ("A\n\nIt is wet there.", 0),
        ("D. a desert", 3),
        ("Option B", 1),
        ("Choice B.", 1),
        ("The correct option is B.", 1),
        ("The answer is option (B)", 1),
        ("`B`", 1),
        ("<B>", 1),
        ("**B.** a tundra", 1),
        ("**Answer:** B", 1),
        ("Answer:\n\n**B. a tundra**", 1),
        ("\\boxed{\\text{B}}", 1),
        ("$\\boxed{\\textbf{(B)}}$", 1),
        ("\\boxed{\\text{B. a tundra}}", 1),
        ("B because it is cold", 1),
        ("B, since A or C is warm", 1),
        ("B is correct.", 1),
        ("The answer is B because A is wet.", 1),
        ("The answer is B. a tundra, because it is cold", 1),
        ("The answer is B. It is cold there.", 1),
        ("The answer is A. The answer is A.", 0),
        ("B. a tundra\n\nExplanation: it is wet in A.", 1),
        # behind a copy of the question
        (LISTED + "The answer is B.", 1),
        (LISTED + "B", 1),
        (LISTED + "B. a tundra", 1),
        (LISTED + "\\boxed{B}", 1),
        (LISTED + "A or B", None),
        (LISTED, None),
        (LISTED + "The answer is A. The answer is B.", None),
        ("A. a marsh\nB. a tundra\nThe answer is B.", None),  # some of them are guesses
        # the option's text
        ("a tundra", 1),
        ("A desert", 3),
        ("A marsh", 0),
        ("**The plains**", 2),
        ("The answer is a tundra.", 1),
        ("The answer is A marsh", 0),
        ("Fog is wet.\na tundra", None),  # words of a line, as any
        # several
        ("A or B", None),
        ("Either A or B", None),
        ("A and B", None),
        ("A, B", None),
        ("A, B, C, D", None),
        ("A/B", None),
        ("AB", None),
        ("A? B", None),
        ("A\nB", None),
        ("A\nB\nC\nD", None),
        ("B, not A", None),
        ("The answer is A or B.", None),
        ("The answer is both A and B.", None),
        ("The answer is A. The answer is B.", None),
        ("The answer is A. Or is it B?", None),
        ("The answer is A.\nAnswer: B", None),
        ("A\nThe answer is B", None),
        ("\\boxed{A} \\boxed{B}", None),
        ("\\boxed{A or B}", None),
        ("a marsh or a tundra", None),
        ("a marsh. a tundra", None),
        # none
        ("", None),
        ("E", None),
        ("\\boxed{E}", None),
        ("b", None),
        ("I", None),
        ("B. a marsh", None),  # another option's text
        ("The answer is B. a marsh", None),
        ("A dog", None),  # an article
        ("A fog is likely", None),
        ("The answer is A dog", None),
        ("tundra", None),
        ("The answer is not B", None),
        ("B is wrong", None),
        ("I think that B is likely", None),
        ("The answer is", None),
        ("<answer>B</answer>", None),
        ("Answer: B. " * 200, None),
    ],
)
def test_letters(text, chosen):
    assert chosen_letter(text, CHOICES) == chosen


def test_letters_beside_options_that_look_like_them():
    blood = ["AB", "O", "A and B", "B"]
    assert chosen_letter("AB", blood) == 0
    assert chosen_letter("A and B", blood) == 2
    assert chosen_letter("B", blood) == 1  # a letter is what is asked for
    assert chosen_letter("A. -1", ["-1", "1"]) == 0
    assert chosen_letter("A. 1", ["-1", "1"]) is None
    assert chosen_letter("A - 1", ["1", "2"]) == 0
    assert chosen_letter("B because it rains", ["it is dry", "because it rains"]) == 1
    assert chosen_letter("A because it rains", ["it is dry", "because it rains"]) is None
    reasons = ["because it rains", "because it is dry"]
    assert chosen_letter("because it rains, because it is dry", reasons) is None


@pytest.mark.parametrize(
    "text", ["A\n" * 10_000, "answer is A " * 9_000, "\\boxed{" * 9_000, "choice: " + "a. " * 9_000]
)
def test_no_text_takes_long(text):
    began = time.process_time()
    chosen_letter(text, CHOICES)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("text", "chosen"),
    [("a tundra", 1), (" A tundra.\n", 1), ("The answer is a tundra", 1), ("B", None), ("", None),
     ("a marsh or a tundra", None), ("a marsh\na tundra", None), ("tundra", None)],
)  # fmt: skip
def test_texts_of_cloze(text, chosen):
    assert chosen_text(text, CHOICES) == chosen
    assert chosen_text("+1", ["+1", "-1"]) == 0
    assert chosen_text("Rr", ["RR", "Rr"]) == 1
    assert chosen_text("rr.", ["RR", "Rr"]) is None


def prompt_of(task, row=ROW):
    (prompt,) = task._of_parts([row]).values()
    return prompt


def test_the_prompt_lists_the_shuffled_options_and_gold_follows():
    task = ARC()
    prompt = prompt_of(task)
    content = prompt.messages[-1]["content"]
    listed = [line[3:] for line in content.splitlines()[1:5]]
    assert sorted(listed) == sorted(CHOICES)
    assert listed == prompt.columns["choices"]
    assert listed[prompt.columns["answer_idx"]] == "a tundra"
    assert task.score(prompt, task.gold(prompt)) == {"answered": 1, "accuracy": 1}
    wrong = "ABCD"[(prompt.columns["answer_idx"] + 1) % 4]
    assert task.score(prompt, wrong) == {"answered": 1, "accuracy": 0}
    assert task.score(prompt, "A or B") == {"answered": 0, "accuracy": 0}


def test_the_order_is_the_questions_own_and_the_seeds():
    orders = {tuple(prompt_of(ARC(shuffle_seed=seed)).columns["choices"]) for seed in range(40)}
    assert len(orders) > 10
    assert prompt_of(ARC()) == prompt_of(ARC())
    assert prompt_of(ARC(shuffle_seed=None)).columns["choices"] == CHOICES
    assert prompt_of(ARC(shuffle_seed=3)).id == prompt_of(ARC()).id


@pytest.mark.parametrize(
    "option", ["all of the above", "None of these", "both A and B", "A and C only", "Neither A nor"]
)
def test_options_that_speak_of_others_keep_their_place(option):
    row = {**ROW, "choices": [*CHOICES[:3], option]}
    assert all(
        prompt_of(ARC(shuffle_seed=seed), row).columns["choices"] == row["choices"]
        for seed in range(20)
    )


def test_options_for_likelihood():
    letters = ARC("letters", RAW)
    prompt = prompt_of(letters)
    options = letters.options(prompt)
    assert options.texts == (" A", " B", " C", " D")
    assert options.gold == prompt.columns["answer_idx"]
    cloze = ARC("cloze", RAW)
    prompt = prompt_of(cloze)
    assert prompt.text == "Question: Where is fog?\nAnswer:"
    options = cloze.options(prompt)
    assert options.texts[options.gold] == " a tundra"
    assert ARC().options(prompt_of(ARC())).texts == ("A", "B", "C", "D")  # behind a chat template
    assert ARC(prompt_format=TAGS).options(prompt_of(ARC(prompt_format=TAGS))) is None


def test_tags_hold_the_letter():
    task = ARC(prompt_format=TAGS)
    prompt = prompt_of(task)
    assert task.score(prompt, task.gold(prompt)) == dict.fromkeys(task.components, 1.0)
    assert task.score(prompt, "ABCD"[prompt.columns["answer_idx"]])["accuracy"] == 0


def test_samples_vote_by_letter():
    task = ARC()
    prompt = prompt_of(task)
    texts = ("B", f"B. {prompt.columns['choices'][1]}", "The answer is B.")
    assert {task.answer_key(prompt, text) for text in texts} == {"B"}
    assert task.answer_key(prompt, "A or B") is None


TASKS = {
    "arc_easy": (ARC, {}, (1910, 338, 2376)),
    "arc_challenge": (ARC, {"challenge": True}, (933, 185, 1172)),
    "openbookqa": (OpenBookQA, {}, (4201, 700, 500)),
    "mmlu_science": (MMLU, {}, (233, 58, 2109)),
}


@pytest.mark.parametrize("form", ["letters", "cloze"])
@pytest.mark.parametrize("name", TASKS)
def test_gold_passes_and_no_other_option_does(data_folder, name, form):
    make, options, sizes = TASKS[name]
    task: Choice = make(form, data=data_folder, **options)
    assert task.name == name
    splits = [task._questions(split) for split in ("train", "validation", "test")]
    assert tuple(map(len, splits)) == sizes
    assert not {p.id for p in splits[0]} & {p.id for p in splits[1]}
    assert not {p.id for p in (*splits[0], *splits[1])} & {p.id for p in splits[2]}
    for prompt in splits[2]:
        texts = prompt.columns["choices"]
        for i, text in enumerate(texts):
            is_gold = i == prompt.columns["answer_idx"]
            if is_gold or texts.count(text) == 1:
                assert task.score(prompt, task._answered(prompt, i))["accuracy"] == is_gold, text
    copies = [task.score(p, task._text(p.columns))["answered"] for p in splits[2]]
    assert not any(copies)
    counts = Counter(prompt.columns["answer_idx"] for prompt in splits[2])
    assert all(0.18 < counts[i] / len(splits[2]) < 0.32 for i in range(4))


def test_the_subjects_of_mmlu(data_folder):
    task = MMLU(data=data_folder)
    assert len(SCIENCE) == 13
    first = task.prompts("test", 60, 0)
    assert len({prompt.columns["subject"] for prompt in first}) > 8
    assert task.prompts("test", 20, 0) == first[:20]
    assert [info.part for info in task.data_info()] == ["dev", "val", "test"]
    with pytest.raises(ValueError, match=r"subjects has \['alchemy'\]"):
        MMLU(data=data_folder, subjects=("alchemy",)).prompts("test", 1, 0)


def test_settings_and_rows_that_cannot_be():
    with pytest.raises(ValueError, match="form='numbers'"):
        ARC("numbers")
    with pytest.raises(ValueError, match="row 'r' has 4 options and answer 4"):
        prompt_of(ARC(), {**ROW, "answer_idx": 4})
