"""Damaged files of rows: each fault is named with file, row, column, value and what was wanted."""

import gzip
import json
import re

import pytest

from tropism.rewards import exact_match
from tropism.tasks.choice import ARC, MMLU
from tropism.tasks.code import MBPP, HumanEval
from tropism.tasks.math import WordProblems
from tropism.tasks.row_checks import COLUMNS, check_row
from tropism.tasks.row_files import jsonl_rows, shown
from tropism.tasks.rows import Rows
from tropism.tasks.schema_rows import SchemaRows
from tropism.tasks.sources import SOURCES, read_rows
from tropism.tasks.sources_hub import read_hub

GOOD = {
    "gsm8k": {"question": "q", "answer": "6 * 7 = 42\n#### 42"},
    "math": {"problem": "q", "solution": "\\boxed{1}", "level": "Level ?", "type": "Algebra"},
    "math500": {"problem": "q", "solution": "s", "answer": "1", "level": 2},
    "arc_easy": {"question": "q", "choices": ["a", "b", "c"], "answer_idx": 2},
    "mmlu": {"question": "q", "choices": ["a", "a", "c", "d"], "answer_idx": 2, "subject": "s"},
    "mbpp": {"text": "t", "code": "c", "task_id": 1, "test_list": ["t"], "test_setup_code": ""},
    "humaneval": dict.fromkeys(
        ("task_id", "prompt", "entry_point", "canonical_solution", "test"), "x"
    ),
    "ifeval": {"key": 1, "prompt": "p", "instruction_id_list": ["a:b"], "kwargs": [{}]},
    "json_schema_test_suite": {"description": "d", "schema": True, "tests": []},
    "jsonschemabench": {"unique_id": "u", "json_schema": {}},
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.jsonl: the file has no rows"),
        (b"\n \n", "a.jsonl: the file has no rows"),
        (b'{"a": 1}\n\n{"a": ', r"a.jsonl, line 3: Expecting value.*in '\{\"a\":'.*Mend the row"),
        (b'{"a": 1}\n{"a": "x', "line 2: Unterminated string.*one JSON object a line"),
        (b'[\n{"a": 1}]', r"line 1: Expecting value.*in '\['.*one JSON object a line"),
        (b"[1]\n", r"line 1: a row must be a JSON object, not \[1\]"),
        (b"null\n", "line 1: a row must be a JSON object, not None"),
        (b'{"a": 1}\n{"a": "\xff"}\n', "line 2: invalid start byte.*no JSONL in UTF-8"),
        (b"PAR1\x15\x04\x15\x80", "line 1: invalid start byte.*no JSONL in UTF-8"),
        (b"[" * 100_000, "line 1: maximum recursion depth"),
    ],
)
def test_a_line_that_is_no_object(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(jsonl_rows(path))


def test_lines_are_counted_as_an_editor_does(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "x\xe2\x80\xa8y"}\r\n\n{"a": 2}')  # BOM, U+2028, no end
    assert list(jsonl_rows(path)) == [
        (f"{path}, line 1", {"a": "x\u2028y"}),
        (f"{path}, line 3", {"a": 2}),
    ]


def test_gzip_whole_cut_and_none(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    rows = [{"a": str(i) * 50} for i in range(2000)]
    packed = gzip.compress("\n".join(map(json.dumps, rows)).encode())
    path.write_bytes(packed)
    assert [row for _, row in jsonl_rows(path)] == rows
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"behind line \d+: .*Get the file again"):
        list(jsonl_rows(path))
    path.write_bytes(b'{"a": 1}')
    with pytest.raises(ValueError, match="behind line 0: Not a gzipped file"):
        list(jsonl_rows(path))


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.TSV"])
def test_other_kinds_of_files_are_told_how_to_become_jsonl(tmp_path, name):
    path = tmp_path / name
    path.write_text("question,answer\n1+1?,2\n")
    with pytest.raises(ValueError, match=r"only JSONL is read. Convert it: pandas\.read_(\w+)\("):
        WordProblems(str(path)).prompts("train", 1, seed=0)


def test_long_values_are_cut():
    assert shown("x" * 200) == "'" + "x" * 76 + "..."
    assert shown(7) == "7"


@pytest.mark.parametrize("benchmark", COLUMNS)
def test_every_column_of_every_benchmark_is_asked_for(benchmark):
    assert set(COLUMNS) == set(SOURCES)
    good = GOOD.get(benchmark, GOOD["arc_easy"])
    check_row(benchmark, good)
    for name in COLUMNS[benchmark]:
        without = {key: value for key, value in good.items() if key != name}
        with pytest.raises(ValueError, match=f"no column '{name}', only "):
            check_row(benchmark, without)
        for wrong in (None, 1.5, [3]):
            with pytest.raises(ValueError, match=f"column '{name}' is {re.escape(repr(wrong))}, "):
                check_row(benchmark, {**good, name: wrong})


@pytest.mark.parametrize(
    ("benchmark", "change", "message"),
    [
        ("gsm8k", {"question": " "}, "column 'question' is ' ', wanted a text that is not blank"),
        ("gsm8k", {"answer": "42"}, None),  # the worked part may be missing, not the number
        ("gsm8k", {"answer": "#### many"}, "column 'answer' is '#### many', wanted a worked"),
        ("math", {"level": "Level 6"}, "column 'level' is 'Level 6', wanted a level from 1 to 5"),
        ("arc_easy", {"answer_idx": 3}, "'answer_idx' is 3, wanted 0 to 2, the place of the right"),
        ("arc_easy", {"answer_idx": -1}, "'answer_idx' is -1, wanted 0 to 2"),
        ("arc_easy", {"answer_idx": True}, "'answer_idx' is True, wanted a whole number"),
        ("arc_easy", {"answer_idx": "B"}, "'answer_idx' is 'B', wanted a whole number"),
        ("arc_easy", {"choices": ["a"]}, r"'choices' is \['a'\], wanted a list of 2 to 10 texts"),
        ("arc_easy", {"choices": ["a", ""]}, "'choices' is .*not blank"),
        ("arc_easy", {"choices": "abc"}, "'choices' is 'abc', wanted a list"),
        ("mbpp", {"task_id": "7"}, "'task_id' is '7', wanted a whole number"),
        ("mbpp", {"test_list": []}, r"'test_list' is \[\], wanted a list of texts"),
        ("ifeval", {"kwargs": []}, "'kwargs' has 0 entries, wanted one for each of the 1"),
        ("jsonschemabench", {"json_schema": "{}"}, r"'json_schema' is '\{\}', wanted a JSON Sch"),
    ],
)  # fmt: skip
def test_what_a_column_may_hold(benchmark, change, message):
    row = {**GOOD[benchmark], **change}
    if message is None:
        check_row(benchmark, row)
        return
    with pytest.raises(ValueError, match=message):
        check_row(benchmark, row)


def test_a_folder_names_file_row_and_remedy(tmp_path):
    folder = tmp_path / "arc"
    folder.mkdir()
    rows = [{"id": "r", **GOOD["arc_easy"]}, {"id": "s", **GOOD["arc_easy"], "answer_idx": 4}]
    (folder / "arc_easy_test.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"arc_easy_test.jsonl, line 3: column 'answer_idx' is 4"):
        ARC(data=str(tmp_path)).prompts("test", 1, seed=0)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ('"q, of\ntwo lines",1,2,3,4,B\nq,1,2,3,4,', "line 3: the 6th cell, the answer, is ''"),
        ("q,1,2,3,4,AB", "line 1: the 6th cell, the answer, is 'AB'; wanted one of A, B, C, D"),
        ("q,1,2,3,4,2", "line 1: the 6th cell, the answer, is '2'"),
        ("q,1,2,3,B", r"line 1: 5 cells, the first \['q'\]; wanted 6"),
        ("q,1,2,,4,B", r"line 1: column 'choices' is \['1', '2', '', '4'\]"),
        ("q,1,2,3,4,B\0", "line contains NUL|the 6th cell"),
    ],
)
def test_faults_of_mmlus_csv(tmp_path, cells, message):
    folder = tmp_path / "mmlu" / "test"
    folder.mkdir(parents=True)
    (folder / "virology_test.csv").write_text(cells)
    with pytest.raises(ValueError, match=rf"virology_test.csv.*(?:{message})"):
        MMLU(data=str(tmp_path), subjects=("virology",))._test_rows()


