"""The real engine on a tiny model in fp32, where it must be the trainer's policy to the last digit.

Some seconds for each engine that starts, and a quarter of a minute for vLLM itself, once.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tropism.lora.placement import Placement
from tropism.lora.plan import SitePlan
from tropism.measurements import metrics as names
from tropism.measurements.layer_names import LinearSite
from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy
from tropism.rollouts.collate import rows_of
from tropism.rollouts.engine import Sampling
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.rollouts.vllm_engine import VLLMEngine
from tropism.rollouts.weight_sync import Group, Update
from tropism.types import GenerationProgress, Prompt, Rollout

pytestmark = pytest.mark.vllm

SMALL = {"kv_cache_memory_bytes": 1 << 26}
PROMPTS = [
    Prompt(id=f"p{i}", task="t", text=text)
    for i, text in enumerate(["12+30=", "reverse: cat", "larger: 3 or 250, or is it 33?" * 2])
]
SAMPLING = Sampling(max_new_tokens=24, temperature=0.8)
ROUNDING = 2e-4  # fp32 products, summed in another order through all layers


def load(folder: Path, lora: LoRA | None = LoRA(rank=8, alpha=16), **model) -> Policy:
    torch.manual_seed(1)
    policy = load_policy(Model(name=str(folder), **{"dtype": "float32", **model}), lora)
    policy.model.eval()
    return policy


@pytest.fixture(scope="module")
def policy(wide_heads: Path) -> Policy:
    return load(wide_heads)


@pytest.fixture(scope="module")
def started(policy: Policy) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(engine_args=SMALL)
    engine.bind(policy)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def started_with_adapters(policy: Policy) -> VLLMEngine:
    engine = VLLMEngine(sync="adapter", engine_args=SMALL)
    engine.bind(policy)
    return engine


@pytest.fixture(autouse=True)
def no_adapter(policy: Policy) -> None:
    adapt(policy, lambda site: False)


@pytest.fixture(params=["merged", "adapter"])
def engine(request) -> VLLMEngine:
    name = "started" if request.param == "merged" else "started_with_adapters"
    found: VLLMEngine = request.getfixturevalue(name)
    return found


def adapt(policy: Policy, plan: Callable[[LinearSite], bool], *, seed: int = 0) -> None:
    """A large B at the chosen linears, 0 elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for site in policy.sites:
            b = policy.adapter(site).b
            drawn = torch.randn(b.shape, generator=generator) * 0.15
            b.copy_(drawn if plan(site) else torch.zeros_like(b))


def run(engine: VLLMEngine | TransformersEngine, prompts=PROMPTS, **changed) -> list[Rollout]:
    options = {"group_size": 3, "sampling": SAMPLING, "seed": 0, "rollout": 0} | changed
    return engine.generate(prompts, **options)


def tokens(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [c.token_ids for rollout in rollouts for c in rollout.completions]


@torch.no_grad()
def gap(policy: Policy, rollouts: list[Rollout], temperature: float = 0.8) -> Tensor:
    """[N] the trainer's log-probability of each token minus the engine's."""
    found, size = [], len(rollouts[0].completions)
    for i in range(len(rollouts)):
        part = rows_of(rollouts, range(i * size, (i + 1) * size), pad_token_id=policy.pad_token_id)
        logprobs, _ = policy.completion_logprobs(part, temperature=temperature)
        found.append(logprobs[part.mask])
    drawn = [c.sampler_logprobs for rollout in rollouts for c in rollout.completions]
    return torch.cat(found) - torch.cat(drawn)


def likeliest(policy: Policy) -> list[tuple[int, ...]]:
    """Greedy completions by the trainer's own engine."""
    own = TransformersEngine()
    own.bind(policy)
    return tokens(run(own, group_size=1, greedy=True))


def random_plan(site: LinearSite) -> bool:
    return int(hashlib.sha256(site.name.encode()).hexdigest(), 16) % 3 == 0


# -- sampling -------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_what_is_sampled_beside_them(started):
    together = run(started)
    assert tokens(run(started)) == tokens(together)
    alone = [completion for prompt in PROMPTS for completion in tokens(run(started, [prompt]))]
    assert alone == tokens(together)
    first = [c.token_ids for rollout in together for c in rollout.completions[:2]]
    assert tokens(run(started, group_size=2)) == first
    assert tokens(run(started, rollout=1)) != tokens(together)
    assert tokens(run(started, seed=1)) != tokens(together)


def test_completions_end_with_the_trainers_stop_tokens_or_at_the_limit(policy, started):
    rollouts = run(started, group_size=8)
    reasons = set()
    for rollout in rollouts:
        assert rollout.prompt_token_ids == policy.encode(rollout.prompt)
        for completion in rollout.completions:
            ended = completion.token_ids[-1] in policy.eos_token_ids
            assert ended == (completion.finish_reason == "stop")
            assert ended or len(completion.token_ids) == SAMPLING.max_new_tokens
            assert not set(completion.token_ids[:-1]) & policy.eos_token_ids
            assert completion.text == policy.decode(completion.token_ids)
            reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_sampled_frequencies_are_the_policys(policy, started):
    num = 2000
    rollouts = run(started, PROMPTS[:1], group_size=num, sampling=Sampling(max_new_tokens=1))
    ids = torch.tensor([rollouts[0].prompt_token_ids])
    with torch.no_grad():
        probabilities = policy.model(input_ids=ids).logits[0, -1].softmax(-1)
    drawn = torch.tensor([ids[0] for ids in tokens(rollouts)])
    counts = torch.bincount(drawn, minlength=len(probabilities)).float()
    spread = (num * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - num * probabilities).abs() <= 4.5 * spread + 1).all()


