"""`quantize export`: a model or a checkpoint to a file of another program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernels.errors import UserError
from ..recipe import Calibration
from .common import check_apart, model_path, print_json, say, terminal
from .common_options import AsJson

if TYPE_CHECKING:
    from ..gguf.export import ExportReport
    from ..gguf.imatrix import Imatrix
    from ..gguf.imatrix_run import Settings

METHODS = ("round", "gptq")
DEFAULT_TYPE = "Q8_0"


def export(
    model: Annotated[
        str, typer.Argument(help="A model folder, original or quantized, a GGUF file, or a Hub id.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")],
    to: Annotated[str, typer.Option("--to", help="The format; gguf is the only one.")] = "gguf",
    file_type: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="Q4_K_M, Q8_0, IQ4_XS, F16, ...: any of llama-quantize's. [default: Q8_0]",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="In place of --type: at most so many bits per weight, types by tensor."),
    ] = None,
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
        typer.Option(
            help="For gptq, --imatrix auto, --budget: wikitext, pydoc, auto, FILE or a Hub id."
        ),
    ] = Calibration.source,
    samples: Annotated[int, typer.Option(help="Calibration rows.")] = Calibration.samples,
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.")] = Calibration.seq_len,
    rotate: Annotated[
        bool,
        typer.Option(help="Turn the model first (QuaRot), which its outputs do not show."),
    ] = False,
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
    as_json: AsJson = False,
) -> None:
    """Write a GGUF file for llama.cpp, tokenizer included.

    Quantized layers whose codes fit the type are carried over without a second rounding: a W4A16
    checkpoint in groups of 32, 64 or 128 becomes Q4_0, an asymmetric one Q4_1, W8A16 Q8_0.

    --method gptq chooses the codes of an original model's linears on calibration text: the same
    types and size, outputs nearer to the model's.

    Example: quantize export ./smollm2-w4 -o smollm2-q4_0.gguf --type Q4_0
    """
    _check_options(to, method, file_type, budget, pure)
    if rotate and imatrix not in (None, "auto"):
        raise UserError(
            f"--rotate turns what linears read, and {imatrix} was measured of the model as it is; "
            "take --imatrix auto"
        )
    from ..gguf.export import export_gguf
    from ..gguf.gptq_run import export_gptq
    from ..gguf.imatrix_run import Settings
    from ..gguf.type_plan import wish
    from ..gguf.writer import to_replace
    from ..sizes import parse_size

    to_replace(out, overwrite)
    check_apart(out, model, *([] if imatrix in (None, "auto") else [imatrix]))
    file_type, types = file_type or DEFAULT_TYPE, list(tensor_type or ())
    wish(file_type, pure, types)
    if not {method, imatrix} & {"gptq", "auto"} and budget is None and calib != Calibration.source:
        say(f"--method round needs no data: the calibration text '{calib}' is not read")
    part = None if split_max_size is None else parse_size(split_max_size, "--split-max-size")
    folder = model_path(model)
    settings = Settings(calib, samples, seq_len)
    with _as_asked(folder, out, rotate) as source:
        weights = _importance(imatrix, source, settings)
        if budget is not None:
            file_type, types = _types_in_budget(budget, source, settings, types, method)
        passes = settings._replace(dtype="auto")  # importance matrices stay in float32
        write = export_gguf if method == "round" else partial(export_gptq, settings=passes)
        report = write(
            source, out, file_type, pure=pure, tensor_types=types, imatrix=weights, pre=pre,
            overwrite=overwrite, split_max_size=part,
        )  # fmt: skip
    if as_json:
        print_json(facts(report))
    else:
        _table(report)


@contextmanager
def _as_asked(folder: Path, out: Path, rotate: bool) -> Iterator[Path]:
    """The model's folder or, with --rotate, a turned copy in float32 beside `out`, which is removed
    on leaving."""
    import torch

    from ..checkpoint.load import Checkpoint
    from ..checkpoint.workspace import workspace
    from ..gguf.metadata import model_name
    from ..rotated_model import write_rotated

    if not rotate:
        yield folder
        return
    if Checkpoint(folder).schemes:
        raise UserError(f"--rotate: {folder} is quantized already; give the original model")
    with workspace(out.with_name(f"{out.name}.rotated")) as scratch:
        copy = scratch / model_name(folder)  # by which the file will call the model
        source = write_rotated(folder, copy, stored=torch.float32)
        say(source.description)
        if source.config_changes:
            say("the output matrix, tied to the embedding until now, is stored beside it")
        yield copy


def _check_options(
    to: str, method: str, file_type: str | None, budget: float | None, pure: bool
) -> None:
    if to.lower() != "gguf":
        raise UserError(f"unknown format '{to}'; --to gguf is the only one")
    if method not in METHODS:
        raise UserError(f"unknown method '{method}'; known: {', '.join(METHODS)}")
    if budget is None:
        return
    if file_type is not None or pure:
        raise UserError("--budget chooses the types itself: leave --type and --pure out")
    if not 1 < budget <= 32:
        raise UserError(f"--budget is over 1 and at most 32 bits per weight, got {budget:g}")


def _importance(imatrix: str | None, folder: Path, settings: Settings) -> Imatrix | None:
    """What --imatrix names: read from a file, or measured."""
    from ..gguf.imatrix import read_imatrix
    from ..gguf.imatrix_run import imatrix_of_model

    if imatrix is None:
        return None
    return imatrix_of_model(folder, settings) if imatrix == "auto" else read_imatrix(imatrix)


def _types_in_budget(
    budget: float, folder: Path, settings: Settings, types: list[str], method: str
) -> tuple[str, list[str]]:
    """The file's type and the tensors' that --budget comes to, those that were asked for first."""
    from tqdm import tqdm

    from ..gguf.budget import budget_types

    with tqdm(desc="sensitivity", unit="layer", disable=None) as bar:
        chosen = budget_types(
            folder, budget, settings, types, method == "gptq", lambda _: bar.update()
        )
    say(
        f"budget {budget:g}: {chosen.bits:.3f} bits per weight, predicted KL divergence "
        f"{chosen.predicted_kld:.4f} (no choice within it has less than {chosen.bound:.4f})"
    )
    return chosen.file_type, [*types, *chosen.tensor_types()]


def facts(report: ExportReport) -> dict[str, Any]:
    """The report as plain JSON values."""
    totals = {name: total._asdict() for name, total in report.totals.items()}
    return {**report._asdict(), "path": str(report.path), "totals": totals}


def _table(report: ExportReport) -> None:
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
    console = terminal()
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
