"""Where SFT's answers come from: gold, a file, or the policy's own that pass."""

import json
from dataclasses import dataclass, field

import pytest
import torch

from tropism.models import Model, load_policy
from tropism.tasks.reasoning import Reasoning
from tropism.tasks.skills import Skills
from tropism.tasks.structured import StructuredOutput
from tropism.traces import Gold, Sampled, TraceContext, TraceFile, save_traces
from tropism.types import Completion, Prompt, Rollout

TASK = Skills()
PROMPTS = list(TASK.prompts("train", 4, seed=0))


@dataclass
class Drawn:
    """Answers each prompt with the given texts."""

    texts: dict[str, list[str]] = field(default_factory=dict)

    def generate(self, prompts, *, group_size, rollout, **_):
        assert rollout == -1
        return [
            Rollout(p, (5,), tuple(
                Completion((7, i, 3), text, torch.zeros(3), "stop" if text != "cut" else "length")
                for i, text in enumerate(self.texts[p.id])
            ))
            for p in prompts
        ]  # fmt: skip


@pytest.fixture(scope="module")
def policy():
    return load_policy(Model(name="organism", dtype="float32"), None)


def context(policy, engine=None, task=TASK) -> TraceContext:
    return TraceContext(policy, engine, {task.name: task}, seed=0)


@pytest.mark.parametrize(
    "task",
    [
        Skills(),
        *(StructuredOutput(tier=i) for i in range(3)),
        Reasoning(dataset="basic_arithmetic"),
    ],
    ids=lambda task: f"{task.name}{getattr(task, 'tier', '')}",
)
def test_gold_answers_pass_their_own_verifier(task):
    for prompt in task.prompts("train", 50, seed=1):
        assert task.score(prompt, task.gold(prompt))[task.primary] == 1


def test_gold_without_any_answer_is_refused(policy):
    class Silent(Skills):
        def gold(self, prompt):
            return None

    with pytest.raises(ValueError, match="know no gold answer"):
        Gold().collect(PROMPTS, context(policy, task=Silent()))


def test_only_passing_answers_that_ended_are_kept_each_once(policy):
    gold = [p.columns["answer"] for p in PROMPTS]
    engine = Drawn({
        PROMPTS[0].id: [gold[0], "no", gold[0] + " ", "cut"],
        PROMPTS[1].id: ["no"] * 4,
        PROMPTS[2].id: [gold[2]] * 4,
        PROMPTS[3].id: ["no", "no", "no", gold[3]],
    })  # fmt: skip
    traces = Sampled(num_samples=4, max_per_prompt=2, batch_size=3).collect(
        PROMPTS, context(policy, engine)
    )
    assert {key: [t.token_ids for t in value] for key, value in traces.items()} == {
        PROMPTS[0].id: [(7, 0, 3), (7, 2, 3)],
        PROMPTS[2].id: [(7, 0, 3), (7, 1, 3)],
        PROMPTS[3].id: [(7, 3, 3)],
    }
    with pytest.raises(ValueError, match="none of 4 samples of each of 1 prompts passed"):
        Sampled(num_samples=4).collect(PROMPTS[1:2], context(policy, engine))


def test_a_file_names_prompts_by_id_text_or_messages(policy, tmp_path):
    question = PROMPTS[1].messages[0]["content"]
    raw = Prompt(id="raw", task="skills", text="2+2=")
    rows = [
        {"prompt_id": PROMPTS[0].id, "completion": "one"},
        {"prompt_id": PROMPTS[0].id, "completion": "another"},
        {"prompt": question, "completion": "two"},
        {"messages": [dict(m) for m in PROMPTS[2].messages], "completion": "three"},
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": "of another data set", "completion": "x"},
    ]
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    traces = TraceFile(str(path)).collect([*PROMPTS, raw], context(policy))
    texts = {key: [trace.text for trace in value] for key, value in traces.items()}
    assert texts == {
        PROMPTS[0].id: ["one", "another"],
        PROMPTS[1].id: ["two"],
        PROMPTS[2].id: ["three"],
        "raw": ["4"],
    }
    ids = traces["raw"][0].token_ids
    assert policy.decode(ids) == "4"
    assert ids[-1] in policy.eos_token_ids


def test_saved_traces_are_read_back_token_for_token(policy, tmp_path):
    traces = Gold().collect(PROMPTS, context(policy))
    save_traces(tmp_path / "traces.jsonl", traces)
    again = TraceFile(str(tmp_path / "traces.jsonl")).collect(PROMPTS, context(policy))
    assert again == traces


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"}', "line 1: `completion` must be a string"),
        ("[1]", "line 1: a row must be a JSON object"),
        ("{", "line 1: "),
        ('{"completion": "x"}', "line 1: name the prompt by"),
        ('{"prompt": "x", "completion": "y"}', "no row belongs to any of the 4 prompts"),
    ],
)
def test_faults_of_a_file_are_named(policy, tmp_path, line, message):
    path = tmp_path / "traces.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        TraceFile(str(path)).collect(PROMPTS, context(policy))
    with pytest.raises(ValueError, match="there is no such file"):
        TraceFile(str(tmp_path / "none.jsonl")).collect(PROMPTS, context(policy))