@pytest.mark.fault(18)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_ratio_of_an_unchanged_policy_is_one_at_any_temperature(policy, engine, temperature):
    adapt(policy, lambda site: True)
    rollouts = run(engine, sampling=Sampling(max_new_tokens=24, temperature=temperature))
    difference = gap(policy, rollouts, temperature)
    assert float(difference.abs().max()) < ROUNDING
    assert float(difference.exp().mean()) == pytest.approx(1.0, abs=0.02)
    other = gap(policy, rollouts, 1.0 if temperature != 1.0 else 0.6)
    assert float(other.abs().mean()) > 0.02  # what raw log-probabilities would be off by


def test_progress_reaches_the_total(started):
    seen: list[GenerationProgress] = []
    rollouts = run(started, progress=seen.append)
    assert seen[-1].done == seen[-1].total == 9
    assert seen[-1].tokens == sum(map(len, tokens(rollouts)))
    assert len(seen) > 2
    assert [p.tokens for p in seen] == sorted(p.tokens for p in seen)


def test_interrupting_leaves_nothing_behind(started):
    class Stopped(Exception):
        pass

    def stop(progress: GenerationProgress) -> None:
        raise Stopped

    expected = tokens(run(started))
    with pytest.raises(Stopped):
        run(started, progress=stop)
    assert tokens(run(started)) == expected


def test_the_trainers_random_numbers_and_threads_are_left_alone(started):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    run(started)
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_num_threads(threads)
    assert torch.get_num_threads() == threads


def begin(engine: VLLMEngine, **changed):
    options = {"group_size": 3, "sampling": SAMPLING, "seed": 0, "rollout": 0} | changed
    return engine.begin(PROMPTS, **options)


