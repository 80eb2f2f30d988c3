"""`tropism fit` from end to end on the organism: what the run folder holds, and exact resume."""

import json

import pytest
import torch
import yaml

from tropism.measurements.records import TABLES, read
from tropism.models import LoRA, Model, load_policy

ADAPTED = "--model.init_args.lora"


def weights(run, name: str) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / name, weights_only=True)["state_dict"]


def test_run_folder_holds_what_the_contract_says(tropism):
    run = tropism("--model.init_args.objective.beta", "0.05")
    steps = read(run, "steps")
    assert steps["rollout"].tolist() == [0, 1, 2, 3]
    assert (steps["step"].diff().dropna() >= 0).all()
    assert steps["kl"].iloc[0] == pytest.approx(0, abs=1e-6)  # the policy is its own reference yet
    assert steps["kl"].iloc[-1] > 0
    assert (steps["sampler_gap"] < 1e-4).all()  # fp32: sampler and trainer are the same policy
    assert set(read(run, "rewards")["component"]) == {"format", "accuracy"}
    evals = read(run, "evals")
    assert evals["rollout"].tolist() == [0, 4]
    assert evals["step"].tolist() == [0, int(steps["step"].iloc[-1])]
    assert set(evals["benchmark"]) == {"skills"}
    norms = read(run, "update_norms")
    last = norms[norms["rollout"] == 3]
    assert len(last) == 12 * 7
    assert (last["update_norm"] > 0).all()
    assert len(read(run, "completions")) > 0
    for table in ("steps", "rewards", "update_norms", "evals", "completions"):
        assert list(read(run, table).columns) == ["schema", "rollout", "step", *TABLES[table]]

    record = json.loads((run / "run.json").read_text())
    assert "skills" in json.dumps(record["summary"])
    complete = yaml.safe_load((run / "config.yaml").read_text())
    assert complete["seed_everything"] == 0
    assert list(run.glob("events.out.tfevents.*"))
    assert (run / "adapter" / "adapter_model.safetensors").is_file()


def test_update_norms_are_those_of_the_exported_adapter(tropism):
    from tropism.lora.export import load_adapter_tensors

    run = tropism()
    _, tensors = load_adapter_tensors(run / "adapter")
    policy = load_policy(Model(name="organism", dtype="float32"), None)
    norms = read(run, "update_norms")
    last = norms[norms["rollout"] == norms["rollout"].max()].set_index(["layer", "module"])
    for site in policy.sites:
        a, b, scaling = tensors[site.name]
        change = scaling * b.double() @ a.double()
        expected = change.norm() / policy.linear(site).weight.detach().double().norm()
        assert last.loc[(site.layer, site.module), "update_norm"] == pytest.approx(
            float(expected), rel=1e-4
        )


def test_exported_adapter_equals_the_trainer_and_differs_from_the_base(tropism):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tropism.organism import weights_folder

    run = tropism("--model.init_args.model.dtype", "bfloat16")
    saved = weights(run, "last.ckpt")
    ids = torch.arange(5, 30)[None]
    trained = {}
    for compute in ("base", "float32"):
        lora = LoRA(rank=4, alpha=8, compute=compute)
        policy = load_policy(Model(name="organism"), lora)
        own = {f"network.{name}": value for name, value in policy.named_trainable().items()}
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(saved[name])
            trained[compute] = policy.model(input_ids=ids).logits
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(weights_folder(), dtype=torch.bfloat16)
        plain = base(input_ids=ids).logits
        stock = PeftModel.from_pretrained(base, run / "adapter")(input_ids=ids).logits
    assert torch.equal(trained["float32"], stock)
    assert not torch.equal(stock, plain)
    # Adapters that multiply in bf16 differ from fp32 ones by rounding: less than training did.
    gap = (trained["base"] - stock).float().norm() / (stock - plain).float().norm()
    assert gap < 0.5


