"""Runs a suite: every model answers every benchmark once, and what was answered is kept.

1. one network is loaded, and each model's weights are shown in it in turn;
2. samples are keyed by (seed, prompt, sample), so that all models draw the same random numbers and
   an answer does not depend on what is asked beside it, or on a stop in between;
3. what the sample table has already is not asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from tropism.evaluation.benchmarks import Job
from tropism.evaluation.contestants import Contestant
from tropism.evaluation.likelihood import option_logprobs
from tropism.evaluation.samples import Row, SampleTable, digest, job_key
from tropism.policy import Policy
from tropism.rollouts.engine import RolloutEngine
from tropism.rollouts.transformers_engine import check_context
from tropism.scoring import score_rollouts
from tropism.tasks.optional import Votable
from tropism.types import Prompt

LIKELIHOOD, LIKELIHOOD_PER_TOKEN = "likelihood", "likelihood_per_token"
"""Whether the gold option is the likeliest, by the sum of its tokens' log-probabilities or by their
mean; the first favours short options, the second does not."""


@dataclass(frozen=True)
class Answered:
    """A job done by a model: the rows of its prompts, in the order of ``job.prompts``."""

    contestant: Contestant
    job: Job
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Progress:
    """Sent while a suite runs: ``done`` of ``total`` prompts of this job have their answers."""

    contestant: Contestant
    job: Job
    done: int
    total: int


def run_suite(
    contestants: Sequence[Contestant],
    jobs: Sequence[Job],
    *,
    policy: Policy,
    engine: RolloutEngine,
    table: SampleTable,
    model: Mapping[str, Any],
    seed: int,
    batch_size: int,
    progress: Callable[[Progress], None],
) -> Iterator[Answered]:
    """Each job of each model, as soon as it is done.

    Args:
        contestants: Models whose weights fit the policy's network.
        policy: Without adapters; as before when all is done.
        engine: Bound to ``policy``.
        model: What the network's own weights are, for the keys of the rows.
        seed: Of the samples.
        batch_size: Prompts asked at a time.

    Raises:
        ValueError: A prompt and the completion limit do not fit into the model's context, or
            weights do not fit the network.
    """
    for job in jobs:
        if job.mode != "likelihood":
            encoded = [policy.encode(prompt) for prompt in job.prompts]
            check_context(job.prompts, encoded, job.sampling, policy.context_length)
    for contestant in contestants:
        weights = {**model, "tuned": contestant.fingerprint()}
        keys = [job_key(job, model=weights, engine=engine, seed=seed) for job in jobs]
        missing = [
            [prompt for prompt in job.prompts if table.get(key, prompt) is None]
            for job, key in zip(jobs, keys, strict=True)
        ]
        with contestant.shown(policy) if any(missing) else nullcontext():
            engine.sync()
            for job, key, prompts in zip(jobs, keys, missing, strict=True):
                total = len(job.prompts)
                for start in range(0, len(prompts), batch_size):
                    progress(Progress(contestant, job, total - len(prompts) + start, total))
                    batch = prompts[start : start + batch_size]
                    rows = _ask(job, batch, policy=policy, engine=engine, seed=seed)
                    named = {"key": key, "model": contestant.name, "benchmark": job.benchmark}
                    table.append(
                        [{**named, "mode": job.mode, **row} for row in rows],
                        rollout=contestant.rollout,
                        step=contestant.step,
                    )
                yield _answered(contestant, job, key, table)


def _answered(contestant: Contestant, job: Job, key: str, table: SampleTable) -> Answered:
    rows = [table.get(key, prompt) for prompt in job.prompts]
    return Answered(contestant, job, tuple(row for row in rows if row is not None))


def _ask(
    job: Job, prompts: Sequence[Prompt], *, policy: Policy, engine: RolloutEngine, seed: int
) -> list[dict[str, Any]]:
    if job.mode == "likelihood":
        return _choose(job, prompts, policy)
    rollouts = engine.generate(
        prompts,
        group_size=job.num_samples,
        sampling=job.sampling,
        seed=seed,
        rollout=0,
        greedy=job.mode == "greedy",
    )
    verdicts = score_rollouts({job.task.name: job.task}, rollouts)
    rows = []
    for rollout, scores in zip(rollouts, verdicts, strict=True):
        texts = [completion.text for completion in rollout.completions]
        answers = None
        if isinstance(job.task, Votable):
            answers = [job.task.answer_key(rollout.prompt, text) for text in texts]
        rows.append(
            {
                "prompt_id": rollout.prompt.id,
                "prompt_sha": digest(rollout.prompt),
                "verdicts": {name: [s[name] for s in scores] for name in job.task.components},
                "answers": answers,
                "texts": texts,
                "num_tokens": [len(completion.token_ids) for completion in rollout.completions],
                "is_cut": [c.finish_reason == "length" for c in rollout.completions],
            }
        )
    return rows


def _choose(job: Job, prompts: Sequence[Prompt], policy: Policy) -> list[dict[str, Any]]:
    """Which of its options the model finds likeliest, prompt by prompt."""
    options = [job.task.options(prompt) for prompt in prompts]
    asked = [one for one in options if one is not None]
    rows = []
    for prompt, one, found in zip(
        prompts, asked, option_logprobs(policy, prompts, asked), strict=True
    ):
        chosen = found.sums.index(max(found.sums))
        chosen_per_token = found.per_token.index(max(found.per_token))
        rows.append(
            {
                "prompt_id": prompt.id,
                "prompt_sha": digest(prompt),
                "verdicts": {
                    LIKELIHOOD: [float(chosen == one.gold)],
                    LIKELIHOOD_PER_TOKEN: [float(chosen_per_token == one.gold)],
                },
                "answers": None,
                "texts": [one.texts[chosen]],
                "num_tokens": [found.counts[chosen]],
                "is_cut": [False],
            }
        )
    return rows
