"""`quantize plan`: what a run would give, need and take, before a weight is read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..recipe import Recipe
from .common import model_path, print_json, say, terminal
from .common_options import AsJson, Device, SourceModel
from .recipe_options import takes_recipe

if TYPE_CHECKING:
    from ..planning.modules import ModulePlan
    from ..planning.report import PlanReport


@takes_recipe
def plan(
    model: SourceModel,
    chosen: Recipe,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Where a run would write: checked, nothing is made."),
    ] = None,
    device: Device = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="An existing checkpoint may be replaced.")
    ] = False,
    no_timing: Annotated[
        bool, typer.Option("--no-timing", help="Leave the machine unmeasured: no estimate of time.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="A line for every linear.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a quantization would give, need and take; read no weight and write nothing.

    (A GGUF file is dequantized to the user's cache first, as a run would.)

    Takes the options of `quantize run`, refuses what that refuses, and says of each linear who can
    run it and why not, for how many devices it can be cut, and what to change.

    Example: quantize plan ./SmolLM2-135M-Instruct --scheme W4A16 --group-size 64
    """
    from ..planning.make import plan as make_plan

    report = make_plan(model_path(model), chosen, out, device, overwrite, timed=not no_timing)
    if as_json:
        print_json(as_plain(report))
        return

    from .plan_table import advice_table, module_table, runtime_table, total_table

    for note in report.notes:
        say(note)
    console = terminal()
    console.print(module_table(report, every))
    console.print(runtime_table(report, every))
    console.print(total_table(report))
    if report.advice:
        console.print(advice_table(report))


def as_plain(report: PlanReport) -> dict[str, Any]:
    """The report as one JSON object: schemes in words, reasons by program."""
    return {
        "model": report.model, "recipe": report.recipe.to_dict(), "format": report.layout,
        "device": report.device, "dtype": report.dtype, "streamed": report.streamed,
        "modules": [_module(m) for m in report.modules],
        "unlike_peers": [list(p.modules) for p in report.peers],
        "tied_bytes": report.tied_bytes,
        "tensor_parallel": {str(n): fits for n, fits in report.devices().items()},
        **report.foresight.to_dict(),
        "notes": report.notes,
        "advice": [a._asdict() for a in report.advice],
    }  # fmt: skip


def _module(m: ModulePlan) -> dict[str, Any]:
    from .inspect import describe_scheme

    return {
        **asdict(m),
        "scheme": None if m.scheme is None else describe_scheme(m.scheme),
        "cuts": {str(n): why for n, why in m.cuts.items()},
        **{
            program: None if answer is None else answer._asdict()
            for program, answer in (
                ("lowbit", m.lowbit), ("vllm", m.vllm), ("llama_cpp", m.llama_cpp)
            )
        },
    }  # fmt: skip
