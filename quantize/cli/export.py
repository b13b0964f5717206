"""`quantize export`: a model or a checkpoint to a file of another program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernels.errors import UserError
from .common import print_json

if TYPE_CHECKING:
    from ..gguf.export import ExportReport


def export(
    model: Annotated[
        str, typer.Argument(help="A model folder, original or quantized, or a Hub id.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")],
    to: Annotated[str, typer.Option("--to", help="The format; gguf is the only one.")] = "gguf",
    file_type: Annotated[
        str,
        typer.Option("--type", help="F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1."),
    ] = "Q8_0",
    pre: Annotated[
        str | None,
        typer.Option(help="llama.cpp's name for the pre-tokenizer, where it is not recognised."),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
) -> None:
    """Write a GGUF file for llama.cpp, tokenizer included.

    Quantized layers whose codes fit the type are carried over without a second rounding: a W4A16
    checkpoint in groups of 32, 64 or 128 becomes Q4_0, an asymmetric one Q4_1, W8A16 Q8_0.

    Example: quantize export ./smollm2-w4 -o smollm2-q4_0.gguf --type Q4_0
    """
    if to.lower() != "gguf":
        raise UserError(f"unknown format '{to}'; --to gguf is the only one")
    from ...calib.source import model_folder
    from ..gguf.export import export_gguf
    from ..gguf.mix import check_file_type

    check_file_type(file_type)
    report = export_gguf(model_folder(model), out, file_type, pre=pre, overwrite=overwrite)
    if as_json:
        print_json(facts(report))
    else:
        _table(report)


def facts(report: ExportReport) -> dict[str, Any]:
    """The report as plain JSON values."""
    totals = {name: total._asdict() for name, total in report.totals.items()}
    return {**report._asdict(), "path": str(report.path), "totals": totals}


def _table(report: ExportReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("type", "tensors", "weights", "bytes", "bits per weight", title=str(report.path))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, total in report.totals.items():
        bits = f"{8 * total.nbytes / total.weights:.3f}"
        row = (name, f"{total.tensors}", f"{total.weights:,}", f"{total.nbytes:,}", bits)
        table.add_row(*row)
    table.add_section()
    tensors = sum(total.tensors for total in report.totals.values())
    bits = f"{report.bits_per_weight:.3f}"
    table.add_row("whole file", f"{tensors}", f"{report.weights:,}", f"{report.nbytes:,}", bits)
    console = Console()
    console.print(table)
    for warning in report.warnings:
        console.print(f"warning: {warning}")
    console.print(f"pre-tokenizer: {report.pre}")
    if report.repacked:
        console.print(f"carried over without a second rounding: {len(report.repacked)} layers")
    if report.rounded_again:
        console.print(
            f"rounded a second time, since {report.file_type} cannot hold their codes: "
            f"{len(report.rounded_again)} layers"
        )
    if report.fallbacks:
        name, why = next(iter(report.fallbacks.items()))
        console.print(f"not {report.file_type}: {len(report.fallbacks)} tensors ({name}: {why})")
