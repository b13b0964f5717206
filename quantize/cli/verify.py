"""`quantize verify`: whether a checkpoint is whole, and what is wrong with it if not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...kernels.errors import counted
from .common import print_json
from .common_options import AsJson

if TYPE_CHECKING:
    from ..verification import VerifyReport

WORST = 5  # weights that --against names


def verify(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a GGUF file.")],
    against: Annotated[
        str | None,
        typer.Option(metavar="BASE", help="The original model, to compare each tensor with."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Examine a checkpoint of any layout: files, index, headers, shapes, scales, codes, side files.

    Each fault comes with the tensor, what was expected, what was found, and what a reader does with
    it. Exit code 0: whole (there may be warnings); 1: not whole.

    Example: quantize verify ./smollm2-w4 --against ./SmolLM2-135M-Instruct
    """
    from ...calib.source import model_folder
    from ..verification import verify as examine

    report = examine(checkpoint, None if against is None else model_folder(against))
    if as_json:
        print_json(_facts(report))
    else:
        _show(report)
    if not report.whole:
        raise typer.Exit(1)


def _facts(report: VerifyReport) -> dict[str, object]:
    return {
        "checkpoint": report.path,
        "whole": report.whole,
        "layout": report.layout,
        "tensors": report.tensors,
        "quantized_linears": report.quantized,
        "findings": list(report.findings),
        "relative_errors": {e.name: e.relative_error for e in report.errors},
    }


def _show(report: VerifyReport) -> None:
    for f in report.findings:
        typer.echo(f"{f.severity}: {f.fault}: {f.where}")
        typer.echo(f"  expected {f.expected}; found {f.found}")
        typer.echo(f"  {f.consequence}")
    if report.errors:
        worst = sorted(report.errors, key=lambda e: -e.relative_error)[:WORST]
        typer.echo("largest relative errors against the original:")
        for e in worst:
            typer.echo(f"  {e.relative_error:.4f}  {e.name}")
    errors = sum(f.severity == "error" for f in report.findings)
    warnings = len(report.findings) - errors
    state = "whole" if report.whole else "not whole"
    typer.echo(
        f"{state}: {report.path}, {report.layout or 'unknown layout'}, "
        f"{counted(report.tensors, 'tensor')}, {counted(report.quantized, 'quantized linear')}, "
        f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
    )
