"""The same weights in several lights, on the organism (fp32)."""

import hashlib

import pytest
import torch

from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy
from tropism.rollouts.collate import training_batches
from tropism.types import Completion, MicroBatch, Pack, Prompt, Rollout

LORA = LoRA(rank=4, alpha=8)
MODEL = Model(name="organism", dtype="float32")
TEXT = "12+30="


def randomise(policy: Policy, scale: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for site in policy.sites:
            adapter = policy.adapter(site)
            if adapter is not None:
                adapter.b.copy_(torch.randn(adapter.b.shape, generator=generator) * scale)


def logits(policy: Policy) -> torch.Tensor:
    ids = torch.tensor([policy.tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        return policy.model(input_ids=ids, use_cache=False).logits


def base_hash(policy: Policy) -> str:
    digest = hashlib.sha256()
    for site in policy.sites:
        digest.update(policy.linear(site).weight.detach().numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    loaded = load_policy(MODEL, LORA)
    randomise(loaded)
    return loaded


@pytest.fixture(scope="module")
def base_logits() -> torch.Tensor:
    return logits(load_policy(MODEL, None))


def test_every_linear_carries_lora_and_only_lora_trains(policy):
    assert len(policy.sites) == 12 * 7
    assert {site.module for site in policy.sites} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    names = set(policy.named_trainable())
    assert len(names) == 2 * len(policy.sites)
    assert names == {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert policy.num_trainable() == sum(
        policy.adapter(site).a.numel() + policy.adapter(site).b.numel() for site in policy.sites
    )


def test_merged_equals_unmerged_and_base_is_untouched(policy, base_logits):
    unmerged, before = logits(policy), base_hash(policy)
    assert (unmerged - base_logits).abs().max() > 0.1
    for _ in range(20):
        with policy.merged():
            torch.testing.assert_close(logits(policy), unmerged, rtol=1e-4, atol=1e-4)
            assert base_hash(policy) != before
    assert base_hash(policy) == before
    torch.testing.assert_close(logits(policy), unmerged, rtol=0, atol=0)


def test_merged_gives_the_base_back_after_an_exception(policy):
    before = base_hash(policy)
    with pytest.raises(RuntimeError, match="sampler"), policy.merged():
        raise RuntimeError("sampler")
    assert base_hash(policy) == before


@pytest.mark.fault(21)
def test_starting_policy_is_the_base_and_trainability_does_not_move(policy, base_logits):
    trainable = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    tuned = logits(policy)
    with policy.reference():
        torch.testing.assert_close(logits(policy), base_logits, rtol=0, atol=0)
    torch.testing.assert_close(logits(policy), tuned, rtol=0, atol=0)
    assert trainable == {n for n, p in policy.model.named_parameters() if p.requires_grad}


def test_starting_policy_of_a_run_from_an_adapter_is_that_adapter(policy, tmp_path):
    tuned = logits(policy)
    folder = policy.export(tmp_path)
    again = load_policy(
        Model(name="organism", dtype="float32", adapter=str(folder)), LoRA(rank=8, alpha=8)
    )
    torch.testing.assert_close(logits(again), tuned, rtol=1e-5, atol=1e-5)
    start = logits(again)
    randomise(again, scale=0.2)
    assert (logits(again) - start).abs().max() > 0.1
    with again.reference():
        torch.testing.assert_close(logits(again), start, rtol=0, atol=0)


def test_starting_policy_of_full_parameter_training(base_logits):
    policy = load_policy(MODEL, None)
    assert set(policy.named_trainable()) == {n for n, _ in policy.model.named_parameters()}
    policy.keep_reference()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    assert (logits(policy) - base_logits).abs().max() > 0.1
    with policy.reference():
        torch.testing.assert_close(logits(policy), base_logits, rtol=0, atol=0)


def test_a_refreshed_reference_is_the_policy_of_that_moment(policy):
    policy.keep_reference()
    kept, state = logits(policy), policy.reference_state()
    randomise(policy, scale=0.3)
    assert (logits(policy) - kept).abs().max() > 0.1
    with policy.reference():
        torch.testing.assert_close(logits(policy), kept, rtol=0, atol=0)
    resumed = load_policy(MODEL, LORA)
    resumed.load_reference_state(state)
    with resumed.reference():
        torch.testing.assert_close(logits(resumed), kept, rtol=0, atol=0)


def batch_of(policy: Policy, texts: list[str], *, can_pack: bool = False) -> MicroBatch | Pack:
    prompt = Prompt(id="p", task="t", text=TEXT)
    encode = policy.tokenizer.backend_tokenizer.encode
    completions = tuple(
        Completion(tuple(encode(text).ids), text, torch.zeros(0), "stop") for text in texts
    )
    rollout = Rollout(prompt, policy.encode(prompt), completions)
    (part,) = training_batches(
        [rollout],
        keep=torch.ones(len(texts), dtype=torch.bool),
        max_tokens=10_000,
        pad_token_id=policy.pad_token_id,
        can_pack=can_pack,
    )
    return part


def test_completion_logprobs_equal_a_plain_forward_one_by_one(policy):
    part = batch_of(policy, ["42", "7", "the answer is 42"])
    logprobs, entropy = policy.completion_logprobs(part, temperature=0.7)
    prompt = part.prompt.tolist()
    for i in range(3):
        n = int(part.mask[i].sum())
        tokens = part.targets[i, :n]
        whole = torch.tensor([[*prompt, *tokens.tolist()]])
        scores = policy.model(input_ids=whole).logits[0, len(prompt) - 1 : -1] / 0.7
        distribution = torch.distributions.Categorical(logits=scores)
        torch.testing.assert_close(
            logprobs[i, :n], distribution.log_prob(tokens), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(entropy[i, :n], distribution.entropy(), rtol=1e-4, atol=1e-4)
        assert (logprobs[i, n:] == 0).all()


@pytest.mark.parametrize("texts", [["42", "7", "the answer is 42"], ["4", "7"]])
def test_sharing_the_prompt_changes_neither_logprobs_nor_gradients(policy, texts):
    results = []
    for part in (batch_of(policy, texts), batch_of(policy, texts, can_pack=True)):
        weights = torch.randn(part.mask.shape, generator=torch.Generator().manual_seed(0))
        policy.model.zero_grad()
        logprobs, _ = policy.completion_logprobs(part, temperature=1.0)
        (logprobs * weights).sum().backward()
        gradients = [p.grad.clone() for p in policy.named_trainable().values()]
        results.append((logprobs.detach(), gradients))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=2e-5)


@pytest.mark.fault(22)
@pytest.mark.parametrize("can_pack", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(policy, can_pack):
    part = batch_of(policy, ["42", "the answer is 42"], can_pack=can_pack)
    results = []
    for should_checkpoint in (False, True):
        if should_checkpoint:
            policy.base.gradient_checkpointing_enable({"use_reentrant": False})
        policy.model.zero_grad()
        policy.completion_logprobs(part, temperature=1.0)[0].sum().backward()
        results.append([p.grad.clone() for p in policy.named_trainable().values()])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.fault(13)
def test_prompts_hold_bos_exactly_once(policy):
    from tokenizers.processors import TemplateProcessing

    tokenizer = policy.tokenizer
    bos = tokenizer.bos_token_id
    # As Llama's and Gemma's tokenizers do: BOS is added to whatever is encoded.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, bos)]
    )
    chat = policy.encode(Prompt(id="c", task="t", messages=({"role": "user", "content": "1+1="},)))
    raw = policy.encode(Prompt(id="r", task="t", text="1+1="))
    doubled = policy.encode(Prompt(id="d", task="t", text=tokenizer.bos_token + "1+1="))
    for ids in (chat, raw, doubled):
        assert ids[0] == bos
        assert ids.count(bos) == 1
