"""Log-probabilities of chosen tokens from hidden states, without ever holding [B, T, V].

The head runs on the positions that are needed, a chunk at a time; each chunk's logits are
recomputed in the backward pass instead of being kept (49k x 4 bytes a token for SmolLM2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 256


def _chunk(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float,
    should_train_entropy: bool,
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperature  # (N, V)
    log_normaliser = logits.logsumexp(dim=-1)  # (N,)
    logprobs = logits.gather(1, targets[:, None]).squeeze(1) - log_normaliser
    with torch.set_grad_enabled(should_train_entropy and torch.is_grad_enabled()):
        weights = (logits - log_normaliser[:, None]).exp()
        entropy = log_normaliser - (weights * logits).sum(dim=-1)  # H = logsumexp - E[logit]
    return logprobs, entropy


def selected_logprobs(
    hidden: Float[Tensor, "N D"],
    targets: Int[Tensor, " N"],
    *,
    head: Callable[[Tensor], Tensor],
    temperature: float,
    chunk_tokens: int = CHUNK_TOKENS,
    should_train_entropy: bool = False,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """log softmax(head(hidden) / temperature)[targets] and the entropy (nats) of each position.

    Args:
        hidden: [N, D] last hidden states (after the final norm) that predict ``targets``.
        targets: [N] token ids.
        head: D -> V, as the model applies it.
        temperature: The sampling temperature; the softmax is in fp32.
        chunk_tokens: Positions whose logits exist at the same time.
        should_train_entropy: Whether the entropies are differentiable too.

    Returns:
        Log-probabilities [N], differentiable, and entropies [N]; both fp32.
    """
    if len(targets) == 0:
        return hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.float32)
    logprobs, entropies = [], []
    for start in range(0, len(targets), chunk_tokens):
        part = hidden[start : start + chunk_tokens]
        labels = targets[start : start + chunk_tokens]
        arguments = (part, labels, head, temperature, should_train_entropy)
        if torch.is_grad_enabled():
            # The reentrant kind silently drops gradients when adapters are toggled.
            chosen, entropy = checkpoint(_chunk, *arguments, use_reentrant=False)
        else:
            chosen, entropy = _chunk(*arguments)
        logprobs.append(chosen)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)