def test_what_is_begun_is_of_the_weights_of_then_and_everything_else_waits_for_it(policy, engine):
    adapt(policy, lambda site: True, seed=7)
    expected = run(engine)
    long = Sampling(max_new_tokens=200, temperature=0.8)
    threads = torch.get_num_threads()
    pending = begin(engine)
    adapt(policy, random_plan, seed=8)  # as an update would, while it draws
    engine.sync()
    assert torch.get_num_threads() == threads
    others = run(engine)
    assert float(gap(policy, others).abs().max()) < ROUNDING
    for one, other in zip(expected, pending.result(), strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        for before, after in zip(one.completions, other.completions, strict=True):
            assert before.token_ids == after.token_ids
            assert torch.equal(before.sampler_logprobs, after.sampler_logprobs)
    assert engine.metrics()[names.SYNC_MEGABYTES] == 0  # of the rollout taken last

    cancelled = begin(engine, sampling=long)
    cancelled.cancel()
    assert cancelled.has_failed
    assert tokens(run(engine)) == tokens(others)


def test_prompt_longer_than_the_context_is_refused_by_id(started):
    long = Prompt(id="long", task="t", text="1+" * 300)
    with pytest.raises(ValueError, match=r"'long' has \d+ tokens.*max_new_tokens=24"):
        run(started, [PROMPTS[0], long])


def test_metrics_tell_of_the_last_call(policy, started):
    run(started)
    run(started)
    metrics = started.metrics()
    assert metrics[names.SYNC_MEGABYTES] == 0
    assert metrics[names.PREFIX_CACHE_HITS] > 0.3  # one of three prompts fills a block of 32
    assert 0 <= metrics[names.QUEUE_SECONDS] < 5
    adapt(policy, lambda site: site.module == "o_proj")
    run(started)
    sent = sum(policy.weight(s).nbytes for s in policy.sites if s.module == "o_proj")
    assert started.metrics()[names.SYNC_MEGABYTES] == pytest.approx(sent / 1e6)
    assert started.metrics()[names.SYNC_SECONDS] > 0


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.fault(15)
@pytest.mark.fault(16)
@pytest.mark.parametrize(
    ("plan", "changed"),
    [
        (lambda site: site.module == "k_proj", {"self_attn.qkv_proj"}),
        (lambda site: site.module == "gate_proj", {"mlp.gate_up_proj"}),
        (
            lambda site: True,
            {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"},
        ),
        (random_plan, None),
    ],
    ids=["k_proj", "gate_proj", "all", "random"],
)
def test_after_any_plan_the_engine_is_the_trainer_and_not_the_base(policy, engine, plan, changed):
    run(engine)
    before, base = engine.fingerprints(), likeliest(policy)
    frozen = {name: value.clone() for name, value in policy.base.state_dict().items()}
    adapt(policy, plan)
    frozen |= {n: v.clone() for n, v in policy.base.state_dict().items() if "lora_" in n}
    rollouts = run(engine)
    assert float(gap(policy, rollouts).abs().max()) < ROUNDING
    greedy = tokens(run(engine, group_size=1, greedy=True))
    assert greedy == likeliest(policy) != base
    for name, value in policy.base.state_dict().items():
        assert torch.equal(value, frozen[name]), name
    after = engine.fingerprints()
    moved = {name.split(".", 3)[-1] for name in after if after[name] != before[name]}
    if engine.sync_by == "adapter":
        assert moved == set()  # its base is never touched
    elif changed is not None:
        assert moved == changed
        everywhere = [name for name in after if name.split(".", 3)[-1] in changed]
        assert all(after[name] != before[name] for name in everywhere)
    adapt(policy, lambda site: False)
    assert float(gap(policy, rollouts).abs().mean()) > 0.05


@pytest.mark.fault(14)
def test_twenty_syncs_and_back_leave_base_and_engine_as_they_were(policy, started):
    expected = tokens(run(started))
    before = started.fingerprints()
    base = {n: v.clone() for n, v in policy.base.state_dict().items() if "lora_" not in n}
    for step in range(20):
        adapt(policy, lambda site, step=step: (site.layer or 0) % 3 == step % 3, seed=step)
        run(started, PROMPTS[:1], group_size=1, rollout=step, sampling=Sampling(max_new_tokens=2))
        assert started.metrics()[names.SYNC_MEGABYTES] > 0
    for name, value in base.items():
        assert torch.equal(policy.base.state_dict()[name], value), name
    adapt(policy, lambda site: False)
    assert tokens(run(started)) == expected
    assert started.fingerprints() == before


@pytest.mark.fault(19)
def test_a_prompt_seen_before_an_update_is_computed_anew_after_it(policy, engine):
    """As without any cache, that is: what the trainer's own forward says."""
    prompt = [PROMPTS[2]]
    run(engine, prompt)
    run(engine, prompt)
    assert engine.metrics()[names.PREFIX_CACHE_HITS] > 0.5
    adapt(policy, lambda site: site.module == "v_proj", seed=5)
    rollouts = run(engine, prompt, group_size=1)
    assert engine.metrics()[names.PREFIX_CACHE_HITS] == 0
    assert float(gap(policy, rollouts).abs().max()) < ROUNDING


@pytest.mark.fault(20)
def test_validating_twice_without_a_step_between_gives_the_same(policy, engine):
    adapt(policy, lambda site: True)
    first = run(engine, group_size=1, greedy=True)
    assert tokens(run(engine, group_size=1, greedy=True)) == tokens(first) == likeliest(policy)
    assert engine.metrics()[names.SYNC_MEGABYTES] == 0


@pytest.mark.gpu
@pytest.mark.fault(20)
@pytest.mark.parametrize("level", [1, 2])
def test_after_any_sleep_the_weights_are_the_trainers(wide_heads, level):
    policy = load(wide_heads)
    policy.model.to("cuda")
    engine = VLLMEngine(sleep_level=level, engine_args={"gpu_memory_utilization": 0.2})
    engine.bind(policy)
    adapt(policy, lambda site: True)
    first = run(engine, group_size=1, greedy=True)
    assert tokens(run(engine, group_size=1, greedy=True)) == tokens(first) == likeliest(policy)
    assert float(gap(policy, run(engine)).abs().mean()) < 5e-3
    engine.close()


def test_a_linear_turned_off_is_the_base_again_and_one_kept_stays(policy, engine):
    placement = Placement(policy.sites, policy.lora_layer, max_rank=8)
    training = placement.plan
    adapt(policy, lambda site: site.module in ("k_proj", "down_proj"))
    run(engine)
    with torch.no_grad():
        for site in policy.sites:
            if site.module == "k_proj":
                policy.adapter(site).b.zero_()  # as the control does that cuts ranks off
    states = {"k_proj": "OFF", "down_proj": "KEEP"}
    placement.apply(
        tuple(
            SitePlan(e.layer, e.module, states[e.module], 0) if e.module in states else e
            for e in training
        ),
        None,
    )
    rollouts = run(engine)
    assert engine.metrics()[names.SYNC_MEGABYTES] > 0
    assert float(gap(policy, rollouts).abs().max()) < ROUNDING
    adapt(policy, lambda site: False)
    assert float(gap(policy, rollouts).abs().mean()) > 0.02  # down_proj took part
    placement.apply(training, None)


@pytest.mark.fault(15)
def test_the_first_rollout_is_of_the_adapter_that_the_run_starts_from(
    policy, wide_heads, tmp_path, started
):
    adapt(policy, lambda site: site.module in ("q_proj", "up_proj"), seed=3)
    policy.export(tmp_path)
    second = load(wide_heads, adapter=str(tmp_path / "adapter"))
    engine = VLLMEngine(engine_args=SMALL)
    engine.bind(second)
    rollouts = run(engine)
    assert float(gap(second, rollouts).abs().max()) < ROUNDING
    assert tokens(run(engine, group_size=1, greedy=True)) == likeliest(second)
    adapt(policy, lambda site: False)
    assert float(gap(policy, rollouts).abs().mean()) > 0.05


@pytest.mark.fault(15)
def test_full_parameter_updates_arrive_whole_also_into_an_engine_that_loaded_nothing(wide_heads):
    policy = load(wide_heads, None)
    plain = VLLMEngine(sync="adapter", engine_args=SMALL)  # of which there is none
    empty = VLLMEngine(engine_args={**SMALL, "load_format": "dummy"})
    for engine in (plain, empty):
        engine.bind(policy)
        assert float(gap(policy, run(engine)).abs().max()) < ROUNDING
    assert plain.fingerprints() == empty.fingerprints()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.base.parameters():
            scale = 0.1 * parameter.std() if parameter.ndim > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    for engine in (plain, empty):
        engine.sync()
        assert float(gap(policy, run(engine)).abs().max()) < ROUNDING
    expected = tokens(run(plain))
    pending = begin(plain)
    with torch.no_grad():
        for parameter in policy.base.parameters():
            parameter.zero_()
    assert tokens(pending.result()) == expected  # none of its weights is the trainer's own tensor


@pytest.mark.fault(16)
def test_biases_of_a_group_arrive_with_it(wide_heads, tmp_path):
    """Qwen's q, k and v have biases, which vLLM keeps beside the packed weight."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=112,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        initializer_range=0.08,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    folder = shutil.copytree(wide_heads, tmp_path / "biases")  # for its tokenizer
    model.save_pretrained(folder)
    policy = load(folder)
    engine = VLLMEngine(engine_args=SMALL)
    engine.bind(policy)
    run(engine)
    adapt(policy, lambda site: site.module == "k_proj")
    assert float(gap(policy, run(engine)).abs().max()) < ROUNDING


# -- faults that end an engine; others of the process start anew after them ------------------------


@pytest.mark.fault(17)
def test_a_name_that_vllm_does_not_know_raises(policy, started, monkeypatch):
    adapt(policy, lambda site: True, seed=17)  # no test before has sent these
    weights = (started._delivery or started._start(policy))._weights
    tensors = weights.tensors

    def renamed(update: Update) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors(update):
            yield name.replace("model.layers", "transformer.layers"), tensor

    monkeypatch.setattr(weights, "tensors", renamed)
    with pytest.raises(ValueError, match=r"transformer"):
        run(started)
    monkeypatch.undo()
    assert started.fingerprints() == {}  # it is not used again
    assert float(gap(policy, run(started)).abs().max()) < ROUNDING


@pytest.mark.fault(16)
def test_half_a_group_raises_before_anything_is_sent(policy, started):
    run(started)
    delivery = started._delivery
    group = next(g for g in delivery._weights.groups if g.name.endswith("qkv_proj"))
    before = started.fingerprints()
    half = Update((Group(group.name, group.sites[1:2]),), (), {group.sites[1].name: None})
    with pytest.raises(RuntimeError, match=r"qkv_proj' without"):
        delivery._send(half)
    assert started.fingerprints() == before


@pytest.mark.fault(17)
def test_an_adapter_that_vllm_drops_is_found_out(policy, started_with_adapters, monkeypatch):
    """A wrong prefix in the file: vLLM finds no module for it, and says nothing (vllm#34186)."""
    from tropism.lora import export

    run(started_with_adapters)
    adapt(policy, lambda site: True)
    monkeypatch.setattr(export, "PREFIX", "base_model.model.wrapped.")
    with pytest.raises((RuntimeError, ValueError)):
        run(started_with_adapters)
    monkeypatch.undo()
    assert float(gap(policy, run(started_with_adapters)).abs().max()) < ROUNDING
