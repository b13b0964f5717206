"""`quantize export`: a model or a checkpoint to a file of another program."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernels.errors import UserError
from ..recipe import Calibration
from .common import check_apart, model_path, print_json, say

if TYPE_CHECKING:
    from ..gguf.export import ExportReport

METHODS = ("round", "gptq")


def export(
    model: Annotated[
        str, typer.Argument(help="A model folder, original or quantized, a GGUF file, or a Hub id.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")],
    to: Annotated[str, typer.Option("--to", help="The format; gguf is the only one.")] = "gguf",
    file_type: Annotated[
        str,
        typer.Option("--type", help="Q4_K_M, Q8_0, IQ4_XS, F16, ...: any of llama-quantize's."),
    ] = "Q8_0",
    imatrix: Annotated[
        str | None,
        typer.Option(help="An importance matrix (quantize imatrix), or auto to make one first."),
    ] = None,
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(help="PATTERN=TYPE for tensors by name, such as ffn_down=Q6_K (repeat)."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="round, or gptq: rounding errors made up for on calibration text."),
    ] = "round",
    calib: Annotated[
        str,
        typer.Option(help="For gptq and --imatrix auto: wikitext, pydoc, auto, FILE or a Hub id."),
    ] = Calibration.source,
    samples: Annotated[int, typer.Option(help="Calibration rows.")] = Calibration.samples,
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.")] = Calibration.seq_len,
    pure: Annotated[bool, typer.Option(help="One type for all matrices, no mix.")] = False,
    pre: Annotated[
        str | None,
        typer.Option(help="llama.cpp's name for the pre-tokenizer, where it is not recognised."),
    ] = None,
    split_max_size: Annotated[
        str | None,
        typer.Option(help="Cut into parts of at most so many bytes of tensors: 500MB, 2G, ..."),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
) -> None:
    """Write a GGUF file for llama.cpp, tokenizer included.

    Quantized layers whose codes fit the type are carried over without a second rounding: a W4A16
    checkpoint in groups of 32, 64 or 128 becomes Q4_0, an asymmetric one Q4_1, W8A16 Q8_0.

    --method gptq chooses the codes of an original model's linears on calibration text: the same
    types and size, outputs nearer to the model's.

    Example: quantize export ./smollm2-w4 -o smollm2-q4_0.gguf --type Q4_0
    """
    if to.lower() != "gguf":
        raise UserError(f"unknown format '{to}'; --to gguf is the only one")
    if method not in METHODS:
        raise UserError(f"unknown method '{method}'; known: {', '.join(METHODS)}")
    from ..gguf.export import export_gguf
    from ..gguf.gptq_run import export_gptq
    from ..gguf.imatrix import read_imatrix
    from ..gguf.imatrix_run import Settings, imatrix_of_model
    from ..gguf.type_plan import wish
    from ..sizes import parse_size

    check_apart(out, model, *([] if imatrix in (None, "auto") else [imatrix]))
    wish(file_type, pure, tensor_type or ())
    if method == "round" and imatrix != "auto" and calib != Calibration.source:
        say(f"--method round needs no data: the calibration text '{calib}' is not read")
    part = None if split_max_size is None else parse_size(split_max_size, "--split-max-size")
    folder = model_path(model)
    settings = Settings(calib, samples, seq_len)
    weights = None
    if imatrix is not None:
        made = imatrix == "auto"
        weights = imatrix_of_model(folder, settings) if made else read_imatrix(imatrix)
    write = export_gguf if method == "round" else partial(export_gptq, settings=settings)
    report = write(
        folder, out, file_type, pure=pure, tensor_types=tensor_type or (), imatrix=weights, pre=pre,
        overwrite=overwrite, split_max_size=part,
    )  # fmt: skip
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
    if report.parts > 1:
        console.print(f"in {report.parts} parts; a program that reads the first finds the others")
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
    if report.solved:
        mean = sum(report.solved.values()) / len(report.solved)
        console.print(f"GPTQ: {len(report.solved)} matrices, mean relative error {mean:.3g}")
    if report.fallbacks:
        name, why = next(iter(report.fallbacks.items()))
        console.print(f"not {report.file_type}: {len(report.fallbacks)} tensors ({name}: {why})")
