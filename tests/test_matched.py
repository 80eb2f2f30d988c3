"""`tropism matched`: exactly the settings that differ."""

from tropism.cli import main
from tropism.matched import differences, flatten

A = """
model:
  class_path: tropism.GRPO
  init_args: {model: {name: organism}, group_size: 4}
data:
  class_path: tropism.PromptDataModule
  init_args: {tasks: [{class_path: tropism.tasks.skills.Skills}], batch_size: 8, num_rollouts: 2}
"""
B = A.replace("tropism.GRPO", "tropism.SFT").replace("group_size: 4", "group_size: 1")


def test_leaves_are_named_by_their_path():
    config = {"m": {"class_path": "x.M", "init_args": {"a": 1}}, "c": [{"class_path": "y.C"}, 2]}
    assert flatten(config) == {
        "m.class_path": '"x.M"', "m.a": "1", "c.C.class_path": '"y.C"', "c.1": "2"
    }  # fmt: skip


def test_what_only_one_side_has_stands_in_one_row():
    a = {"m.objective.loss": '"grpo"', "m.objective.beta": "0.0", "m.lr": "1", "m.same": "5"}
    b = {"m.traces": '"gold"', "m.lr": "2", "m.same": "5"}
    assert differences(a, b) == [
        ("m.lr", "1", "2"),
        ("m.objective.*", "2 settings", "-"),
        ("m.traces", "-", '"gold"'),
    ]


def test_two_configs_are_completed_before_they_are_compared(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(A)
    (tmp_path / "b.yaml").write_text(B)
    main(["matched", "--a", str(tmp_path / "a.yaml"), "--b", str(tmp_path / "a.yaml")])
    assert capsys.readouterr().out.startswith("0 settings differ")
    main(["matched", "--a", str(tmp_path / "a.yaml"), "--b", str(tmp_path / "b.yaml")])
    shown = "".join(capsys.readouterr().out.split())
    for setting in ("model.group_size", "model.objective.*", "model.class_path", "model.traces"):
        assert setting in shown
    for setting in ("optimizer", "sampling", "lora", "reward_weights", "trainer.callbacks"):
        assert setting not in shown
