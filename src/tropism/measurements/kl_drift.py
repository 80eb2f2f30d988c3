"""How far a tuned policy is from the one that it started from, as KL over the whole vocabulary.

*Forward* is KL(starting || tuned): what the tuned policy has given up. *Reverse* is
KL(tuned || starting): what it has taken up. Both are taken at each position of given texts.

Source: "Scalpel vs Hammer", 2507.10616 (forward, on reference solutions, prompt included).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Direction = Literal["forward", "reverse"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "reverse")

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TokenKL:
    """KL at each of N positions.

    Args:
        forward: [N] fp32, nats; not finite where it is undefined.
        reverse: [N] fp32, nats.
        prompts: [N] index of the prompt that each position belongs to.
    """

    forward: Float[Tensor, " N"]
    reverse: Float[Tensor, " N"]
    prompts: Int[Tensor, " N"]

    def kept(
        self, direction: Direction
    ) -> tuple[Float[Tensor, " kept"], Int[Tensor, " kept"], int]:
        """The finite values, their prompts, and how many positions were dropped."""
        values = self.forward if direction == "forward" else self.reverse
        is_finite = values.isfinite()
        return values[is_finite], self.prompts[is_finite], int((~is_finite).sum())


@torch.no_grad()
def both_kls(
    starting_hidden: Float[Tensor, "N D"],
    tuned_hidden: Float[Tensor, "N D"],
    *,
    starting_head: Head,
    tuned_head: Head,
    chunk_tokens: int = 64,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Forward and reverse KL at each position, exactly, at temperature 1.

    Tokens that the first policy gives no probability at all add nothing, as 0 log 0 = 0.

    Args:
        starting_hidden: Last hidden states under the starting policy.
        tuned_hidden: The same positions under the tuned one.
        starting_head: D -> V, as the starting policy applies it.
        tuned_head: The same of the tuned one.
        chunk_tokens: Positions whose logits exist at the same time; the softmax is in fp32.
    """
    forward, reverse = [], []
    for start, tuned in zip(
        starting_hidden.split(chunk_tokens), tuned_hidden.split(chunk_tokens), strict=True
    ):
        log_p = starting_head(start).log_softmax(dim=-1, dtype=torch.float32)  # (N, V)
        log_q = tuned_head(tuned).log_softmax(dim=-1, dtype=torch.float32)
        forward.append(_kl(log_p, log_q))
        reverse.append(_kl(log_q, log_p))
    if not forward:
        return torch.zeros(0), torch.zeros(0)
    return torch.cat(forward), torch.cat(reverse)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    terms = log_p.exp() * (log_p - log_q)
    return terms.masked_fill_(log_p == -torch.inf, 0.0).sum(dim=-1)