def test_resume_equals_an_uninterrupted_run(tropism):
    shared = ("--trainer.callbacks+", '{"class_path": "tropism_callbacks.Checkpoint", "init_args": '
              '{"every_n_rollouts": 2, "keep": 10}}')  # fmt: skip
    run = tropism(*shared)
    expected, steps = weights(run, "last.ckpt"), read(run, "steps")
    (run / "checkpoints" / "last.ckpt").unlink()
    resumed = tropism(*shared, "--ckpt_path", str(run / "checkpoints" / "rollout=000002.ckpt"))
    assert resumed == run  # it goes on in its own folder
    found = weights(resumed, "last.ckpt")
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name
    again = read(resumed, "steps")
    same = [name for name in steps.columns if not name.startswith("seconds_")]
    assert again[same].equals(steps[same])
    assert not again["seconds_train"].iloc[2:].equals(steps["seconds_train"].iloc[2:])
    assert len(read(resumed, "evals")) == 2


def test_resume_takes_a_new_learning_rate_and_refuses_another_policy(tropism):
    run = tropism("--model.init_args.optimizer.schedule", "linear")
    checkpoint = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    saved, config = (run / "run.json").read_text(), (run / "config.yaml").read_text()
    with pytest.raises(ValueError, match=r"lora\.alpha: 8\.0 in the checkpoint, 16\.0 here"):
        tropism(*checkpoint, "--model.init_args.lora.alpha", "16")
    with pytest.raises(ValueError, match=r"optimizer\.schedule"):
        tropism(*checkpoint)
    assert (run / "config.yaml").read_text() == config
    assert (
        json.loads((run / "run.json").read_text())["summary"]["evaluation"]
        == (json.loads(saved)["summary"]["evaluation"])
    )
    steady = tropism("--trainer.callbacks+", '{"class_path": "tropism_callbacks.Checkpoint", '
                     '"init_args": {"every_n_rollouts": 2, "keep": 10}}')  # fmt: skip
    rates = ["--ckpt_path", str(steady / "checkpoints" / "rollout=000002.ckpt")]
    tropism(*rates, "--model.init_args.optimizer.learning_rate", "1e-4")
    assert read(steady, "steps")["lr"].tolist() == [2e-3, 2e-3, 1e-4, 1e-4]


@pytest.mark.fault(31)
def test_checkpoint_loads_without_its_config(tropism):
    from tropism import GRPO

    run = tropism("--data.init_args.num_rollouts", "1")
    module = GRPO.load_from_checkpoint(run / "checkpoints" / "last.ckpt")
    assert module.lora == LoRA(rank=4, alpha=8)
    assert module.group_size == 4
    assert module.rollout == 1
    saved = weights(run, "last.ckpt")
    for name, value in module.policy.named_trainable().items():
        assert torch.equal(value, saved[f"network.{name}"])


def test_full_parameter_training_writes_a_model(tropism):
    from transformers import AutoModelForCausalLM

    run = tropism(ADAPTED, "null", "--model.init_args.objective.beta", "0.01")
    norms = read(run, "update_norms")
    assert (norms[norms["rollout"] == 3]["update_norm"] > 0).any()
    tuned = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    saved = weights(run, "last.ckpt")
    for name, value in tuned.state_dict().items():
        if f"network.{name}" in saved:
            assert torch.equal(value, saved[f"network.{name}"]), name


def test_training_from_an_existing_adapter_has_it_as_reference(tropism):
    first = tropism()
    second = tropism(
        "--model.init_args.model.adapter", str(first / "adapter"),
        "--model.init_args.objective.beta", "0.1",
    )  # fmt: skip
    evals_before, evals_after = read(first, "evals"), read(second, "evals")
    assert evals_before["value"].iloc[-1] == evals_after["value"].iloc[0]
    assert read(second, "steps")["kl"].iloc[0] == pytest.approx(0, abs=1e-6)
    assert read(second, "update_norms")["update_norm"].iloc[0] < 0.1


def test_several_updates_on_one_rollout(tropism):
    run = tropism("--model.init_args.objective.num_iterations", "3")
    steps = read(run, "steps")
    assert len(steps) == 4
    assert set(steps["step"].diff().dropna()) <= {0, 3}


