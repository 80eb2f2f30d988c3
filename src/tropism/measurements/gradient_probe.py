"""Each sequence's gradient at every linear, from one backward that touches no parameter.

For a linear y = W x + ..., the gradient of a loss with respect to the *effective* weight (W, or
W + s B A under LoRA) is delta^T X: X is its input and delta the gradient of its output. Rows of a
batch do not meet in the forward, so the slice of row i gives the gradient of sequence i, whether
the weight is frozen or not. The differences from hooking ``weight.grad``:

1. Nothing is computed for any parameter: the backward is asked for the gradient of the input
   embeddings alone, which also carries delta down to frozen layers.
2. X is saved with autograd's own saved tensors, so that gradient checkpointing recomputes it.
3. Rows must be whole sequences: a prefix that rows share has summed its delta over them already.

    with GradientProbe(linears, embedding, Sketch(32, seed=0)) as probe:
        logprobs = ...  # one forward of [m, S] token ids, the prompt repeated in each row
        gradients = probe.backward(-(weights * logprobs.sum(dim=1)).sum())
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tropism.measurements.layer_names import LinearSite
from tropism.measurements.sketches import Measure, SiteGradients


@dataclass(frozen=True)
class RowGradients:
    """The gradients of m sequences at every linear, in the order of the probe's linears.

    Args:
        rows: One [m, F] fp32 per linear.
        summed: One [k, d_in] fp32 per linear, where row weights were given; else empty.
    """

    rows: tuple[Tensor, ...]
    summed: tuple[Tensor, ...] = ()


def linear_shape(linear: nn.Module) -> tuple[int, int]:
    """(d_out, d_in) of an ``nn.Linear``, a quantised one, or GPT-2's transposed ``Conv1D``."""
    if hasattr(linear, "in_features"):
        return int(linear.out_features), int(linear.in_features)  # type: ignore[arg-type]
    weight = linear.get_parameter("weight")
    return weight.shape[1], weight.shape[0]


class _Tap(torch.autograd.Function):
    """The identity on a linear's output; hands its input and output gradient on in the backward."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, x: Tensor, receive: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.receive = receive
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, delta: Tensor | None) -> tuple[Tensor | None, None, None]:
        if delta is not None:
            (x,) = ctx.saved_tensors
            ctx.receive(x, delta)
        return delta, None, None


class GradientProbe:
    """Measures the gradients of the next forward; inside ``with`` only.

    Args:
        linears: Every linear to measure and its module, without its adapter (PEFT's
            ``get_base_layer()``): the adapter adds to the output, so both have the same delta.
        embedding: The module that turns token ids [m, S] into [m, S, D].
        measure: ``Sketch``, or ``ExactGradients``.

    Raises:
        ValueError: A linear does not see whole rows (routed experts), or the embedding runs more
            than once for a backward (a shared prompt).
    """

    def __init__(
        self,
        linears: Sequence[tuple[LinearSite, nn.Module]],
        embedding: nn.Module,
        measure: Measure,
    ) -> None:
        self.linears = tuple(linears)
        self.embedding = embedding
        self.measure = measure
        self._handles: list[RemovableHandle] = []
        self._embedded: Tensor | None = None
        self._row_weights: Tensor | None = None
        self._received: dict[int, SiteGradients] = {}

    def __enter__(self) -> GradientProbe:
        # Before the hooks of others: what they make of the embeddings is differentiated as well.
        self._handles.append(
            self.embedding.register_forward_hook(self._after_embedding, prepend=True)
        )
        for index, (_, linear) in enumerate(self.linears):
            hook = partial(self._after_linear, index)
            self._handles.append(linear.register_forward_hook(hook))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._embedded = None
        self._received.clear()

    def backward(
        self,
        loss: Float[Tensor, ""],
        *,
        row_weights: Float[Tensor, " m"] | None = None,
    ) -> RowGradients:
        """Differentiate the sum of the rows' losses, once; no ``.grad`` is written or computed.

        Args:
            loss: Sum over rows of each row's loss at unit advantage.
            row_weights: Advantages, where the sketch of the weighted sum is wanted too.

        Raises:
            ValueError: No forward with gradients has run inside the probe since the last call.
        """
        if self._embedded is None:
            raise ValueError(
                "GradientProbe.backward: no forward has gone through the embedding inside this "
                "probe; run the model inside `with`, gradients enabled, once before each call."
            )
        embedded = self._embedded
        self._row_weights = None if row_weights is None else row_weights.to(embedded.device)
        self._received = {}
        torch.autograd.grad(loss, embedded)
        found = [
            self._received.get(index)
            or self.measure.nothing(
                len(embedded), *linear_shape(linear), is_summed=row_weights is not None
            )
            for index, (_, linear) in enumerate(self.linears)
        ]
        self._embedded, self._received = None, {}
        return RowGradients(
            tuple(gradients.rows for gradients in found),
            tuple(gradients.summed for gradients in found if gradients.summed is not None),
        )

    # -- hooks --------------------------------------------------------------------------------

    def _after_embedding(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        if self._embedded is not None:  # autograd.grad would leave out what the first one fed
            raise ValueError(
                "GradientProbe: the embedding ran a second time before `backward`. Run one forward "
                "for each call, with the prompt repeated in each row and not shared by a cache."
            )
        # A view is no leaf: hooks on what follows may ask whether autograd.grad will reach it.
        self._embedded = output.requires_grad_(True).view_as(output)
        return self._embedded

    def _after_linear(
        self, index: int, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor | None:
        if not torch.is_grad_enabled() or not output.requires_grad or self._embedded is None:
            return None
        tapped: Tensor = _Tap.apply(  # type: ignore[no-untyped-call]
            output, inputs[0], partial(self._receive, index)
        )
        return tapped

    def _receive(self, index: int, x: Tensor, delta: Tensor) -> None:
        site = self.linears[index][0]
        delta, x = self._by_row(delta, site), self._by_row(x, site)
        new = self.measure(site.key, delta, x, self._row_weights)
        old = self._received.get(index)
        if old is not None:  # used twice in one forward
            new = SiteGradients(
                old.rows + new.rows,
                None if old.summed is None or new.summed is None else old.summed + new.summed,
            )
        self._received[index] = new

    # -- shapes -------------------------------------------------------------------------------

    def _by_row(self, tensor: Tensor, site: LinearSite) -> Tensor:
        """[m, tokens, features], from whatever leading dimensions the model uses."""
        assert self._embedded is not None
        num_rows, length, _ = self._embedded.shape
        if tensor.shape[0] != num_rows and tensor.shape[:-1] != (num_rows * length,):
            raise ValueError(
                f"pressure: {site.name!r} sees {tuple(tensor.shape)} where {num_rows} sequences of "
                f"{length} tokens run; gradients by sequence need one leading row each. Leave "
                "linears that see routed tokens (experts) out of the probe."
            )
        return tensor.reshape(num_rows, -1, tensor.shape[-1])
