"""Weights of a linear laid out once for oneDNN, for as long as nothing else needs them.

Without it oneDNN brings the weight into its own order at each call, which for the few rows of a
decoding step takes as long as the product itself. The results are the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with this weight here: a CPU that has bf16 products."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class PackedLinear:
    """``x -> x @ weight.T + bias`` from a packed copy of ``weight``; without gradients.

    Args:
        weight: [d_out, d_in] bf16; not needed afterwards.
        bias: [d_out] or None.
        num_rows: Rows that the layout is best for; others work as well.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, num_rows: int) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[..., d_in] -> [..., d_out]."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return output
