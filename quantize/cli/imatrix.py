"""`quantize imatrix`: how much each input column of a model's matrices matters, for GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...kernels.errors import UserError
from ..recipe import Calibration
from .common import check_apart, model_path, print_json, say
from .common_options import AsJson, Device, SourceModel


def imatrix(
    model: SourceModel,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="The file to write: NAME.gguf, or NAME.dat.")
    ],
    calib: Annotated[
        str, typer.Option(help="wikitext, pydoc, auto, FILE.txt, FILE.jsonl or a Hub id.")
    ] = Calibration.source,
    samples: Annotated[int, typer.Option(help="Calibration rows.")] = Calibration.samples,
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.")] = Calibration.seq_len,
    batch_size: Annotated[int, typer.Option(help="Rows of one forward pass.")] = 8,
    dtype: Annotated[
        str, typer.Option(help="Of forward passes: auto, float32, bfloat16, float16.")
    ] = "float32",
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write an importance matrix, as llama-imatrix would: for `quantize export --imatrix`, or for
    llama-quantize.

    Example: quantize imatrix ./SmolLM2-135M-Instruct -o smollm2.imatrix.gguf
    """
    from ..gguf.imatrix import check_imatrix_name, write_imatrix
    from ..gguf.imatrix_run import Settings, imatrix_of_model, partial_coverage

    check_imatrix_name(out)
    check_apart(out, model)
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; give another name or --overwrite")
    settings = Settings(calib, samples, seq_len, batch_size, dtype, device)
    found = imatrix_of_model(model_path(model), settings)
    write_imatrix(out, found, overwrite)
    partial = partial_coverage(found)
    if as_json:
        print_json({
            "out": out, "entries": len(found.entries), "chunks": found.chunks,
            "chunk_size": found.chunk_size, "datasets": found.datasets,
            "partial": [c._asdict() for c in partial],
        })  # fmt: skip
        return
    say(f"wrote {out}: {len(found.entries)} matrices, {found.chunks} rows of {found.chunk_size}")
    for c in partial:
        say(f"{c.name}: {c.unseen} of {c.experts} experts saw no token; their columns count alike")
