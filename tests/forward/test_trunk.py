"""Forwards that end below a layer or start there; for each family see test_families."""

import pytest
import torch
from torch import nn

from tropism.forward.trunk import Trunk, kept_at, layers_of, started_from
from tropism.models import LoRA, Model, load_policy
from tropism.rollouts.collate import micro_batches, packs
from tropism.types import Completion, Prompt, Rollout


class AddAndCount(nn.Module):
    def __init__(self, amount):
        super().__init__()
        self.amount, self.num_runs = amount, 0

    def forward(self, hidden_states, mask=None):
        self.num_runs += 1
        return hidden_states + self.amount


@pytest.fixture
def layers():
    return [AddAndCount(10**i) for i in range(4)]


def run(layers, hidden):
    for layer in layers:
        hidden = layer(hidden, mask=None)
    return hidden


def num_runs(layers):
    return [layer.num_runs for layer in layers]


@pytest.mark.parametrize(
    ("depth", "kept", "below"),
    [(1, 1, [1, 0, 0, 0]), (2, 11, [1, 1, 0, 0]), (3, 111, [1, 1, 1, 0])],
)
def test_layers_below_run_once_and_those_above_each_time(layers, depth, kept, below):
    start = torch.zeros(1, requires_grad=True)
    with kept_at(layers, depth) as found:
        run(layers, start)
    (hidden,) = found
    assert hidden.item() == kept
    assert not hidden.requires_grad
    assert num_runs(layers) == below
    for _ in range(2):
        with started_from(layers, Trunk(depth, hidden)):
            assert run(layers, torch.full((1,), torch.nan)).item() == 1111
    assert num_runs(layers) == [one or 2 for one in below]
    with started_from(layers, None):
        assert run(layers, torch.zeros(1)).item() == 1111
    assert num_runs(layers) == [one + 1 for one in [one or 2 for one in below]]


@pytest.mark.parametrize("enter", [kept_at, lambda layers, d: started_from(layers, Trunk(d, None))])
def test_layers_are_back_after_an_exception(layers, enter):
    with pytest.raises(RuntimeError, match="on purpose"), enter(layers, 2):
        fail(*[layer.forward for layer in layers if "forward" in vars(layer)])
    assert not any("forward" in vars(layer) for layer in layers)
    assert run(layers, torch.zeros(1)).item() == 1111


class Decoder(nn.Module):
    def __init__(self, num_layers, *lists):
        super().__init__()
        self.lists = nn.ModuleDict({str(i): nn.ModuleList(part) for i, part in enumerate(lists)})
        self.num_layers = num_layers
        self.config = self

    def get_text_config(self):
        return self

    @property
    def num_hidden_layers(self):
        return self.num_layers


def test_the_layers_are_the_one_list_of_their_number(layers):
    two, four = layers[:2], layers
    assert layers_of(Decoder(4, two, four)) == four
    for decoder, number in ((Decoder(3, two, four), 0), (Decoder(2, two, two), 2)):
        with pytest.raises(ValueError, match=f"Decoder has {number} lists"):
            layers_of(decoder)


# -- on the organism ------------------------------------------------------------------------------

DEPTH = 9


@pytest.fixture
def policy():
    torch.manual_seed(0)
    loaded = load_policy(Model(name="organism", dtype="float32"), LoRA(rank=4, alpha=8))
    for site in loaded.sites:
        adapter = loaded.adapter(site)
        nn.init.normal_(adapter.b, std=0.05)
        for factor in (adapter.a, adapter.b):
            factor.requires_grad_(site.layer >= DEPTH)
    return loaded


def part_of(policy, cut):
    completions = tuple(
        Completion(ids, "", torch.zeros(0), "stop") for ids in [(5, 6, 7), (8,), (9, 10)]
    )
    rollout = Rollout(Prompt(id="p", task="t", text="x"), (11, 12, 13, 14), completions)
    keep = torch.ones(3, dtype=torch.bool)
    (part,) = cut([rollout], keep=keep, max_tokens=1000, pad_token_id=policy.pad_token_id)
    return part


def test_nothing_to_share(policy):
    assert policy.trunk(part_of(policy, packs), 0) is None
    assert policy.trunk(part_of(policy, micro_batches), DEPTH) is None


@pytest.mark.parametrize("should_checkpoint", [False, True])
def test_a_backward_after_the_layers_are_back(policy, should_checkpoint):
    """Checkpointed layers run again in the backward, where those below are themselves again."""
    if should_checkpoint:
        policy.base.gradient_checkpointing_enable({"use_reentrant": False})
    part, results = part_of(policy, packs), []
    trunk = policy.trunk(part, DEPTH)
    assert trunk.depth == DEPTH
    assert trunk.hidden.shape == (1, len(part.input_ids), policy.base.config.hidden_size)
    for start in (None, trunk):
        policy.model.zero_grad()
        logprobs, entropy = policy.completion_logprobs(part, temperature=0.7, trunk=start)
        logprobs.sum().backward()
        gradients = [p.grad for p in policy.named_trainable().values() if p.requires_grad]
        results.append((logprobs.detach(), entropy, gradients))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert all(gradient.any() for gradient in results[0][2])


def test_a_failing_forward_leaves_the_model_whole(policy, monkeypatch):
    part = part_of(policy, packs)
    with torch.no_grad():
        before, _ = policy.completion_logprobs(part, temperature=1.0)
        trunk = policy.trunk(part, DEPTH)
        for attempt in (
            lambda: policy.trunk(part, DEPTH),
            lambda: policy.completion_logprobs(part, temperature=1.0, trunk=trunk),
        ):
            # The norm behind the last layer: both kinds of forward come to it.
            handle = policy.base.get_decoder().norm.register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                attempt()
            handle.remove()
            after, _ = policy.completion_logprobs(part, temperature=1.0)
            assert torch.equal(before, after)


def fail(*given):
    assert given
    raise RuntimeError("on purpose")