def test_csv_in_another_encoding(tmp_path):
    folder = tmp_path / "mmlu" / "test"
    folder.mkdir(parents=True)
    (folder / "virology_test.csv").write_bytes(b"na\xefve,1,2,3,4,B\n")
    with pytest.raises(ValueError, match=r"virology_test.csv: .*Wanted CSV in UTF-8"):
        read_rows("mmlu", "test", data=str(tmp_path))


def test_rows_of_the_schema_tests(tmp_path):
    folder = tmp_path / "json_schema_test_suite" / "draft7"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps([GOOD["json_schema_test_suite"], {"schema": True}]))
    with pytest.raises(ValueError, match=r"a.json, group 2: there is no column 'description'"):
        read_rows("json_schema_test_suite", "draft7", data=str(tmp_path))
    (folder / "a.json").write_text("[{")
    with pytest.raises(ValueError, match=r"a.json: Expecting property name"):
        read_rows("json_schema_test_suite", "draft7", data=str(tmp_path))


def code_row(tmp_path, folder, name, row):
    (tmp_path / folder).mkdir(exist_ok=True)
    text = (json.dumps(row) + "\n").encode()
    (tmp_path / folder / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    return str(tmp_path)


def test_code_that_a_row_brings(tmp_path):
    row = {**GOOD["mbpp"], "task_id": 602, "code": "def f():\n  return 1"}
    for change, message in (
        ({"test_list": ["assert g() == 1"]}, r"'assert g\(\) == 1' calls none of"),
        ({"test_list": ["assert f( == 1"]}, "invalid syntax|was never closed"),
    ):
        data = code_row(tmp_path, "mbpp", "mbpp.jsonl", {**row, **change})
        for task_id in (11, 512):  # every part has a row
            with (tmp_path / "mbpp" / "mbpp.jsonl").open("a") as file:
                good = {**row, "task_id": task_id, "test_list": ["assert f() == 1"]}
                file.write(json.dumps(good) + "\n")
        with pytest.raises(ValueError, match=rf"mbpp, task_id 602: .*(?:{message})"):
            MBPP(data=data).prompts("train", 1, seed=0)
    row = {**GOOD["humaneval"], "task_id": "HumanEval/3", "test": "x = 1"}
    data = code_row(tmp_path, "humaneval", "HumanEval.jsonl.gz", row)
    with pytest.raises(ValueError, match="task_id HumanEval/3: column 'test' defines no function"):
        HumanEval(data=data).prompts("test", 1, seed=0)


def test_rows_of_the_hub(monkeypatch):
    choices = {"text": ["a", "b"], "label": ["A", "B"]}
    row = {"id": "x", "question": "q", "choices": choices, "answerKey": "E"}
    rows = [{**row, "answerKey": "B"}, row]
    monkeypatch.setattr("tropism.tasks.sources_hub._load", lambda *_: (rows, None))
    with pytest.raises(
        ValueError, match=r"hub:allenai/ai2_arc, test, row 1: column 'answer_idx' is -1, wanted 0"
    ):
        read_hub("arc_easy", "test")
    rows[1] = {"id": "x", "question": "q"}
    with pytest.raises(ValueError, match=r"row 1: there is no column 'choices', only \['id', 'que"):
        read_hub("arc_easy", "test")


def words(path):
    return WordProblems(path, solution_column="solution").prompts("train", 1, seed=0)


def own_rows(path):
    return Rows(path, exact_match, gold_column="answer").prompts("train", 1, seed=0)


def schemas(path):
    return SchemaRows(path, format_column="format").prompts("train", 1, seed=0)


WORDS = {"question": "q", "answer": 1, "solution": "s"}
OWN = {"prompt": "p", "answer": "a"}
SCHEMA = {"prompt": "p", "schema": {}, "format": "json"}


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (words, {**WORDS, "question": None}, "column 'question' is None, wanted a text"),
        (words, {**WORDS, "answer": True}, "column 'answer' is True, wanted a number"),
        (words, {**WORDS, "answer": None}, "column 'answer' is None, wanted a number"),
        (words, {**WORDS, "answer": "two"}, "column 'answer' is 'two', wanted one number; compari"),
        (words, {**WORDS, "solution": ""}, "column 'solution' is '', wanted a text"),
        (words, {"question": "q"}, r"there is no column 'answer', only \['question'\]"),
        (own_rows, {"answer": "a"}, r"either `prompt` or `messages`.*it has \['answer'\]"),
        (own_rows, {**OWN, "prompt": 3}, "`prompt` must be a string that is not blank, not 3"),
        (own_rows, {"prompt": "p"}, r"there is no column 'answer', the task's gold_column, only"),
        (own_rows, {"messages": "hi", "answer": "a"}, "`messages` must be a list.*not 'hi'"),
        (schemas, {**SCHEMA, "schema": None}, "column 'schema' is None, wanted a JSON Schema"),
        (schemas, {**SCHEMA, "schema": '{"a'}, "column 'schema' is '{\"a', no JSON text: Unterm"),
        (schemas, {**SCHEMA, "schema": {"type": "text"}}, "no JSON Schema that can be checked"),
        (schemas, {**SCHEMA, "format": "xml"}, "column 'format' is 'xml': only"),
        (schemas, {**SCHEMA, "prompt": 3}, "column 'prompt' is 3, wanted a text that is not blank"),
    ],
)
def test_rows_of_a_users_own(tmp_path, read, row, message):
    path = tmp_path / "a.jsonl"
    good = {words: WORDS, own_rows: OWN, schemas: SCHEMA}[read]
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps(row)}\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 3: .*{message}.*Mend the row"):
        read(str(path))


def test_one_question_with_two_answers(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [WORDS, WORDS, {**WORDS, "answer": 2}]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        ValueError, match="line 3: the question of line 1 again, with the answer '2'"
    ):
        words(str(path))


def test_questions_with_the_right_option_twice_are_left_out(data_folder):
    task = MMLU(data=data_folder, subjects=("miscellaneous", "sociology"))
    everything = [row for part in (task._train_rows(), task._test_rows()) for row in part]
    twice = [
        row["id"]
        for row in everything
        if row["choices"].count(row["choices"][row["answer_idx"]]) > 1
    ]
    assert twice == ["miscellaneous_val-10", "sociology_test-197"]
    asked = {p.columns["question"] for p in task._questions("test")}
    assert not asked & {row["question"] for row in everything if row["id"] in twice}
