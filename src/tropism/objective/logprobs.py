"""Log-probabilities of chosen tokens from hidden states, without ever holding [B, T, V].

The head runs on the positions that are needed, a chunk at a time. Where the head is frozen, the
gradient for the hidden states is formed along with the values, while a chunk's logits are in the
processor's cache: d log p(y) / d hidden = (onehot(y) - softmax) through the head, which the
backward only scales. Elsewhere each chunk's logits are recomputed in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# On a CPU the head reads its weights once a chunk; a GPU wants more rows at once.
CHUNK_TOKENS = {"cpu": 256, "cuda": 1024}
# Softmax and gradient pass over fp32 rows several times: 8 x 49k stay in a core's own cache.
CACHED_TOKENS = {"cpu": 8, "cuda": 1024}

Head = Callable[[Tensor], Tensor]


def selected_logprobs(
    hidden: Float[Tensor, "N D"],
    targets: Int[Tensor, " N"],
    *,
    head: Head,
    temperature: float,
    is_head_frozen: bool = False,
    chunk_tokens: int | None = None,
    should_train_entropy: bool = False,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """log softmax(head(hidden) / temperature)[targets] and the entropy (nats) of each position.

    Args:
        hidden: [N, D] last hidden states (after the final norm) that predict ``targets``.
        targets: [N] token ids.
        head: D -> V, as the model applies it; row by row.
        temperature: The sampling temperature; the softmax is in fp32.
        is_head_frozen: Gradients are for ``hidden`` alone, not for the head's parameters.
        chunk_tokens: Positions whose logits exist at the same time.
        should_train_entropy: Whether the entropies are differentiable too.

    Returns:
        Log-probabilities [N], differentiable, and entropies [N]; both fp32.
    """
    if len(targets) == 0:
        return hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.float32)
    size = chunk_tokens or CHUNK_TOKENS.get(hidden.device.type, CHUNK_TOKENS["cpu"])
    needs_gradient = torch.is_grad_enabled() and hidden.requires_grad
    if needs_gradient and is_head_frozen and not should_train_entropy:
        logprobs, entropy = _WithGradient.apply(  # type: ignore[no-untyped-call]
            hidden, targets, head, temperature, size
        )
        return logprobs, entropy
    parts = []
    for states, labels in zip(hidden.split(size), targets.split(size), strict=True):
        arguments = (states, labels, head, temperature, should_train_entropy)
        if torch.is_grad_enabled():
            # The reentrant kind silently drops gradients when adapters are toggled.
            parts.append(checkpoint(_chunk, *arguments, use_reentrant=False))
        else:
            parts.append(_chunk(*arguments))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _chunk(
    hidden: Tensor, targets: Tensor, head: Head, temperature: float, should_train_entropy: bool
) -> tuple[Tensor, Tensor]:
    every = log_softmax(head(hidden), temperature)  # (N, V)
    logprobs = every.gather(1, targets[:, None]).squeeze(1)
    with torch.set_grad_enabled(should_train_entropy and torch.is_grad_enabled()):
        entropy = -(every.exp() * every).sum(dim=-1)
    return logprobs, entropy


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Of [N, V] logits at a temperature: fp32, in one pass over them where it is 1."""
    if temperature == 1:
        return logits.log_softmax(dim=-1, dtype=torch.float32)
    return (logits.float() / temperature).log_softmax(dim=-1)


class _WithGradient(torch.autograd.Function):
    """Values and, in the same sweep over the chunks, their gradient for the hidden states."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: Head, temperature: float, size: int
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, gradients = [], [], []
        cached = CACHED_TOKENS.get(hidden.device.type, CACHED_TOKENS["cpu"])
        for states, labels in zip(hidden.detach().split(size), targets.split(size), strict=True):
            with torch.enable_grad():
                leaf = states.requires_grad_()
                logits = head(leaf)
            toward = torch.empty_like(logits, requires_grad=False)
            for part, into, chosen in zip(
                logits.detach().split(cached),
                toward.split(cached),
                labels.split(cached),
                strict=True,
            ):
                every = log_softmax(part, temperature)
                logprobs.append(every.gather(1, chosen[:, None]).squeeze(1))
                weights = every.exp()
                entropies.append(-torch.linalg.vecdot(weights, every))
                weights.neg_().scatter_add_(  # onehot - softmax
                    1, chosen[:, None], torch.ones_like(chosen[:, None], dtype=torch.float32)
                )
                into.copy_(weights if temperature == 1 else weights.div_(temperature))
            (gradient,) = torch.autograd.grad(logits, leaf, toward)
            gradients.append(gradient)
        ctx.save_for_backward(torch.cat(gradients))
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        scaled = gradient * grad[:, None]
        return scaled.to(gradient.dtype), None, None, None, None
