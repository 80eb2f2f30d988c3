"""What a sequence-classification model thinks of a completion."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tropism import weights
from tropism.tasks.extra import ExtraReward
from tropism.types import Completion, Prompt

Conversation = Literal["chat", "pair"]
TooLong = Literal["error", "abstain", "cut_left"]
Encoded = Mapping[str, list[int]]
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class RewardModel(ExtraReward):
    """A frozen reward model's score, squashed into (0, 1): sigmoid((score - mean) / scale).

    The score is the model's one output. Of a classifier with several it is the log-odds of
    ``label``, so that mean 0 and scale 1 give the label's probability.

    A scale far below the spread of the scores saturates: equal values carry no signal. Take mean
    and scale from the scores of some completions of the base (``RewardModel.raw_scores``).

    Args:
        model: Hub id or local folder of an ``AutoModelForSequenceClassification`` with its head.
        revision: Hub revision (branch, tag or commit).
        mean: Score that becomes 0.5.
        scale: Positive; the score ``mean + scale`` becomes 0.73.
        label: Index or name of the output that is wanted; null where the model has just one.
        conversation: ``chat`` renders prompt and completion by the chat template of the reward
            model's own tokenizer; ``pair`` encodes them as its two sequences.
        max_tokens: Longest conversation in tokens; the model's context where null.
        too_long: What a longer one means: ``error`` stops the run, ``abstain`` leaves it unjudged,
            ``cut_left`` drops its beginning (``chat`` only; a BOS is kept).
        batch_size: Conversations in one forward, of similar lengths.
        dtype: Of the weights.
        device: Where it runs; the policy's device where null.
        name: Of the component.

    Raises:
        ValueError: A setting out of range; from ``prepare``, a model without a trained head, a
            label that it does not have, no chat template, a longer max_tokens than its context.
    """

    only_where = frozenset({"batch_size", "device"})

    def __init__(
        self,
        model: str,
        revision: str | None = None,
        mean: float = 0.0,
        scale: float = 1.0,
        label: int | str | None = None,
        conversation: Conversation = "chat",
        max_tokens: int | None = None,
        too_long: TooLong = "error",
        batch_size: int = 8,
        dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16",
        device: str | None = None,
        name: str = "reward_model",
    ) -> None:
        if not math.isfinite(mean) or not 0 < scale < math.inf:
            raise ValueError(
                f"RewardModel.mean={mean}, RewardModel.scale={scale}: give finite numbers, the "
                "scale above 0 (a negative weight in reward_weights turns the reward around)."
            )
        for setting, value in {"max_tokens": max_tokens, "batch_size": batch_size}.items():
            if value is not None and value < 1:
                raise ValueError(f"RewardModel.{setting}={value}: give at least 1.")
        if conversation not in get_args(Conversation) or too_long not in get_args(TooLong):
            raise ValueError(
                f"RewardModel.conversation={conversation!r}, RewardModel.too_long={too_long!r}: "
                f"choose from {get_args(Conversation)} and {get_args(TooLong)}."
            )
        if conversation == "pair" and too_long == "cut_left":
            raise ValueError(
                "RewardModel.too_long='cut_left' with conversation='pair' would cut off what marks "
                "the first sequence; choose 'abstain' or 'error'."
            )
        self.model, self.revision, self.name = model, revision, name
        self.mean, self.scale, self.label = mean, scale, label
        self.conversation, self.max_tokens, self.too_long = conversation, max_tokens, too_long
        self.batch_size, self.dtype, self.device = batch_size, dtype, device
        self._network: Any = None
        self._source: dict[str, Any] = {}
        self._tokenizer: Any = None
        self._limit = 0
        self._output: int | None = None
        self._padding: int | None = None
        self._inputs: tuple[str, ...] = ()

    # -- set-up -------------------------------------------------------------------------------

    def prepare(self, *, max_new_tokens: int, device: torch.device) -> None:
        if self._network is not None:
            return
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        folder = self._folder()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if self.conversation == "chat" and tokenizer.chat_template is None:
            raise ValueError(
                f"RewardModel.model={self.model!r}: its tokenizer has no chat template; set "
                "conversation: pair if it was trained on pairs of question and answer."
            )
        network, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=getattr(torch, self.dtype), output_loading_info=True
        )
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(
                f"RewardModel.model={self.model!r} lacks {missing}, which would be random: give a "
                "model that was trained to classify sequences."
            )
        self._output = self._find_output(network.config)
        self._limit = self._find_limit(network.config, tokenizer)
        self._padding = network.config.get_text_config().pad_token_id
        # Some tokenizers give token types to models that have none.
        known = inspect.signature(network.forward).parameters
        self._inputs = tuple(name for name in INPUTS if name in known)
        network.requires_grad_(False)
        self._network = network.eval().to(device if self.device is None else self.device)
        self._tokenizer = tokenizer
        self._source = weights.source_of(folder, with_hashes=True)

    def source(self) -> Mapping[str, Any]:
        """As ``tropism.weights.source_of`` says it."""
        return self._source

    def _folder(self) -> str:
        try:
            return str(weights.resolve(self.model, revision=self.revision))
        except ValueError as error:  # it speaks of the policy's settings
            raise ValueError(f"RewardModel.model={self.model!r} was not found: {error}") from error

    def _find_output(self, config: Any) -> int | None:
        if self.label is None:
            if config.num_labels == 1:
                return None
            raise ValueError(
                f"RewardModel.label=null, and {self.model!r} has {config.num_labels} outputs: "
                f"choose one of {config.id2label}."
            )
        index = config.label2id.get(self.label, self.label)
        if index not in range(config.num_labels) or config.num_labels == 1:
            raise ValueError(
                f"RewardModel.label={self.label!r}: {self.model!r} has the outputs "
                f"{config.id2label}; choose one of several, or null where there is one."
            )
        return int(index)

    def _find_limit(self, config: Any, tokenizer: Any) -> int:
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        context = int(min(positions or 1 << 30, tokenizer.model_max_length))
        if self.max_tokens is not None and self.max_tokens > context:
            raise ValueError(
                f"RewardModel.max_tokens={self.max_tokens}: the context of {self.model!r} is "
                f"{context} tokens."
            )
        return context if self.max_tokens is None else self.max_tokens

    # -- judging ------------------------------------------------------------------------------

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        return self.score_batch([prompt], [completion])[0]

    def score_batch(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[float | None]:
        return [
            None if raw is None else float(torch.tensor((raw - self.mean) / self.scale).sigmoid())
            for raw in self.raw_scores(prompts, completions)
        ]

    def raw_scores(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[float | None]:
        """[B] the model's own scores, before the map; None where a conversation is not judged.

        Raises:
            ValueError: A conversation is too long, and ``too_long`` is ``error``.
        """
        assert self._network is not None, "prepare() loads the model"
        encoded = [self._encode(*pair) for pair in zip(prompts, completions, strict=True)]
        judged = [(i, one) for i, one in enumerate(encoded) if one is not None]
        judged.sort(key=lambda pair: len(pair[1]["input_ids"]))
        scores: list[float | None] = [None] * len(encoded)
        for start in range(0, len(judged), self.batch_size):
            part = judged[start : start + self.batch_size]
            for (i, _), score in zip(part, self._forward([one for _, one in part]), strict=True):
                scores[i] = score
        return scores

    def _encode(self, prompt: Prompt, completion: Completion) -> Encoded | None:
        asked = prompt.messages or ({"role": "user", "content": prompt.text or ""},)
        if self.conversation == "chat":
            messages = [*map(dict, asked), {"role": "assistant", "content": completion.text}]
            given = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        else:
            question = "\n".join(message["content"] for message in asked)
            given = self._tokenizer(question, completion.text, verbose=False)
        encoded = {name: list(given[name]) for name in self._inputs if name in given}
        length = len(encoded["input_ids"])
        if length <= self._limit:
            return encoded
        if self.too_long == "error":
            raise ValueError(
                f"the conversation has {length} tokens, more than {self._limit}: raise "
                "RewardModel.max_tokens (the model's context permitting), lower "
                "sampling.max_new_tokens, or set RewardModel.too_long to abstain or cut_left."
            )
        return None if self.too_long == "abstain" else self._cut(encoded)

    def _cut(self, encoded: Encoded) -> Encoded:
        ids = encoded["input_ids"]
        bos = self._tokenizer.bos_token_id
        kept = list(range(len(ids) - self._limit, len(ids)))
        if bos is not None and ids[0] == bos:
            kept[0] = 0
        return {name: [values[i] for i in kept] for name, values in encoded.items()}

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Encoded]) -> list[float]:
        device = self._network.device
        padding = {"input_ids": self._free_id(rows) if self._padding is None else self._padding}
        batch = {
            name: pad_sequence(
                [torch.tensor(row[name]) for row in rows],
                batch_first=True,
                padding_value=padding.get(name, 0),
            ).to(device)
            for name in rows[0]
        }
        logits: Tensor = self._network(**batch).logits.float()  # (M, outputs)
        if self._output is None:
            return [float(value) for value in logits[:, 0]]
        others = [i for i in range(logits.shape[1]) if i != self._output]
        return [
            float(value) for value in logits[:, self._output] - logits[:, others].logsumexp(dim=1)
        ]

    def _free_id(self, rows: Sequence[Encoded]) -> int:
        """What to pad with where the model has no padding token, and judges the last token.

        In a batch it judges the last that is not padding, which an id out of no row leaves alone.
        """
        used = {token_id for row in rows for token_id in row["input_ids"]}
        config = self._network.config.get_text_config()
        config.pad_token_id = next(i for i in range(config.vocab_size) if i not in used)
        return int(config.pad_token_id)
