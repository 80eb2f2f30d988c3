"""SFT as the matched control: the same cross-entropy as anyone's, on the completion alone."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy
from tropism.rewards import Rewards
from tropism.sft import SFT
from tropism.tasks.skills import Skills
from tropism.traces import Gold, TraceContext

IGNORED = -100
TASK = Skills()
PROMPTS = list(TASK.prompts("train", 7, seed=0))


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    return load_policy(Model(name="organism", dtype="float32"), LoRA(rank=4, alpha=4))


def module_with(policy: Policy, **settings) -> SFT:
    module = SFT(**settings)
    module.policy, module.network = policy, policy.model
    module.tasks = {TASK.name: TASK}
    module.rewards = Rewards(None, module.tasks)
    context = TraceContext(policy, module.engine, module.tasks, seed=0)
    module._traces = Gold().collect(PROMPTS, context)
    module.manual_backward = lambda loss: loss.backward()
    return module


def sequence(policy: Policy, prompt) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels as Hugging Face's own loss takes them."""
    asked = policy.encode(prompt)
    answer = policy.encode_completion(prompt, prompt.columns["answer"])
    ids = torch.tensor([[*asked, *answer]])
    labels = torch.tensor([[*[IGNORED] * len(asked), *answer]])
    return ids, labels


@pytest.mark.parametrize("normalization", ["tokens", "sequences"])
@pytest.mark.parametrize("max_tokens", [24, 2048])
def test_loss_and_gradient_are_those_of_cross_entropy_on_the_completions(
    policy, normalization, max_tokens
):
    module = module_with(policy, normalization=normalization, max_tokens_per_microbatch=max_tokens)
    batch = module._demonstrate(PROMPTS)
    sums = module._accumulate_gradients(batch)
    found = {name: p.grad.clone() for name, p in policy.named_trainable().items()}

    policy.model.zero_grad()
    losses, counts = [], []
    for prompt in PROMPTS:
        ids, labels = sequence(policy, prompt)
        logits = policy.model(input_ids=ids).logits[:, :-1]
        losses.append(
            cross_entropy(logits[0], labels[0, 1:], ignore_index=IGNORED, reduction="sum")
        )
        counts.append(int((labels != IGNORED).sum()))
    if normalization == "tokens":
        expected = torch.stack(losses).sum() / sum(counts)
    else:
        expected = torch.stack([x / n for x, n in zip(losses, counts, strict=True)]).mean()
    expected.backward()
    assert sums.loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert sums.tokens == sum(counts)
    for name, parameter in policy.named_trainable().items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_every_answer_ends_with_a_learnt_eos(policy):
    for prompt in PROMPTS:
        ids = policy.encode_completion(prompt, prompt.columns["answer"])
        assert ids[-1] in policy.eos_token_ids
        assert policy.decode(ids) == prompt.columns["answer"]
        assert not set(ids[:-1]) & policy.eos_token_ids


def test_a_prompt_with_several_traces_gives_different_ones(policy):
    module = module_with(policy, group_size=2)
    prompt = PROMPTS[0]
    only = module._traces[prompt.id][0]
    assert module._choose(prompt) == [only, only]
    others = [type(only)(str(i), (5 + i, 3)) for i in range(4)]
    module._traces[prompt.id] = others
    drawn = [module._choose(prompt) for module.rollout in range(20)]
    assert all(len({trace.text for trace in traces}) == 2 for traces in drawn)
    assert {trace.text for traces in drawn for trace in traces} == {"0", "1", "2", "3"}
    assert module._choose(prompt) == drawn[-1]  # keyed by rollout and prompt


def test_fit_learns_the_answers_and_grpo_starts_from_it(tropism_sft, tropism, tmp_path):
    from tropism.measurements.records import read

    run = tropism_sft()
    steps = read(run, "steps")
    assert steps["loss"].iloc[-1] < steps["loss"].iloc[0]
    assert steps["step"].tolist() == [1, 2, 3, 4]
    assert steps["reward_std"].isna().all()
    assert (read(run, "rewards")["mean"] == 1).all()  # gold answers are right
    assert (read(run, "update_norms")["update_norm"] >= 0).all()
    rows = [json.loads(line) for line in (run / "traces.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    after = read(run, "evals")["value"].iloc[-1]

    second = tropism("--model.init_args.model.adapter", str(run))
    assert read(second, "evals")["value"].iloc[0] == after


def test_sampled_traces_pass_and_a_resumed_run_keeps_them(tropism_sft):
    from tropism.measurements.records import read

    settings = (
        "--model.init_args.traces",
        '{"class_path": "tropism.traces.Sampled", "init_args": {"num_samples": 8}}',
        "--trainer.callbacks+",
        '{"class_path": "tropism_callbacks.Checkpoint", "init_args": {"every_n_rollouts": 2}}',
    )
    run = tropism_sft(*settings)
    rows = [json.loads(line) for line in (run / "traces.jsonl").read_text().splitlines()]
    task = Skills()
    prompts = {prompt.id: prompt for prompt in task.prompts("train", 16, seed=0)}
    scores = [task.score(prompts[row["prompt_id"]], row["completion"]) for row in rows]
    assert [score["accuracy"] for score in scores] == [1.0] * len(rows)
    whole = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    losses = read(run, "steps")["loss"].tolist()

    checkpoint = ("--ckpt_path", str(run / "checkpoints" / "rollout=000002.ckpt"))
    tropism_sft(*settings, *checkpoint)
    again = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert read(run, "steps")["loss"].tolist() == losses
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    (run / "traces.jsonl").unlink()
    with pytest.raises(ValueError, match="sampled from the policy before training"):
        tropism_sft(*settings, *checkpoint)
