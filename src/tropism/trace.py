"""``tropism trace --config X.yaml``: where in a model facts are recalled, by causal tracing.

Every fact of a file is put to the model; those that it gets right are traced (what is done:
``tropism.measurements.causal_tracing``). A row for each fact goes to
``OUTPUT/records/causal_tracing.jsonl`` as soon as it is done, so that the same command goes on
after a stop. ``--model.adapter RUN`` traces what a run ended with; ``--plan_file`` writes the
layers that were found as a plan for the policy ``Replay``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser

from tropism.lora.plan import SitePlan
from tropism.measurements.disk import explained_disk_full, require_writable
from tropism.measurements.records import RecordTable, read
from tropism.measurements.traced_effects import (
    KINDS,
    ROLES,
    Kind,
    averages,
    effects,
    strongest_layers,
)
from tropism.provenance import RunFile, collect

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

    from tropism.measurements.causal_tracing import Tracing
    from tropism.measurements.facts import TokenizedFact
    from tropism.measurements.traced_decoder import TracedDecoder
    from tropism.models import LoRA, Model
    from tropism.policy import Policy

TABLE = "causal_tracing"


@dataclass(frozen=True)
class FoundPlan:
    """Which of the layers that were found are to train.

    Args:
        k: How many: those with the largest average effect.
        kind: Of what: ``state`` trains all linears of those layers, ``mlp`` those of their MLPs,
            ``attention`` those of their attentions.
        role: At which token.
        rank: Of the adapters that train; the run that replays the plan needs at least that.

    Raises:
        ValueError: An unknown role, or a count below 1.
    """

    k: int = 5
    kind: Kind = "mlp"
    role: str = "last subject"
    rank: int = 16

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"plan.role={self.role!r}: choose from {list(ROLES)}.")
        for name in ("k", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"plan.{name}={getattr(self, name)}: give at least 1.")


def main(arguments: Sequence[str]) -> None:
    """Entry point of ``tropism trace``."""
    from rich.console import Console

    parser = _parser()
    options = parser.instantiate(parser.parse_args(list(arguments)))
    plan_folder = _plan_folder(options.plan_file)
    if options.model.dtype != "float32":
        raise ValueError(
            f"model.dtype={options.model.dtype!r}: effects are differences of probabilities that "
            "bfloat16 rounds away; give float32."
        )
    console = Console()
    policy = trace(
        options.model,
        options.lora,
        facts=options.facts,
        output=options.output,
        tracing=options.tracing,
        device=options.device,
        console=console,
    )
    rows = read(options.output, TABLE).to_dict("records")
    if not any(row["is_known"] for row in rows):
        console.print("The model knows none of these facts: nothing to average.")
        return
    means = averages(effects(rows))
    console.print(summary(means, rows))
    console.print(f"Records: {options.output}", highlight=False, soft_wrap=True)
    if plan_folder is not None:
        layers = write_plan(plan_folder, policy, means, options.plan)
        console.print(
            f"Plan: {options.plan_file}, layers {', '.join(map(str, layers))}",
            highlight=False,
            soft_wrap=True,
        )


def _parser() -> ArgumentParser:
    from tropism.measurements.causal_tracing import Tracing
    from tropism.models import LoRA, Model

    parser = ArgumentParser(prog="tropism trace", description=__doc__)
    parser.add_argument("--config", action="config", help="YAML with these settings")
    parser.add_argument("--model", type=Model, default=Model(dtype="float32"))
    parser.add_argument(
        "--lora", type=LoRA | None, default=None, help="with model.adapter: at least its rank"
    )
    parser.add_argument("--facts", type=str, required=True, help="JSONL: prompt, subject, answer")
    parser.add_argument("--output", type=str, required=True, help="folder for the records")
    parser.add_argument("--tracing", type=Tracing, default=Tracing())
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda, cuda:1, mps")
    parser.add_argument(
        "--plan_file", type=str | None, default=None, help="FOLDER/records/plans.jsonl"
    )
    parser.add_argument("--plan", type=FoundPlan, default=FoundPlan())
    return parser


def trace(
    model: Model,
    lora: LoRA | None,
    *,
    facts: str,
    output: str,
    tracing: Tracing,
    device: str,
    console: Console,
) -> Policy:
    """Trace what the output folder does not have yet; gives the model that was traced.

    Raises:
        ValueError: Bad facts, or a folder with records of other settings.
    """
    from tropism.measurements.facts import read_facts, tokenize
    from tropism.measurements.traced_decoder import TracedDecoder
    from tropism.models import LoRA, identity, load_policy

    words = read_facts(facts)
    require_writable(output)
    policy = load_policy(model, LoRA() if model.adapter is not None and lora is None else lora)
    policy.model.to(device)
    policy.model.eval()
    digest = hashlib.sha256(Path(facts).read_bytes()).hexdigest()
    file = _open(
        Path(output),
        model=identity(model, policy),
        facts={"sha256": digest},
        tracing=asdict(tracing),
    )
    table = RecordTable(output, TABLE)
    table.mend()
    done = {row["prompt"] for row in table.rows()}
    tokenized = tokenize(words, policy.tokenizer)
    with policy.merged(), explained_disk_full(output):
        decoder = TracedDecoder(policy.base, policy.head)
        rows = traced_rows(decoder, tokenized, done=done, tracing=tracing)
        for number, row in enumerate(rows, start=len(done) + 1):
            table.append([row], rollout=0, step=0)
            console.print(f"{number} of {len(words)} {_told(row)}", highlight=False, markup=False)
    known = sum(row["is_known"] for row in table.rows())
    file.finish({"facts": len(words), "known": known})
    return policy


def _open(folder: Path, **settings: Any) -> RunFile:
    """``run.json`` of the folder, which must be a new one or of a tracing of the same settings."""
    file = RunFile(folder)
    if before := file.read():
        then = before.get("trace")
        if then is None:
            raise ValueError(f"output={str(folder)!r} is the folder of a run: give another one.")
        for name, value in settings.items():
            if then.get(name) != value:
                raise ValueError(
                    f"output={str(folder)!r} has a tracing of another {name} ({then.get(name)}, "
                    f"now {value}): give another folder, or the {name} of then."
                )
    seed, data = settings["tracing"]["seed"], {"facts": settings["facts"]}
    file.start({**collect(seed=seed, model=settings["model"], data=data), "trace": settings})
    return file


def traced_rows(
    decoder: TracedDecoder,
    facts: Sequence[TokenizedFact],
    *,
    done: set[str],
    tracing: Tracing,
) -> Iterator[dict[str, Any]]:
    """A row for each fact whose prompt is not among ``done``; effects of known ones alone."""
    from tropism.measurements.causal_tracing import TracedFact, draw_noise
    from tropism.measurements.traced_decoder import subject_deviation

    deviation = tracing.noise * subject_deviation(decoder, facts)
    width = decoder.embed(facts[0].ids).shape[-1]
    for fact in facts:
        if fact.fact.prompt in done:
            continue
        shape = (tracing.num_copies, fact.end - fact.start, width)
        noise = draw_noise(fact.fact, shape, deviation=deviation, seed=tracing.seed)
        traced = TracedFact(decoder, fact, noise, max_tokens=tracing.max_tokens)
        found: dict[str, Any] = dict.fromkeys(KINDS)
        if traced.is_known:
            found = {kind: traced.effects(kind, tracing.window) for kind in KINDS}
        yield {
            **asdict(fact.fact),
            "answer_tokens": fact.num_answer_tokens,
            "is_known": traced.is_known,
            "clean": traced.clean,
            "corrupted": traced.corrupted,
            "tokens": [fact.texts[place] for place in fact.traced],
            "roles": list(fact.roles),
            **found,
        }


def _told(row: Mapping[str, Any]) -> str:
    asked = f"{row['prompt']}{row['answer']}: {row['clean']:.3f}"
    if not row["is_known"]:
        return f"{asked}, not known"
    return f"{asked} clean, {row['corrupted']:.3f} corrupted"


def summary(means: pd.DataFrame, rows: Sequence[Mapping[str, Any]]) -> Table:
    """The largest average effect of each role and kind, and the layer where it is."""
    from rich.table import Table

    known = [row for row in rows if row["is_known"]]
    clean, corrupted = (sum(r[n] for r in known) / len(known) for n in ("clean", "corrupted"))
    table = Table(
        title=f"Largest average indirect effect, and its layer: {len(known)} known of {len(rows)} "
        f"facts, p(answer) {clean:.3f} clean, {corrupted:.3f} corrupted"
    )
    table.add_column("token")
    for heading in ("facts", "state", "MLPs", "attentions"):
        table.add_column(heading, justify="right")
    for role in ROLES:
        own = means[means["role"] == role]
        if own.empty:
            continue
        best = [own[own["kind"] == kind].nlargest(1, "effect").iloc[0] for kind in KINDS]
        cells = [f"{row['effect']:+.3f} at {int(row['layer'])}" for row in best]
        table.add_row(role, str(int(best[0]["num_facts"])), *cells)
    return table


def _plan_folder(plan_file: str | None) -> Path | None:
    """The folder that ``Replay`` calls a run."""
    if plan_file is None:
        return None
    path = Path(plan_file)
    if path.name != "plans.jsonl" or path.parent.name != "records":
        raise ValueError(
            f"plan_file={plan_file!r}: Replay reads FOLDER/records/plans.jsonl; name it so."
        )
    return path.parent.parent


def write_plan(folder: Path, policy: Policy, means: pd.DataFrame, plan: FoundPlan) -> list[int]:
    """Write the plan in which the found layers train and nothing else; gives these layers."""
    from tropism.forward.trunk import layers_of
    from tropism.measurements.traced_decoder import part_name

    layers = strongest_layers(means, kind=plan.kind, role=plan.role, k=plan.k)
    inside = ""
    if plan.kind != "state":
        inside = f".{part_name(layers_of(policy.base)[0], plan.kind)}."
    rows = []
    for site in policy.sites:
        is_found = site.layer in layers and inside in site.name
        state: Literal["TRAIN", "OFF"] = "TRAIN" if is_found else "OFF"
        entry = SitePlan(site.layer, site.module, state, plan.rank if is_found else 0)
        score = None if site.layer is None else layers.get(site.layer)
        rows.append((0, 0, {"policy": "CausalTracing", **asdict(entry), "score": score}))
    RecordTable(folder, "plans").replace(rows)
    return list(layers)
