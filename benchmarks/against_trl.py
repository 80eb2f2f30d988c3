"""Time and memory against TRL 1.16: the same work, each side in its own process, alternating.

    python benchmarks/against_trl.py                       10 to 20 minutes; nothing beside it
    python benchmarks/against_trl.py --only parity         same loss and gradients? nothing timed
    python benchmarks/against_trl.py --model organism --steps 1 --rounds 1       tries it out

The work: SmolLM2-135M-Instruct in bf16 on the CPU, 2 prompts of 64 tokens x 8 completions, LoRA of
rank 16 on all linears, DAPO loss, beta 0, one AdamW step. Completion lengths are forced to be
equal on both sides (58 to 96 tokens, mean 77, EOS included), and so are prompts token by token;
every group has signal, so that no row is skipped. First a parity gate: the same completions must
give both sides the same loss and gradients (benchmarks/parity.py), or nothing is timed.

What is timed: whole steps, from the end of one to the end of the next, as users run them: our GRPO
module under Lightning with the settings of ``tropism fit`` (without logger and callbacks), TRL's
``GRPOTrainer.train`` (without reports, checkpoints and logged completions). ``rollout`` is
generation with decoding, ``reward`` the verifier, ``train`` all else of a step. One step of each
process warms up and is not counted; medians are over all timed steps of a side. Memory is the
peak resident set of a process, imports included, of its leanest process.

TRL's settings: ``gradient_checkpointing`` (default True) is off, as it is here by default, because
it would cost TRL time; ``per_device_train_batch_size`` 4 with 4 accumulated ("TRL 4 x 4") and 16 at
once ("TRL 16 x 1"). dtypes: base weights bf16 and adapters fp32 on both sides; products are in bf16
on both, adapters' included (at TRL by bf16 autocast, its default). ``--trl-precision pure`` leaves
autocast out, and PEFT then multiplies adapters in fp32: slower at either setting on one core (train
16.0 against 13.6 s, and 22.5 against 17.5 s), so autocast is the default here too. TRL samples
through un-merged adapters and runs each prompt once per completion: its transformers path has no
setting for either.

``benchmarks/results/against_trl.json`` is written for the default work only (elsewhere: --output).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
import report
from rich.console import Console
from workload import LAYERS, NUM_WARMUP_STEPS, Workload

RESULTS = Path(__file__).parent / "results" / "against_trl.json"
MICRO_BATCH = 4
DEFAULT = Workload(model="smollm2-135m-instruct", folder="")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT.model, help="alias or folder")
    parser.add_argument("--prompts", type=int, default=DEFAULT.num_prompts)
    parser.add_argument("--group-size", type=int, default=DEFAULT.group_size)
    parser.add_argument("--prompt-tokens", type=int, default=DEFAULT.prompt_tokens)
    parser.add_argument("--max-new-tokens", type=int, default=DEFAULT.max_new_tokens)
    parser.add_argument(
        "--layers", choices=LAYERS, default=DEFAULT.layers, help="layers that carry LoRA"
    )
    parser.add_argument(
        "--steps", type=int, default=DEFAULT.steps, help="timed steps of one process"
    )
    parser.add_argument("--rounds", type=int, default=2, help="processes of each TRL setting")
    parser.add_argument("--only", choices=("parity", "ours", "trl"))
    parser.add_argument("--trl-precision", choices=("autocast", "pure"), default="autocast")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(given)
    if options.steps < 1 or options.rounds < 1:
        parser.error("--steps and --rounds: give at least 1")
    return options


def workload_of(options: argparse.Namespace) -> Workload:
    from tropism.weights import resolve

    return Workload(
        model=options.model,
        folder=str(resolve(options.model)),
        num_prompts=options.prompts,
        group_size=options.group_size,
        prompt_tokens=options.prompt_tokens,
        max_new_tokens=options.max_new_tokens,
        layers=options.layers,
        steps=options.steps,
    )


def check_parity(workload: Workload, *, bf16: bool, console: Console) -> dict[str, Any]:
    """Run the gate.

    Raises:
        SystemExit: The two sides do not compute the same.
    """
    found = processes.run("parity", workload, {"bf16": bf16})
    if found["problems"]:
        raise SystemExit(
            "The two sides do not compute the same thing, so timing them would say nothing:\n- "
            + "\n- ".join(found["problems"])
        )
    single, half = found["float32"], found["bfloat16"]
    console.print(
        f"Parity: float32 losses within {single['loss_error']:.0e}, each gradient within "
        f"{single['worst_tensor_error']:.0e}; bf16 gradients with cosine {half['cosine']:.4f} and "
        f"norm ratio {half['norm_ratio']:.4f} (cosine with float32: tropism "
        f"{found['tropism_bfloat16_with_float32']['cosine']:.4f}, TRL "
        f"{found['trl_bfloat16_with_float32']['cosine']:.4f}).",
        highlight=False,
    )
    return found


def schedule(options: argparse.Namespace, workload: Workload) -> list[processes.Setting]:
    """All processes in order: TRL 4 x 4, ours, TRL 16 x 1, ours, and so on."""
    bf16 = options.trl_precision == "autocast"
    trl = [
        processes.trl_setting(size, workload.num_rows, bf16=bf16)
        for size in dict.fromkeys((MICRO_BATCH, workload.num_rows))
    ]
    alternating = [setting for one in trl for setting in (one, processes.OURS)]
    kinds: dict[str | None, list[processes.Setting]] = {
        None: alternating,
        "ours": [processes.OURS],
        "trl": trl,
    }
    rounds: int = options.rounds
    return kinds[options.only] * rounds


def measure(
    settings: list[processes.Setting], workload: Workload, *, console: Console
) -> dict[str, dict[str, Any]]:
    """Run all processes, check that they did the same work, and sum up each side."""
    answers: dict[str, list[dict[str, Any]]] = {}
    for i, setting in enumerate(settings, start=1):
        answer = processes.run_setting(setting, workload)
        answers.setdefault(setting.name, []).append(answer)
        seconds = ", ".join(f"{step['step']:.2f}" for step in answer["steps"])
        console.print(f"{i}/{len(settings)} {setting.name}: steps of {seconds} s", highlight=False)
    processes.check_same_work(answers)
    sides = {name: report.summary(workload, found) for name, found in answers.items()}
    first = next(iter(answers.values()))[0]
    facts = {name: first[name] for name in ("threads", "trainable", "linear_sizes")}
    return {"sides": sides, "facts": facts}


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    console = Console()
    if warning := processes.why_not_idle():
        console.print(f"[bold yellow]Warning:[/] {warning}", highlight=False)
    provenance = report.provenance()  # of the code that runs, not of what is edited meanwhile
    workload = workload_of(options)
    bf16 = options.trl_precision == "autocast"
    try:
        parity = None
        if options.only in (None, "parity"):
            parity = check_parity(workload, bf16=bf16, console=console)
        if options.only == "parity":
            return
        peak = processes.measured_peak()
        measured = measure(schedule(options, workload), workload, console=console)
    except processes.SideFailedError as error:
        raise SystemExit(str(error)) from error
    sides = measured["sides"]
    title = (
        f"{workload.model}, {workload.num_prompts} x {workload.group_size} completions of "
        f"{sum(workload.lengths) / workload.num_rows:.0f} tokens, LoRA on layers: {workload.layers}"
    )
    console.print(report.table(sides, title=title, peak_gflops=peak["gflops"]))
    if options.only:
        return
    usual = processes.trl_setting(MICRO_BATCH, workload.num_rows, bf16=bf16).name
    ratios = report.ratios(sides, usual=usual)
    console.print(
        f"tropism / {usual}: {ratios['throughput_ratio']:.2f} x the throughput "
        f"({ratios['throughput_ratio_best']:.2f} x TRL's faster setting), "
        f"{ratios['memory_ratio']:.2f} x the memory of TRL's leaner setting.",
        highlight=False,
    )
    output = options.output
    if output is None and replace(workload, steps=DEFAULT.steps) == replace(
        DEFAULT, folder=workload.folder
    ):
        output = RESULTS
    if output is None:
        return
    result = {
        **ratios,
        "sides": sides,
        "lengths": workload.lengths,
        "peak_gflops": peak["gflops"],
        "work": {**workload.state(), "folder": Path(workload.folder).name},
        "warmup_steps": NUM_WARMUP_STEPS,
        "trl_precision": options.trl_precision,
        "parity": parity,
        **measured["facts"],
        **provenance,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console.print(f"Written to {output}", highlight=False)


if __name__ == "__main__":
    main()
