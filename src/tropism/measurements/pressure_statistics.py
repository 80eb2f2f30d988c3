"""Signal and noise of gradients, from the inner products of single sequences' gradients alone.

With g_i the gradient of sequence i at unit advantage and M_ij = <g_i, g_j>, a prompt's gradient
under advantages a is g_p = sum_i a_i g_i over its sequences, and everything here is a quadratic
form in a. Two kinds of pairs are kept apart: pairs *within* a prompt hold its noise too, pairs
*across* prompts do not, because prompts are sampled independently:

    raw       = mean_p ||g_p||^2                        = |signal|^2 + variance of a prompt's
    debiased  = mean_{p != q} <g_p, g_q>                = |signal|^2, unbiased (a U-statistic)

All in fp64. The pairs are summed apart, so nothing cancels; NaN stands for undefined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

MIN_ARRANGEMENTS = 20
"""Fewer distinct permutations than this give no null distribution to speak of."""


def gram_matrices(rows: Sequence[Float[Tensor, "N _"]]) -> Float64[Tensor, "sites N N"]:
    """Inner products of N sequences' gradients at each site, from their images."""
    return torch.stack([(site @ site.mT).cpu().double() for site in rows])


def same_group(groups: Int[Tensor, " N"]) -> Bool[Tensor, "N N"]:
    """True where two rows belong to one group (prompt, or probe)."""
    return groups[:, None] == groups[None, :]


def quadratic_forms(
    gram: Float64[Tensor, "sites N N"], weights: Float64[Tensor, "W N"]
) -> Float64[Tensor, "sites W"]:
    """w^T M w of each weighting at each site."""
    return ((weights @ gram) * weights).sum(dim=-1)


def raw_energy(
    gram: Float64[Tensor, "sites N N"],
    advantages: Float64[Tensor, "W N"],
    prompts: Int[Tensor, " N"],
) -> Float64[Tensor, "sites W"]:
    """Mean squared norm of a prompt's gradient; NaN where there is no prompt."""
    return quadratic_forms(gram * same_group(prompts), advantages) / _num(prompts)


def debiased_energy(
    gram: Float64[Tensor, "sites N N"],
    advantages: Float64[Tensor, "W N"],
    prompts: Int[Tensor, " N"],
) -> Float64[Tensor, "sites W"]:
    """Squared norm of the mean gradient, unbiased and so sometimes negative; NaN below 2 prompts.

    1/(P(P-1)) sum_{p != q} <g_p, g_q>.
    """
    num = _num(prompts)
    return quadratic_forms(gram * ~same_group(prompts), advantages) / (num * (num - 1))


def permutations_within(
    groups: Int[Tensor, " N"], num: int, rng: np.random.Generator
) -> Int[Tensor, "num N"]:
    """Uniform random permutations of the rows that keep every row in its group."""
    labels = groups.numpy()
    by_group = np.argsort(labels, kind="stable")
    keys = np.unique(labels, return_inverse=True)[1] + rng.random((num, len(labels)))
    order = np.empty_like(keys, dtype=np.int64)
    order[:, by_group] = np.argsort(keys, axis=1)
    return torch.from_numpy(order)


def num_arrangements(advantages: Float64[Tensor, " N"], groups: Int[Tensor, " N"]) -> float:
    """How many different vectors the permutations within groups can make of ``advantages``."""
    log = 0.0
    for group in groups.unique():
        _, counts = advantages[groups == group].unique(return_counts=True)
        log += math.lgamma(int(counts.sum()) + 1) - sum(math.lgamma(int(c) + 1) for c in counts)
    return math.exp(min(log, 700.0))


