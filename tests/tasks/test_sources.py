"""Rows of every benchmark, the same from folder and hub, with what a record needs."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tropism.tasks.sources import SOURCES, digest, read_rows
from tropism.tasks.sources_hub import HUB, converted, read_hub

SIZES = {
    "gsm8k": (7473, 1319),
    "math": (4500,),
    "math500": (500,),
    "arc_easy": (2251, 2376),
    "arc_challenge": (1119, 1172),
    "openbookqa": (4957, 500),
    "mmlu": (285, 1542, 14079),
    "mbpp": (10, 500, 90, 374, 974),
    "humaneval": (164,),
    "ifeval": (541,),
    "json_schema_test_suite": (383, 257),
    "jsonschemabench": (429, 1938, 1707, 371, 1927),
}


@pytest.mark.parametrize("benchmark", SOURCES)
def test_every_part_has_its_rows(data_folder, benchmark):
    found = [read_rows(benchmark, part, data=data_folder) for part in SOURCES[benchmark].parts]
    assert tuple(len(rows) for rows, _ in found) == SIZES[benchmark]
    for rows, info in found:
        assert (info.num_rows, info.sha256) == (len(rows), digest(rows))
        assert info.licence.startswith(SOURCES[benchmark].licence)
        assert info.revision is not None
        assert len(info.revision) == 40
    assert len({info.sha256 for _, info in found}) == len(found)


def test_mmlu_says_that_it_is_the_pre_release(data_folder):
    _, info = read_rows("mmlu", "test", data=data_folder)
    assert "Pre-release" in info.note
    rows, _ = read_rows("mmlu", "dev", data=data_folder)
    assert len({row["subject"] for row in rows}) == 57


def test_no_row_of_math500_is_in_math(data_folder):
    train, _ = read_rows("math", "train", data=data_folder)
    test, _ = read_rows("math500", "test", data=data_folder)
    assert not {row["problem"] for row in train} & {row["problem"] for row in test}


def test_the_parts_of_mbpp_go_by_task_id(data_folder):
    rows, _ = read_rows("mbpp", "validation", data=data_folder)
    assert [row["task_id"] for row in rows] == list(range(511, 601))


def test_the_folder_comes_from_the_setting_or_the_environment(tmp_path, monkeypatch):
    for name, answer in (("a", 1), ("b", 2)):
        (tmp_path / name / "gsm8k").mkdir(parents=True)
        row = {"question": "q", "answer": f"#### {answer}"}
        (tmp_path / name / "gsm8k" / "test.jsonl").write_text(json.dumps(row) + "\n\n")
    monkeypatch.setenv("TROPISM_DATA", str(tmp_path / "a"))
    assert read_rows("gsm8k", "test")[0][0]["answer"] == "#### 1"
    rows, info = read_rows("gsm8k", "test", data=str(tmp_path / "b"))
    assert rows[0]["answer"] == "#### 2"
    assert (info.place, info.revision) == (str(tmp_path / "b" / "gsm8k"), None)  # no NOTICE.txt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gsm9k", "test"), "benchmark='gsm9k': choose from"),
        (("gsm8k", "dev"), r"part='dev': gsm8k has \['train', 'test'\]"),
        (("arc_easy", "test"), "no such file or folder. Set `data` .* TROPISM_DATA"),
        (("gsm8k", "train"), r"train.jsonl, line 2: "),
    ],
)
def test_faults_are_named(tmp_path, arguments, message):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n{\n')
    with pytest.raises(ValueError, match=message):
        read_rows(*arguments, data=str(tmp_path))


def test_without_folder_and_network_the_remedy_is_named(monkeypatch):
    monkeypatch.delenv("TROPISM_DATA", raising=False)
    with pytest.raises(ValueError, match=r"json_schema_test_suite is not on the hub.*TROPISM_DATA"):
        read_rows("json_schema_test_suite", "draft7")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"not installed.*`data` of the task"):
        read_rows("gsm8k", "test")


def test_rows_of_the_hub_get_the_columns_of_the_folders():
    arc = {
        "id": "x", "question": "q", "answerKey": "3",
        "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]},
    }  # fmt: skip
    assert converted("arc_easy", arc, 0) == {
        "id": "x", "question": "q", "choices": ["a", "b", "c"], "answer_idx": 2
    }  # fmt: skip
    openbook = {**arc, "question_stem": "q", "answerKey": "1"}
    assert converted("openbookqa", openbook, 0)["answer_idx"] == 0
    mmlu = {"question": "q", "subject": "virology", "choices": list("abcd"), "answer": 3}
    assert converted("mmlu", mmlu, 7)["id"] == "virology-7"
    schema = {"unique_id": "u", "json_schema": '{"type": "object"}'}
    assert converted("jsonschemabench", schema, 0)["json_schema"] == {"type": "object"}
    kwargs = {"key": 1, "kwargs": [{"num_words": None, "num_highlights": 3}]}
    assert converted("ifeval", kwargs, 0)["kwargs"] == [{"num_highlights": 3}]


class Hub(ModuleType):
    """In the place of ``datasets``: what is asked for, and rows of it."""

    def __init__(self, tables):
        super().__init__("datasets")
        self.asked, self.tables = [], tables
        self.exceptions = SimpleNamespace(DatasetsError=KeyError)

    def load_dataset(self, repository, config, *, split, revision):
        self.asked.append((repository, config, split, revision))
        return self.tables[repository]


@pytest.fixture
def hub(monkeypatch):
    problems = [
        {"problem": str(i), "solution": "s", "level": "Level 1", "type": ""} for i in range(4)
    ]
    fake = Hub({
        "openai/gsm8k": [{"question": "q", "answer": "#### 1"}],
        "EleutherAI/hendrycks_math": problems,
        "HuggingFaceH4/MATH-500": problems[:1],
    })  # fmt: skip
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.delenv("TROPISM_DATA", raising=False)
    return fake


def test_the_commit_that_is_loaded_is_the_one_recorded(hub, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info", lambda *a, **k: SimpleNamespace(sha="c0ffee")
    )
    rows, info = read_rows("gsm8k", "test")
    assert hub.asked == [("openai/gsm8k", "main", "test", "c0ffee")]
    assert (info.place, info.revision, info.licence) == ("hub:openai/gsm8k", "c0ffee", "MIT")
    assert len(rows) == 1


def test_the_cache_serves_without_a_network_and_math_leaves_math500_out(hub):
    rows, revision = read_hub("math", "train")
    assert revision is None
    assert len(rows) == 7 * 3  # seven subjects, one problem of each held out
    assert hub.asked[0] == ("HuggingFaceH4/MATH-500", None, "test", None)


def test_what_cannot_be_loaded_names_the_remedy(hub):
    with pytest.raises(ValueError, match=r"cannot be loaded from the hub.*TROPISM_DATA"):
        read_rows("ifeval", "test")
    assert set(HUB) <= set(SOURCES)
