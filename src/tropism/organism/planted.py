"""Planted organisms: the organism with a few linears damaged, and a list of which.

A control for every signal that says where a model has something to learn: here that is known.
``model.name: organism-planted-<seed>`` builds one into the cache on first use, about a minute on
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer

from tropism.measurements.layer_names import LinearSite
from tropism.organism import SHA256
from tropism.organism.damage import Patient, angle_of_cost
from tropism.organism.tokenizer import save_tokenizer

DAMAGE_FILE = "planted.json"
FALL = (0.2, 0.5)  # of greedy accuracy, relative
AIM = 0.35
COSTS = tuple(0.008 * 1.3**power for power in range(12))  # nats per answer token, each site
NUM_SEARCH_PROMPTS = 300
NUM_SCORE_PROMPTS = 600
MAX_DRAWS = 20


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
    patient = Patient(seed)
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
    patient: Patient, order: Sequence[LinearSite], cost: float, num_sites: int
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


def _damage_only(patient: Patient, chosen: Mapping[LinearSite, float]) -> None:
    for site in patient.sites:
        patient.damage(site, chosen.get(site, 0.0))


def _fall(patient: Patient, chosen: Mapping[LinearSite, float], before: float) -> float:
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
