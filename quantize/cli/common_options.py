"""Arguments and options that mean the same in several commands."""

from __future__ import annotations

from typing import Annotated

import typer

ServedModel = Annotated[
    str, typer.Argument(help="Model folder, original or quantized, a GGUF file, or a Hub id.")
]
SourceModel = Annotated[str, typer.Argument(help="A model folder, a GGUF file, or a Hub id.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="Of activations: auto, float32, bfloat16, float16.")]
Speculate = Annotated[
    str | None,
    typer.Option(help="Guess ahead and verify: ngram, lookahead, or a smaller model's folder."),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="The same bits whatever runs beside a request and however it is cut; slower.",
    ),
]
LinearKernel = Annotated[
    str | None,
    typer.Option(
        "--linear-kernel",
        help="The kernel of all packed linears, such as w4a8_cpu; --verbose names those taken.",
    ),
]
HeadBits = Annotated[
    int | None,
    typer.Option(
        "--head-bits",
        help="8 rounds the output head to 8 bits when it is loaded: a small model's tokens come"
        " faster, for a little accuracy. Left out, it is as it is stored.",
    ),
]
CudaGraphs = Annotated[
    bool,
    typer.Option(
        help="On a GPU, launch decode steps as CUDA graphs: faster, for some memory and a slower"
        " start.",
    ),
]
AsyncScheduling = Annotated[
    bool, typer.Option(help="On a GPU, plan a step while the one before runs.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")]
