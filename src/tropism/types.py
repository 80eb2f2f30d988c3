"""What flows through one step, and the legend of every shape comment in this project.

Shapes
    P  prompts in a rollout batch             G  completions sampled per prompt (group size)
    B  completions in a rollout batch = P * G T  tokens of one (padded) completion
    V  vocabulary    D  hidden size    L  decoder layers    R  LoRA rank    K  reward components

Rows of every [B, ...] tensor are ordered prompt by prompt: row ``p * G + g`` is sample ``g`` of
prompt ``p``.

Log-probabilities carry the name of whose numbers they are: ``policy_`` (being trained),
``sampler_`` (the engine, when it drew the token) and ``reference_`` (the starting policy).
All three are taken at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tropism.finetuning import FineTuning

Message = Mapping[str, str]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One question, with all that its task needs to score an answer.

    Args:
        id: Unique and stable across runs and machines; sampling randomness is keyed by it.
        task: Name of the task whose ``score`` judges the completions.
        messages: Chat messages (``role``, ``content``), rendered by the model's chat template.
            Exactly one of ``messages`` and ``text`` is given.
        text: A raw prompt, used as it is.
        columns: Whatever the verifier needs (gold answer, schema, ...); never shown to the model.
    """

    id: str
    task: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.text is None):
            raise ValueError(f"prompt {self.id!r}: give exactly one of `messages` and `text`.")


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    Args:
        token_ids: [T] with the end-of-sequence token when there was one.
        text: Decoded without special tokens: what verifiers read.
        sampler_logprobs: [T] fp32 on CPU, at the sampling temperature.
        finish_reason: ``stop`` (an EOS token was drawn) or ``length`` (cut at the limit).
    """

    token_ids: tuple[int, ...]
    text: str
    sampler_logprobs: Tensor
    finish_reason: FinishReason


@dataclass(frozen=True)
class Rollout:
    """A prompt as the model saw it, and its group of G completions."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion with its task's verdict: what evaluation yields."""

    prompt: Prompt
    completion: Completion
    scores: Mapping[str, float | None]


@dataclass
class RolloutBatch:
    """P groups, scored; what observers see and the objective trains on.

    Args:
        rollout: Index of this rollout batch, from 0.
        rollouts: P groups, each of G completions.
        components: name -> [B] fp32 in [0, 1]; NaN where the component abstained.
        rewards: [B] weighted sum that advantages are made of.
        advantages: [B].
        zero_variance: [P] bool, groups that carry no signal.
        seconds: Wall time of the phases so far (``rollout``, ``reward``, ``probe``, ``train``).
    """

    rollout: int
    rollouts: Sequence[Rollout]
    components: dict[str, Tensor]
    rewards: Tensor
    advantages: Tensor
    zero_variance: Tensor
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def group_size(self) -> int:
        return len(self.rollouts[0].completions)

    @property
    def completions(self) -> list[Completion]:
        """All B completions in row order."""
        return [c for rollout in self.rollouts for c in rollout.completions]


@dataclass(frozen=True)
class MicroBatch:
    """Some completions of one prompt, ready for one forward.

    Args:
        rows: [M] indices into the rollout batch.
        prompt: [S] prompt tokens.
        targets: [M, T] completion tokens, right-padded.
        mask: [M, T] bool, True on completion tokens (EOS included).
    """

    rows: Tensor
    prompt: Tensor
    targets: Tensor
    mask: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on ``device``."""
        return MicroBatch(
            self.rows.to(device),
            self.prompt.to(device),
            self.targets.to(device),
            self.mask.to(device),
        )


@dataclass(frozen=True)
class Group:
    """Where one prompt and the completions behind it lie in a pack.

    Args:
        start: Index of the prompt's first token.
        prompt_length: Its tokens.
        lengths: Tokens of each completion that run through the model: all but its last, which is
            only predicted.
    """

    start: int
    prompt_length: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Pack:
    """Completions of any prompts laid end to end in one row, each prompt once: no padding.

    Args:
        rows: [M] indices into the rollout batch.
        input_ids: [S] the first prompt, its completions one after the other, the next prompt, ...
        position_ids: [S] positions as if each completion came right behind its prompt.
        predicts: [N] positions whose states predict the completion tokens, row by row.
        targets: [M, T] completion tokens, right-padded.
        mask: [M, T] bool, True on the N completion tokens (EOS included).
        groups: The layout, which keeps completions apart in attention.
    """

    rows: Tensor
    input_ids: Tensor
    position_ids: Tensor
    predicts: Tensor
    targets: Tensor
    mask: Tensor
    groups: tuple[Group, ...]

    def to(self, device: torch.device) -> Pack:
        """The same pack on ``device``."""
        tensors = {name: part for name, part in vars(self).items() if name != "groups"}
        return replace(self, **{name: part.to(device) for name, part in tensors.items()})


@dataclass(frozen=True)
class GenerationProgress:
    """Sent during sampling: ``done`` of ``total`` completions ended, ``tokens`` sampled so far."""

    done: int
    total: int
    tokens: int


class StepObserver:
    """Hooks of one step that Lightning lacks; callbacks inherit this and register themselves.

    In ``setup`` a callback calls ``pl_module.add_observer(self)``. All methods default to nothing.
    """

    def generation_progress(self, module: FineTuning, progress: GenerationProgress) -> None:
        """While completions are sampled, a few times a second."""

    def rollout_scored(self, module: FineTuning, batch: RolloutBatch) -> None:
        """Rewards and advantages are known; no gradient of this rollout exists yet."""

    def before_update(self, module: FineTuning, batch: RolloutBatch) -> None:
        """Just before the first optimizer step on this rollout batch (never called without one)."""

    def step_taken(
        self, module: FineTuning, batch: RolloutBatch, metrics: Mapping[str, float]
    ) -> None:
        """After each optimizer step; ``metrics`` has its ``loss``, ``grad_norm`` and ``lr``."""

    def after_update(
        self, module: FineTuning, batch: RolloutBatch, metrics: Mapping[str, float | None]
    ) -> None:
        """Always the last call of a rollout; ``metrics`` has the columns of the ``steps`` table.

        ``metrics["num_updates"]`` is the number of optimizer steps taken, 0 where no completion
        carried signal.
        """
