"""Causal tracing: a planted circuit is found, and only suffixes run without changing anything."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tropism.measurements.causal_tracing import (
    Restoration,
    TracedFact,
    Tracing,
    draw_noise,
)
from tropism.measurements.facts import Fact, TokenizedFact, tokenize
from tropism.measurements.traced_decoder import TracedDecoder, part_name, subject_deviation
from tropism.measurements.traced_effects import KINDS


def fact_of(ids, start, end, answer_id):
    texts = tuple(map(str, ids))
    return TokenizedFact(Fact("p", "s", "a"), tuple(ids), start, end, answer_id, 1, texts)


def decoder_of(model):
    return TracedDecoder(model.eval(), model.get_output_embeddings())


# -- a planted circuit --------------------------------------------------------------------------

WIDTH, NUM_LAYERS, MLP_LAYER, ATTENTION_LAYER = 16, 4, 1, 2
# One feature for each token, then what the MLP knows of the two subjects, then what was moved.
THE, FILLER, ONE, OTHER, IS, ANSWER, OTHER_ANSWER = range(7)
KNOWN, OTHER_KNOWN, MOVED, OTHER_MOVED = 8, 9, 10, 11


def planted_decoder():
    """The MLP of layer 1 knows the answer to each subject, attention of layer 2 brings it over."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=WIDTH, intermediate_size=2, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=1, num_key_value_heads=1, head_dim=WIDTH, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.model.embed_tokens.weight[:, :8] = torch.eye(8)
        mlp = model.model.layers[MLP_LAYER].mlp
        for row, (subject, known) in enumerate([(ONE, KNOWN), (OTHER, OTHER_KNOWN)]):
            mlp.gate_proj.weight[row, subject] = mlp.up_proj.weight[row, subject] = 1.0
            mlp.down_proj.weight[known, row] = 1.0
        attention = model.model.layers[ATTENTION_LAYER].self_attn
        slow = WIDTH // 2 - 1  # its rotary angle is too small to matter
        attention.q_proj.weight[slow, IS] = 10.0
        attention.k_proj.weight[slow, [KNOWN, OTHER_KNOWN]] = 10.0
        for known, moved in [(KNOWN, MOVED), (OTHER_KNOWN, OTHER_MOVED)]:
            attention.v_proj.weight[known, known] = 1.0
            attention.o_proj.weight[moved, known] = 4.0
        model.lm_head.weight[ANSWER, MOVED] = model.lm_head.weight[OTHER_ANSWER, OTHER_MOVED] = 4.0
    return decoder_of(model)


def planted_fact():
    """Noise that makes the other subject of the last token of `filler one`."""
    noise = torch.zeros(3, 2, WIDTH)
    noise[:, 1, ONE], noise[:, 1, OTHER] = -1.0, 1.0
    fact = fact_of([THE, FILLER, ONE, FILLER, IS], 1, 3, ANSWER)
    return TracedFact(planted_decoder(), fact, noise, max_tokens=4096)


def test_a_planted_circuit_is_found_at_its_layer_and_token():
    traced = planted_fact()
    assert traced.is_known
    assert traced.clean > 0.9
    assert traced.corrupted < 0.01
    total = traced.clean - traced.corrupted
    last_subject, last = 1, 3  # of the traced tokens: filler, one, filler, is
    expected = {kind: np.zeros((NUM_LAYERS, 4)) for kind in KINDS}
    expected["state"][:ATTENTION_LAYER, last_subject] = total
    expected["state"][ATTENTION_LAYER:, last] = total
    expected["attention"][ATTENTION_LAYER, last] = total
    for kind in ("state", "attention"):
        assert traced.effects(kind, window=1) == pytest.approx(expected[kind], abs=1e-5), kind
    # Behind the restored MLP the other subject's own features are still there, and change norms.
    mlp = np.array(traced.effects("mlp", window=1))
    assert mlp[MLP_LAYER, last_subject] > 0.9 * total
    mlp[MLP_LAYER, last_subject] = 0.0
    assert mlp == pytest.approx(expected["mlp"], abs=1e-5)


def test_windows_lie_about_their_layer():
    traced = planted_fact()
    found = np.array(traced.effects("attention", window=3))[:, 3] > 0.5
    assert found.tolist() == [False, True, True, True]
    found = np.array(traced.effects("attention", window=2))[:, 3] > 0.5  # of l - 1 and l
    assert found.tolist() == [False, False, True, True]


def test_restoring_everything_recovers_the_clean_probability():
    traced = planted_fact()
    tokens = tuple(range(1, 5))
    everything = [Restoration("state", range(i, i + 1), tokens) for i in range(NUM_LAYERS)]
    assert traced.restored(everything) == pytest.approx([traced.clean] * NUM_LAYERS, abs=1e-6)


# -- real models, against recomputing everything -------------------------------------------------


