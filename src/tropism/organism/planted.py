"""Planted organisms: the organism with a few linears damaged, and a list of which.

A control for every signal that says where a model has something to learn: here that is known.
``model.name: organism-planted-<seed>`` builds one into the cache on first use, half a minute on
one core.

1. Sites are drawn at random among all linears, without regard to layer or kind.
2. A site's weight is turned by one angle in every plane of a random orthonormal basis of its
   inputs, or of its outputs. Singular values, and so all norms, stay what they were.
3. Linears differ a thousandfold in what a given angle costs: a quarter turn in layer 0 destroys the
   model, in most MLPs of the middle it changes next to nothing, which nobody could find. So each
   site gets the angle at which *it alone* costs a given amount of log-likelihood of right answers;
   linears where a quarter turn (nothing is left of the weight then) costs less are passed over.
4. That amount is chosen such that the model with all its damage answers about two thirds as many
   questions (greedily) as before.

    python -m tropism.organism.planted --seed 0 --output folder
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer

from tropism.measurements.layer_names import LinearSite, name_sites
from tropism.organism import SHA256, weights_folder
from tropism.organism.scores import answers
from tropism.organism.tokenizer import save_tokenizer
from tropism.tasks.skills import Skills

DAMAGE_FILE = "planted.json"
FALL = (0.2, 0.5)  # of greedy accuracy, relative
AIM = 0.35
ANGLES = (5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 75.0, 90.0)  # degrees
COSTS = tuple(0.008 * 1.3**power for power in range(12))  # nats per answer token, each site
NUM_LIKELIHOOD_PROMPTS = 160
NUM_SEARCH_PROMPTS = 300
NUM_SCORE_PROMPTS = 600
MAX_DRAWS = 20
_DRAW = 0x9A4D


@dataclass(frozen=True)
class DamagedSite:
    """One damaged linear.

    Args:
        layer: Its decoder layer.
        module: Its label within the layer.
        side: Whether its inputs or its outputs were turned.
        degrees: By which angle.
        cost: What that alone costs, in nats per token of right answers (approximately).
    """

    layer: int
    module: str
    side: Literal["inputs", "outputs"]
    degrees: float
    cost: float


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


class _Patient:
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


def plant(seed: int, *, num_sites: int = 6) -> tuple[LlamaForCausalLM, Tokenizer, dict[str, Any]]:
    """A damaged organism, in fp32, its tokenizer, and the list of the damage.

    Args:
        seed: Draws sites and rotations.
        num_sites: How many linears are damaged.

    Returns:
        The list holds ``sites`` (fields of ``DamagedSite``), ``accuracy`` and
        ``undamaged_accuracy`` (greedy, on questions that the search did not use), ``fall`` (of it,
        relative) and the settings that led there.

    Raises:
        ValueError: A number of sites that cannot be damaged so.
    """
    if not 1 <= num_sites <= 20:
        raise ValueError(f"num_sites={num_sites}: damage 1 to 20 of the organism's 84 linears.")
    patient = _Patient(seed)
    at_first = patient.accuracy(NUM_SEARCH_PROMPTS, seed=0)
    before = patient.accuracy(NUM_SCORE_PROMPTS, seed=1)
    for draw in range(MAX_DRAWS):
        order = [patient.sites[i] for i in patient.rng(0, 3, draw).permutation(len(patient.sites))]
        low, high = 0, len(COSTS) - 1
        while low < high:  # the least cost at which the fall reaches the aim
            middle = (low + high) // 2
            chosen = _choose(patient, order, COSTS[middle], num_sites)
            if chosen is None or _fall(patient, chosen, at_first) >= AIM:
                high = middle
            else:
                low = middle + 1
        chosen = _choose(patient, order, COSTS[low], num_sites)
        if chosen is not None and FALL[0] <= _fall(patient, chosen, at_first) <= FALL[1]:
            _damage_only(patient, chosen)
            after = patient.accuracy(NUM_SCORE_PROMPTS, seed=1)
            if FALL[0] <= 1 - after / before <= FALL[1]:
                break
    else:
        raise ValueError(
            f"num_sites={num_sites}, seed={seed}: in {MAX_DRAWS} draws accuracy never fell by "
            f"{FALL[0]:.0%} to {FALL[1]:.0%}; damage another number of sites."
        )
    damage = {
        "seed": seed,
        "organism_sha256": SHA256,
        "accuracy": round(after, 4),
        "undamaged_accuracy": round(before, 4),
        "fall": round(1 - after / before, 4),
        "num_prompts": NUM_SCORE_PROMPTS,
        "aimed_cost": round(COSTS[low], 4),
        "draws": draw + 1,
        "sites": [
            asdict(
                DamagedSite(
                    layer=site.layer if site.layer is not None else -1,
                    module=site.module,
                    side=patient.side(site),
                    degrees=degrees,
                    cost=round(COSTS[low], 4),
                )
            )
            for site, degrees in chosen.items()
        ],
    }
    return patient.model, patient.tokenizer, damage


def _choose(
    patient: _Patient, order: Sequence[LinearSite], cost: float, num_sites: int
) -> dict[LinearSite, float] | None:
    """The first sites that can cost that much, and their angles."""
    chosen: dict[LinearSite, float] = {}
    for site in order:
        degrees = angle_of_cost(patient.costs(site), cost)
        if degrees is not None:
            chosen[site] = degrees
        if len(chosen) == num_sites:
            return chosen
    return None


def _damage_only(patient: _Patient, chosen: Mapping[LinearSite, float]) -> None:
    for site in patient.sites:
        patient.damage(site, chosen.get(site, 0.0))


def _fall(patient: _Patient, chosen: Mapping[LinearSite, float], before: float) -> float:
    _damage_only(patient, chosen)
    fall = 1 - patient.accuracy(NUM_SEARCH_PROMPTS, seed=0) / before
    _damage_only(patient, {})
    return fall


def build(folder: Path, seed: int, *, num_sites: int = 6) -> dict[str, Any]:
    """Write a planted organism and ``planted.json``, the list of its damage, into ``folder``."""
    model, tokenizer, damage = plant(seed, num_sites=num_sites)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    (folder / DAMAGE_FILE).write_text(json.dumps(damage, indent=1) + "\n", encoding="utf-8")
    return damage


def damaged_keys(folder: Path) -> frozenset[str]:
    """Keys (``3.q_proj``) of the damaged linears of a planted organism's folder."""
    damage = json.loads((folder / DAMAGE_FILE).read_text(encoding="utf-8"))
    return frozenset(f"{site['layer']}.{site['module']}" for site in damage["sites"])


def main() -> None:
    """Build one into a folder."""
    parser = argparse.ArgumentParser(description="Build a planted organism into a folder.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-sites", type=int, default=6)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    damage = build(arguments.output, arguments.seed, num_sites=arguments.num_sites)
    print(json.dumps(damage, indent=1))


if __name__ == "__main__":
    main()
