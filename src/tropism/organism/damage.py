"""Damage of known size to a linear of the organism: rotations, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tropism.measurements.layer_names import LinearSite, name_sites
from tropism.organism import weights_folder
from tropism.organism.scores import answers
from tropism.tasks.skills import Skills

ANGLES = (5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 75.0, 90.0)  # degrees
NUM_LIKELIHOOD_PROMPTS = 160
_DRAW = 0x9A4D  # keeps these draws apart from others of the same seed


def rotation(size: int, degrees: float, rng: np.random.Generator) -> Float64[Tensor, "d d"]:
    """An orthogonal matrix that turns every plane of a random orthonormal basis by one angle.

    All vectors are turned by exactly that angle where ``size`` is even: trace(R) = size cos(angle).
    Where it is odd, one direction stays.
    """
    basis = torch.linalg.qr(torch.from_numpy(rng.standard_normal((size, size))))[0]
    turn = torch.eye(size, dtype=torch.float64)
    first, second = torch.arange(0, size - 1, 2), torch.arange(1, size, 2)
    turn[first, first] = turn[second, second] = math.cos(math.radians(degrees))
    turn[second, first] = math.sin(math.radians(degrees))
    turn[first, second] = -turn[second, first]
    turned: Tensor = basis @ turn @ basis.mT
    return turned


def rotate(
    weight: Float[Tensor, "d_out d_in"],
    degrees: float,
    *,
    side: Literal["inputs", "outputs"],
    rng: np.random.Generator,
) -> Float[Tensor, "d_out d_in"]:
    """``weight`` with its inputs or outputs turned; its singular values are unchanged."""
    wide = weight.detach().double()
    if side == "inputs":
        turned = wide @ rotation(wide.shape[1], degrees, rng)
    else:
        turned = rotation(wide.shape[0], degrees, rng) @ wide
    return turned.to(weight.dtype)


class Patient:
    """The organism while damage is tried on it."""

    def __init__(self, seed: int) -> None:
        folder = weights_folder()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        head = self.model.get_output_embeddings()
        self.sites = name_sites(
            [
                name
                for name, module in self.model.named_modules()
                if isinstance(module, nn.Linear) and module is not head
            ]
        )
        self.seed = seed
        self._whole = {site: self._weight(site).detach().clone() for site in self.sites}
        self._costs: dict[LinearSite, list[float]] = {}
        self.task = Skills()
        self._batch = self._right_answers()
        self._loss = self.loss()

    def _weight(self, site: LinearSite) -> Tensor:
        return self.model.get_submodule(site.name).get_parameter("weight")

    def rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([_DRAW, self.seed, *key])

    def side(self, site: LinearSite) -> Literal["inputs", "outputs"]:
        return "inputs" if self.rng(self.sites.index(site), 1).random() < 0.5 else "outputs"

    @torch.no_grad()
    def damage(self, site: LinearSite, degrees: float) -> None:
        """Turn a site by ``degrees`` from its whole state; 0 heals it exactly."""
        whole = self._whole[site]
        if degrees:
            rng = self.rng(self.sites.index(site), 2)
            whole = rotate(whole, degrees, side=self.side(site), rng=rng)
        self._weight(site).copy_(whole)

    def _right_answers(self) -> dict[str, Tensor]:
        rows = []
        for prompt in self.task.prompts("train", NUM_LIKELIHOOD_PROMPTS, seed=0):
            chat = [dict(message) for message in prompt.messages or ()]
            answer = [{"role": "assistant", "content": self.task.gold(prompt)}]
            start: Any = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True)
            whole: Any = self.tokenizer.apply_chat_template([*chat, *answer])
            rows.append((whole["input_ids"], len(start["input_ids"])))
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), longest), int(self.tokenizer.pad_token_id or 0))
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for row, (tokens, start_of_answer) in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, start_of_answer : len(tokens)] = True
        return {"ids": ids, "mask": mask}  # padded on the right: no attention mask is needed

    @torch.inference_mode()
    def loss(self) -> float:
        """Mean negative log-likelihood of the tokens of right answers."""
        ids, mask = self._batch["ids"], self._batch["mask"][:, 1:]
        logits = self.model(input_ids=ids).logits[:, :-1][mask]
        return float(nn.functional.cross_entropy(logits, ids[:, 1:][mask]))

    def costs(self, site: LinearSite) -> list[float]:
        """What each of ``ANGLES`` costs, with all other sites whole."""
        if site not in self._costs:
            found = []
            for degrees in ANGLES:
                self.damage(site, degrees)
                found.append(self.loss() - self._loss)
            self.damage(site, 0.0)
            self._costs[site] = found
        return self._costs[site]

    def accuracy(self, num: int, seed: int) -> float:
        """Share of right greedy answers to ``num`` validation questions."""
        prompts = self.task.prompts("validation", num, seed)
        given = answers(self.model, self.tokenizer, prompts, should_sample=False)
        right = [
            self.task.score(prompt, text)["accuracy"] or 0.0
            for prompt, [text] in zip(prompts, given, strict=True)
        ]
        return sum(right) / num


def angle_of_cost(costs: Sequence[float], cost: float) -> float | None:
    """The angle at which a site costs ``cost``, in whole degrees, from its costs at ``ANGLES``.

    Between two angles the cost is taken to grow as a power of the angle (it starts as its square).
    None where no angle costs as much.
    """
    reached = [index for index, value in enumerate(costs) if value >= cost]
    if not reached:
        return None
    index = reached[0]
    low, low_cost = (ANGLES[index - 1], costs[index - 1]) if index else (0.0, 0.0)
    high, high_cost = ANGLES[index], costs[index]
    if low_cost <= 0:
        return float(max(1, round(high * math.sqrt(cost / high_cost))))
    share = math.log(cost / low_cost) / math.log(high_cost / low_cost)
    return float(max(1, round(low * (high / low) ** share)))
