"""One scored rollout batch: sample, score, weigh, compare; draw groups without signal again."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tropism.objective.advantages import Advantages, component_advantages, group_advantages
from tropism.objective.length import soft_overlong
from tropism.objective.settings import Objective
from tropism.rewards import Rewards
from tropism.rollouts.engine import RolloutEngine, Sampling
from tropism.scoring import component_tensors, score_rollouts
from tropism.tasks.base import Scores, Task
from tropism.timing import timed
from tropism.types import GenerationProgress, Prompt, Rollout, RolloutBatch


@dataclass(frozen=True)
class Experience:
    """Makes rollout batches.

    Args:
        engine: Where completions come from.
        tasks: Who judges them, by name.
        rewards: How components are weighed.
        objective: How rewards become advantages.
        sampling: How completions are drawn.
        group_size: G.
        seed: Keys the sampling.
        shuffle_rewards: Deal each group's scores out anew at random (a control).
        progress: Told while completions are sampled.
    """

    engine: RolloutEngine
    tasks: Mapping[str, Task]
    rewards: Rewards
    objective: Objective
    sampling: Sampling
    group_size: int
    seed: int
    shuffle_rewards: bool = False
    progress: Callable[[GenerationProgress], None] | None = None

    def collect(
        self, prompts: Sequence[Prompt], *, rollout: int, drawn: Sequence[Rollout] | None = None
    ) -> RolloutBatch:
        """The scored rollout batch of ``prompts``.

        With ``objective.max_resamples`` the groups whose rewards are all equal are sampled anew,
        with other random numbers, until they differ or the tries are used up.

        Args:
            prompts: P.
            rollout: Its index.
            drawn: Their completions, where they were sampled before.
        """
        seconds: dict[str, float] = {}
        rollouts, scores = self._sample(prompts, rollout, attempt=0, seconds=seconds, drawn=drawn)
        batch = self._judge(rollouts, scores, rollout, seconds)
        for attempt in range(1, self.objective.max_resamples + 1):
            silent = batch.zero_variance.nonzero().flatten().tolist()
            if not silent:
                break
            again = [prompts[index] for index in silent]
            drawn, judged = self._sample(again, rollout, attempt=attempt, seconds=seconds)
            for index, group, its_scores in zip(silent, drawn, judged, strict=True):
                rollouts[index], scores[index] = group, its_scores
            batch = self._judge(rollouts, scores, rollout, seconds)
        return batch

    def _sample(
        self,
        prompts: Sequence[Prompt],
        rollout: int,
        *,
        attempt: int,
        seconds: dict[str, float],
        drawn: Sequence[Rollout] | None = None,
    ) -> tuple[list[Rollout], list[list[Scores]]]:
        with timed(seconds, "rollout"):
            rollouts = list(drawn or ()) or self.engine.generate(
                prompts,
                group_size=self.group_size,
                sampling=self.sampling,
                seed=self.seed + (attempt << 32),  # seeds are below 2^32
                rollout=rollout,
                progress=self.progress,
            )
        with timed(seconds, "reward"):
            scores = score_rollouts(self.tasks, rollouts)
        if self.shuffle_rewards:
            for group, its_scores in zip(rollouts, scores, strict=True):
                # Whole completions trade places: what components say of each other stays true.
                key = f"{self.seed}/{rollout}/{attempt}/{group.prompt.id}"
                random.Random(key).shuffle(its_scores)
        return rollouts, scores

    def _judge(
        self,
        rollouts: Sequence[Rollout],
        scores: Sequence[Sequence[Scores]],
        rollout: int,
        seconds: dict[str, float],
    ) -> RolloutBatch:
        components = component_tensors([one for group in scores for one in group])
        rewards = self.rewards.combine(components, group_size=self.group_size)
        if self.objective.overlong_buffer is not None:
            lengths = [len(c.token_ids) for group in rollouts for c in group.completions]
            rewards = rewards + soft_overlong(
                torch.tensor(lengths),
                max_completion_length=self.sampling.max_new_tokens,
                buffer=self.objective.overlong_buffer,
            )
        advantages = self._advantages(components, rewards)
        return RolloutBatch(
            rollout=rollout,
            rollouts=list(rollouts),
            components=components,
            rewards=rewards,
            advantages=advantages.values,
            zero_variance=advantages.zero_variance,
            seconds=seconds,
        )

    def _advantages(self, components: Mapping[str, Tensor], rewards: Tensor) -> Advantages:
        if self.objective.aggregation == "normalize_then_sum":
            return component_advantages(
                components, weights=self.rewards.weights, group_size=self.group_size
            )
        return group_advantages(rewards, group_size=self.group_size, scale=self.objective.scale)