def test_seed_decides_the_run(tropism):
    def texts(*arguments: str) -> list[str]:
        run = tropism("--data.init_args.num_rollouts", "1", *arguments)
        return read(run, "completions")["text"].tolist()

    assert texts() == texts()
    assert texts() != texts("--seed_everything", "1")


def test_validate_and_test_score_without_training(tropism, capsys):
    run = tropism(subcommand="validate")
    assert len(read(run, "evals")) == 1
    tropism(subcommand="test")
    assert "skills" in capsys.readouterr().out


def test_chat_answers_as_base_and_as_tuned(tropism, capsys):
    from tropism.chat import load_run
    from tropism.cli import main
    from tropism.rollouts.engine import Sampling
    from tropism.rollouts.transformers_engine import TransformersEngine
    from tropism.types import Prompt

    run = tropism("--model.init_args.optimizer.learning_rate", "0.05")
    prompts = [
        Prompt(id=text, task="t", messages=({"role": "user", "content": text},))
        for text in ("12+30=", "reverse: cab", "name=bob age=7")
    ]

    def greedy(adapter: str | None) -> list[str]:
        policy = load_policy(
            Model(name="organism", dtype="float32", adapter=adapter), LoRA(rank=4, alpha=8)
        )
        engine = TransformersEngine()
        engine.bind(policy)
        options = {"group_size": 1, "seed": 0, "rollout": 0, "greedy": True}
        rollouts = engine.generate(prompts, sampling=Sampling(max_new_tokens=8), **options)
        return [rollout.completions[0].text for rollout in rollouts]

    base, tuned = load_run(run, max_new_tokens=8, temperature=0.0)
    assert [base(prompt) for prompt in prompts] == greedy(None)
    assert [tuned(prompt) for prompt in prompts] == greedy(str(run / "adapter"))
    assert greedy(None) != greedy(str(run / "adapter"))

    capsys.readouterr()
    main(["chat", "--run", str(run), "--prompt", "12+30=", "--max_new_tokens", "8"])
    assert "tuned" in capsys.readouterr().out
    with pytest.raises(ValueError, match="did you mean"):
        main(["chat", "--run", str(run.parent), "--prompt", "x"])


OBJECTIVES = [
    {"loss": "gspo", "clip_low": "0.1", "clip_high": "0.1", "num_iterations": "2"},
    {"loss": "cispo", "clip_high": "4", "mismatch": "token_truncate"},
    {"loss": "sapo", "beta": "0.05", "kl": "k2", "reference_every": "2"},
    {"loss": "bnpo", "mask_truncated": "true", "overlong_buffer": "4", "scale": "batch"},
    {"aggregation": "normalize_then_sum", "entropy_bonus": "0.01", "entropy_top_fraction": "0.2"},
    {"max_resamples": "2", "dual_clip": "3", "mismatch": "sequence_mask"},
]


@pytest.mark.parametrize("options", OBJECTIVES, ids="-".join)
def test_every_option_of_the_objective_trains_from_the_command_line(tropism, options):
    arguments = [f"--model.init_args.objective.{k}={v}" for k, v in options.items()]
    run = tropism(*arguments)
    steps = read(run, "steps")
    assert len(steps) == 4
    assert steps["step"].iloc[-1] > 0
    assert steps["loss"].notna().any()


def test_resume_keeps_a_refreshed_reference(tropism):
    options = ["--model.init_args.objective.beta=0.5", "--trainer.callbacks+",
               '{"class_path": "tropism_callbacks.Checkpoint", "init_args": '
               '{"every_n_rollouts": 3, "keep": 9}}']  # fmt: skip
    options.append("--model.init_args.objective.reference_every=2")
    run = tropism(*options)
    whole = read(run, "steps")["kl"].tolist()
    tropism(*options, "--ckpt_path", str(run / "checkpoints" / "rollout=000003.ckpt"))
    assert whole[2] == pytest.approx(0, abs=1e-6)  # refreshed after rollout 1
    assert whole[3] > 0
    assert read(run, "steps")["kl"].tolist() == whole
