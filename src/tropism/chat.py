"""``tropism chat --run RUN``: ask the tuned model and its base the same thing, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser

from tropism.types import Prompt

if TYPE_CHECKING:
    from tropism.policy import Policy

Answer = Callable[[Prompt], str]


def main(arguments: Sequence[str]) -> None:
    """Entry point of ``tropism chat``."""
    parser = ArgumentParser(prog="tropism chat", description=__doc__)
    parser.add_argument("--run", type=str, required=True, help="run folder, runs/NAME/version_0")
    parser.add_argument("--prompt", type=str, help="ask this one thing and leave")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    options = parser.parse_args(list(arguments))
    base, tuned = load_run(
        Path(options.run),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
    )
    if options.prompt is not None:
        _show(options.prompt, base, tuned)
        return
    print("Ask something; an empty line or Ctrl-D leaves.")
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            return
        if not question:
            return
        _show(question, base, tuned)


def load_run(run: Path, *, max_new_tokens: int, temperature: float) -> tuple[Answer, Answer]:
    """What answers for the base and for the tuned model of a run.

    Raises:
        ValueError: ``run`` is not a run folder, or training in it has not finished.
    """
    import yaml

    from tropism.models import LoRA, Model, load_policy

    config_file = run / "config.yaml"
    if not config_file.is_file():
        versions = sorted(str(path.parent) for path in run.glob("*/config.yaml"))
        hint = f"did you mean {versions[-1]}?" if versions else "give runs/NAME/version_N."
        raise ValueError(f"--run={run}: no config.yaml there, so not a run folder; {hint}")
    arguments = yaml.safe_load(config_file.read_text(encoding="utf-8"))["model"]["init_args"]
    settings = Model(**arguments["model"])

    def answer_with(policy: Policy, *, is_base: bool = False) -> Answer:
        return lambda prompt: _answer(policy, prompt, is_base, max_new_tokens, temperature)

    if arguments["lora"] is not None:
        exported = run / "adapter"
        _require(exported)
        lora = LoRA(**{**arguments["lora"], "dropout": 0.0})
        tuned = load_policy(replace(settings, adapter=str(exported)), lora)
        base = tuned if settings.adapter is None else load_policy(settings, lora)
        return answer_with(base, is_base=base is tuned), answer_with(tuned)
    _require(run / "model")
    tuned = load_policy(replace(settings, name=str(run / "model"), revision=None), None)
    return answer_with(load_policy(settings, None)), answer_with(tuned)


def _require(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is missing: it is written when the run of `fit` ends.")


def _answer(
    policy: Policy, prompt: Prompt, is_base: bool, max_new_tokens: int, temperature: float
) -> str:
    import torch
    from peft import PeftModel

    ids = policy.encode(prompt)
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature > 0
        else {"do_sample": False}
    )
    model = policy.model
    # The policy here *started* from the tuned adapter: its base is what no adapter gives.
    bare = model.disable_adapter() if is_base and isinstance(model, PeftModel) else nullcontext()
    with torch.no_grad(), bare:
        output = policy.base.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=max_new_tokens,
            pad_token_id=policy.pad_token_id,
            eos_token_id=sorted(policy.eos_token_ids),
            **sampling,
        )
    return policy.decode(output[0, len(ids) :].tolist())


def _show(question: str, base: Answer, tuned: Answer) -> None:
    from rich.columns import Columns
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    prompt = Prompt(id="chat", task="chat", messages=({"role": "user", "content": question},))
    # Text, not markup: what the model writes must not be read as formatting.
    panels = [
        Panel(Text(answer(prompt).strip()), title=title, width=58)
        for title, answer in (("base", base), ("tuned", tuned))
    ]
    Console().print(Columns(panels))
