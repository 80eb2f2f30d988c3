"""The smallest adapter that is the same function: only the components in use, each at its place.

Modules whose B is 0 are left out, and so are single components whose column of B is 0; ranks that
differ are told to PEFT by ``rank_pattern`` and ``alpha_pattern``. vLLM and others that read no
patterns need the portable export (``tropism.lora.export``).
"""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel
from torch import Tensor

from tropism.lora.export import folded, plain_lora, write_adapter


def export_compact(
    model: PeftModel,
    folder: str | Path,
    *,
    adapter_name: str = "default",
    base_model_name_or_path: str | None,
) -> Path:
    """Write ``folder`` for stock ``PeftModel.from_pretrained(base, folder)``.

    Which components are in use is read off B, whatever a plan says: what is frozen is applied too.
    All of them are the model's own, bit for bit, scaling folded in. Logits differ by exactly 0
    from the un-merged forward (fp32 and bf16 bases) where each module is left out or keeps
    all its components. A product with fewer components is another matrix product, which may round
    its last bit otherwise: some 1e-7 of the logits in fp32, and a bf16 base shows most of it as 0.
    An adapter that never trained is written as one component of value 0, and loads.

    Args:
        model: On the base weights that the adapter belongs to, each module active whose B is not
            0 (as under ``tropism.lora.placement``); not changed.
        folder: Replaced as a whole; half an adapter is never there.
        adapter_name: Which of the model's adapters.
        base_model_name_or_path: What ``AutoPeftModel`` is to load as base; None leaves it open.

    Returns:
        ``folder``.

    Raises:
        ValueError: As ``export_portable``, or module names that patterns cannot tell apart.
    """
    config, layers = plain_lora(model, adapter_name)
    pairs = {name: folded(name, layer, adapter_name) for name, layer in layers.items()}
    in_use = {name: pair for name, (a, b) in pairs.items() if len((pair := _in_use(a, b))[0])}
    if not in_use:
        name, (a, b) = next(iter(pairs.items()))
        in_use = {name: (a[:1], b[:, :1])}
    return write_adapter(
        folder, in_use, like=config, base_model_name_or_path=base_model_name_or_path
    )


def _in_use(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    components = b.any(dim=0)  # (R,)
    return a[components], b[:, components]
