"""`quantize inspect`: what a checkpoint holds, from headers alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import print_json, terminal
from .common_options import AsJson

if TYPE_CHECKING:
    from ..spec import LayerScheme, QuantSpec


def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(help="A model folder, original or quantized, or a GGUF file.")
    ],
    every: Annotated[
        bool, typer.Option("--all", help="A line for every linear, or every tensor of a file.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print a checkpoint's layers, schemes, bits per weight and size; a GGUF file's metadata.

    Example: quantize inspect ./smollm2-w4
    """
    from ..gguf.as_folder import is_gguf

    if is_gguf(checkpoint):
        from .inspect_gguf import inspect_gguf

        inspect_gguf(checkpoint, every, as_json)
        return
    from ...evals.size import size_report
    from ..checkpoint.load import Checkpoint

    opened = Checkpoint(checkpoint)
    modules = {name: describe_scheme(scheme) for name, scheme in opened.schemes.items()}
    kept = Counter(
        str(info.dtype).removeprefix("torch.")
        for name, info in opened.shards.info.items()
        if name.rpartition(".")[0] not in modules
    )
    facts = {
        "model_type": opened.config.get("model_type"),
        "layers": opened.config.get("num_hidden_layers"),
        "layout": None if opened.layout is None else opened.layout.name,
        "warnings": opened.warnings,
        "schemes": dict(Counter(modules.values())),
        "unquantized_tensors": dict(kept),
        "size": size_report(checkpoint)._asdict(),
        "modules": modules,
    }
    if as_json:
        print_json(facts)
        return
    _table(checkpoint, facts, every)


def describe_scheme(scheme: LayerScheme) -> str:
    """A scheme in words, such as "float8, Channel(); inputs float8, Token(), dynamic"."""
    inputs = scheme.input_activations
    if inputs is None:
        return describe(scheme.weights)
    when = "dynamic" if inputs.dynamic else "static"
    return f"{describe(scheme.weights)}; inputs {describe(inputs)}, {when}"


def describe(spec: QuantSpec) -> str:
    """How a tensor is stored in words, such as "int4 symmetric, Group(size=64)"."""
    kind = f"{spec.type}{spec.num_bits}"
    if spec.type == "int":
        kind += " symmetric" if spec.symmetric else " asymmetric"
    scales = {"model": "", "e4m3": ", E4M3 scales", "e8m0": ", power-of-two scales"}
    return f"{kind}, {spec.granularity}{scales[spec.scale_dtype]}"


def _table(checkpoint: Path, facts: dict[str, Any], every: bool) -> None:
    from rich.table import Table

    size = facts["size"]
    table = Table(title=str(checkpoint), show_header=False)
    table.add_row("model", f"{facts['model_type']}, {facts['layers']} layers")
    if facts["layout"] is not None:
        table.add_row("layout", facts["layout"])
    for warning in facts["warnings"]:
        table.add_row("warning", warning)
    for scheme, count in facts["schemes"].items():
        table.add_row("quantized", f"{count} linears: {scheme}")
    for dtype, count in facts["unquantized_tensors"].items():
        table.add_row("as they were", f"{count} tensors in {dtype}")
    table.add_row("files", f"{size['file_bytes'] / 1e6:.1f} MB")
    if size["bits_per_weight"] is not None:
        table.add_row("bits per weight", f"{size['bits_per_weight']:.3f} over the whole model")
    if size["quantized_bits_per_weight"] is not None:
        table.add_row("", f"{size['quantized_bits_per_weight']:.3f} over the quantized linears")
    if every:
        for name, scheme in facts["modules"].items():
            table.add_row(name, scheme)
    terminal().print(table)