def null_z(
    gram: Float64[Tensor, "sites N N"],
    advantages: Float64[Tensor, " N"],
    prompts: Int[Tensor, " N"],
    *,
    num_permutations: int,
    rng: np.random.Generator,
) -> tuple[Float64[Tensor, " sites"], float]:
    """Standard deviations of the debiased energy above its permutation null.

    Where advantages say nothing about gradients, a prompt's sequences may trade advantages: the
    statistic of the data is then one more draw from those of permuted advantages, whatever the
    gradients' distribution and however the sequences were chosen *by advantage*. Flipping the
    sign of a prompt's advantages is not used: it would need gradients whose noise is symmetric,
    which nothing grants (with two sequences, the swap is the flip). The null is skewed to the
    right, as sums of squares are, so z > 2 comes up more often than a normal's 2.3 %.

    Returns:
        z at each site, and one z for all: of the sum over sites, each site's energy in units of
        its sequences' mean energy, against the sums under the same permutations. What sites share
        is then not counted as evidence twice, and no site outvotes the others by its size: a
        plain sum is ruled by the first layers, which have most of the energy and least of the
        signal, and on the organism its z is a third lower. NaN where there are fewer than 2
        prompts, fewer than ``MIN_ARRANGEMENTS`` arrangements, or no variation.
    """
    undefined = torch.full((len(gram),), math.nan, dtype=torch.float64)
    if _num(prompts) < 2 or num_arrangements(advantages, prompts) < MIN_ARRANGEMENTS:
        return undefined, math.nan
    permuted = advantages[permutations_within(prompts, num_permutations, rng)]
    null = debiased_energy(gram, permuted, prompts)  # (sites, R)
    found = debiased_energy(gram, advantages[None], prompts)[:, 0]
    energy = gram.diagonal(dim1=1, dim2=2).mean(dim=1)  # no permutation changes it
    weights = torch.where(energy > 0, 1 / energy, 0.0)
    pooled = _z((weights @ found)[None], (weights @ null)[None])
    return _z(found, null), float(pooled)


def consistency(
    gram: Float64[Tensor, "sites N N"],
    advantages: Float64[Tensor, " N"],
    probes: Int[Tensor, " N"],
) -> Float64[Tensor, " sites"]:
    """Mean cosine of each probe's gradient with the next probe's; NaN without two such."""
    order = probes.unique()  # sorted
    weights = (order[:, None] == probes[None, :]) * advantages  # (T, N)
    products = weights @ gram @ weights.mT  # (sites, T, T)
    norms = products.diagonal(dim1=1, dim2=2).clamp_min(0.0).sqrt()  # (sites, T)
    between = products.diagonal(offset=1, dim1=1, dim2=2)
    cosines: Tensor = (between / (norms[:, :-1] * norms[:, 1:])).nanmean(dim=1)
    return cosines


def signal_share(raw: float | None, debiased: float | None) -> float | None:
    """max(debiased, 0) / raw: the part of a prompt's energy that is signal."""
    if raw is None or debiased is None or raw <= 0:
        return None
    return max(debiased, 0.0) / raw


def noise_scale(raw: float | None, debiased: float | None) -> float | None:
    """Prompts at which the signal of their mean gradient equals its noise; None without signal.

    A mean over n prompts has |signal|^2 against variance / n, so n = (raw - debiased) / debiased:
    the simple noise scale tr(Sigma) / |G|^2 of McCandlish et al. (1812.06162), with a prompt's
    group in the place of an example.
    """
    if raw is None or debiased is None or debiased <= 0:
        return None
    return (raw - debiased) / debiased


def _z(found: Float64[Tensor, " n"], null: Float64[Tensor, "n R"]) -> Float64[Tensor, " n"]:
    mean, std = null.mean(dim=1), null.std(dim=1)
    # Where all permutations give the same but for rounding there is nothing to compare with.
    has_spread = std > 1e-9 * null.abs().amax(dim=1)
    z: Tensor = torch.where(has_spread, (found - mean) / std, math.nan)
    return z


def _num(groups: Int[Tensor, " N"]) -> Float64[Tensor, ""]:
    """As a tensor: 0 / 0 is NaN, where a number would raise."""
    return torch.tensor(float(len(groups.unique())), dtype=torch.float64)
