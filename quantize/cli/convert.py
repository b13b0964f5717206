"""`quantize convert`: a quantized checkpoint in another layout."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...kernels.errors import counted
from ..layout_check import FORMATS
from ..sizes import MAX_SHARD_SIZE
from .common import print_json, say
from .common_options import AsJson

if TYPE_CHECKING:
    from ..conversion import ConvertResult


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A quantized checkpoint of any layout.")],
    to: Annotated[str, typer.Option("--to", help=f"{', '.join(FORMATS)} or plain.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="The folder to make. \\[default: CHECKPOINT-FORMAT]"),
    ] = None,
    requantize: Annotated[
        bool,
        typer.Option(
            "--requantize", help="Accept a loss where the numbers do not fit; measure it."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest weight file: 5GB, 500MB, 2GiB, ...")
    ] = MAX_SHARD_SIZE,
    as_json: AsJson = False,
) -> None:
    """Store a checkpoint's numbers in another layout, exactly or not at all.

    plain: the weights as the model's dtype has them, for programs that read no quantized ones.

    Example: quantize convert ./smollm2-w4 --to gptq
    """
    from ..conversion import convert as run

    place = out or checkpoint.resolve().with_name(f"{checkpoint.resolve().name}-{to}")
    result = run(
        checkpoint, place, to,
        requantize=requantize, overwrite=overwrite, max_shard_size=max_shard_size, say=say,
    )  # fmt: skip
    if as_json:
        print_json(asdict(result))
    else:
        _show(result)


def _show(result: ConvertResult) -> None:
    changed = f"{counted(len(result.losses), 'linear')} with a loss"
    kept = "the same numbers" if result.exact else changed
    if result.target_format == "plain":
        kept = "dequantized"
    say(
        f"wrote {result.out}: {result.linears} linears from {result.source_format} to "
        f"{result.target_format}, {kept}, {result.seconds:.1f} s"
    )
    for why in dict.fromkeys(result.losses.values()):
        count = sum(w == why for w in result.losses.values())
        say(f"{count} linears: {why}")
    if result.worst is not None:
        errors = list(result.relative_error.values())
        name, worst = result.worst
        say(
            f"relative weight error: mean {sum(errors) / len(errors):.2e}, worst {worst:.2e} "
            f"({name})"
        )