def naive_effects(decoder, fact, noise, kind, window):
    """The protocol as the paper tells it: all of the model, for each layer and token."""

    def run(patched, at):
        def corrupt(_, __, output):
            output = output.clone()
            output[1:, fact.start : fact.end] += noise
            return output

        def restore(_, __, output):
            found = (output[0] if isinstance(output, tuple) else output).clone()
            found[1:, at] = found[0, at]
            return (found, *output[1:]) if isinstance(output, tuple) else found

        with torch.no_grad(), ExitStack() as stack:
            handles = [decoder.embedding.register_forward_hook(corrupt)]
            handles += [module.register_forward_hook(restore) for module in patched]
            for handle in handles:
                stack.callback(handle.remove)
            logits = decoder.head(decoder.final_states(fact.ids, 1 + len(noise)))
        return float(logits.softmax(dim=-1)[1:, fact.answer_id].mean())

    modules = decoder.layers if kind == "state" else decoder.parts[kind]
    size = 1 if kind == "state" else window
    low, high = size // 2, size - size // 2
    corrupted = run([], 0)
    return [
        [run(modules[max(0, i - low) : i + high], at) - corrupted for at in fact.traced]
        for i in range(len(modules))
    ]


@pytest.fixture(scope="module")
def organism_decoder():
    from tropism.models import LoRA, Model, load_policy

    policy = load_policy(Model("organism", dtype="float32"), LoRA(rank=4, alpha=8))
    policy.model.eval()
    prompt = "<bos><|user|>sort dca<|end|><|assistant|>"
    [fact] = tokenize([Fact(prompt, "dca", "a")], policy.tokenizer)
    return TracedDecoder(policy.base, policy.head), fact


def random_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return decoder_of(LlamaForCausalLM(config)), fact_of([3, 7, 8, 9, 4, 5, 11], 1, 4, 17)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "organism"])
def test_suffixes_give_what_whole_passes_give(name, kind, organism_decoder):
    decoder, fact = random_llama() if name == "llama" else organism_decoder
    shape = (4, fact.end - fact.start, len(decoder.embed([0])[0]))
    noise = draw_noise(fact.fact, shape, deviation=0.5, seed=1)
    expected = np.array(naive_effects(decoder, fact, noise, kind, window=4))
    assert np.abs(expected).max() > 1e-3
    for max_tokens in (1, 10_000):
        found = TracedFact(decoder, fact, noise, max_tokens=max_tokens).effects(kind, window=4)
        assert found == pytest.approx(expected, abs=1e-5)


def test_nothing_below_the_restored_layer_runs(organism_decoder):
    decoder, fact = organism_decoder
    noise = torch.ones(2, fact.end - fact.start, len(decoder.embed([0])[0]))
    traced = TracedFact(decoder, fact, noise, max_tokens=10_000)
    ran = []
    hooks = [
        module.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
        for layer, module in enumerate(decoder.parts["mlp"])
    ]
    last = len(hooks) - 1
    for kind, layers, expected in [
        ("state", range(last - 2, last - 1), [last - 1, last]),
        ("mlp", range(last - 1, last + 1), [last - 1, last]),
        ("state", range(last, last + 1), []),
    ]:
        ran.clear()
        traced.restored([Restoration(kind, layers, (fact.end,))])
        assert ran == expected
    for hook in hooks:
        hook.remove()


# -- noise ---------------------------------------------------------------------------------------


def test_noise_is_keyed_by_fact_and_seed_and_has_its_deviation():
    fact, other = Fact("a b c", "b", "d"), Fact("a b e", "b", "d")
    shape = (10, 3, 400)
    noise = draw_noise(fact, shape, deviation=0.3, seed=0)
    assert torch.equal(noise, draw_noise(fact, shape, deviation=0.3, seed=0))
    assert not torch.equal(noise, draw_noise(fact, shape, deviation=0.3, seed=1))
    assert not torch.equal(noise, draw_noise(other, shape, deviation=0.3, seed=0))
    assert float(noise.std()) == pytest.approx(0.3, rel=0.03)


def test_deviation_is_over_the_subjects_of_all_facts():
    decoder = planted_decoder()
    facts = [fact_of([THE, ONE, IS], 1, 2, ANSWER), fact_of([OTHER, FILLER, IS], 0, 2, ANSWER)]
    values = np.concatenate([np.eye(8, WIDTH)[i] for i in (ONE, OTHER, FILLER)])
    assert subject_deviation(decoder, facts) == pytest.approx(values.std(ddof=1))


def test_settings_and_models_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match=r"tracing\.noise=0: give more than 0"):
        Tracing(noise=0)
    with pytest.raises(ValueError, match=r"tracing\.window=0"):
        Tracing(window=0)
    with pytest.raises(ValueError, match="one mlp called"):
        part_name(torch.nn.ModuleDict({"self_attn": torch.nn.Identity()}), "mlp")
