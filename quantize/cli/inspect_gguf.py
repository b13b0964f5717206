"""What a GGUF file holds: metadata, block types, bits per weight; from its table of contents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels.errors import UserError
from .common import print_json, say, terminal

if TYPE_CHECKING:
    from ..gguf.as_folder import Contents
    from ..gguf.reader import GGUFFile

SHOWN = 3  # entries of a long list
LONGEST = 70  # characters of a value


def inspect_gguf(path: Path, every: bool, as_json: bool) -> None:
    """Print the file's metadata, types and sizes; with `every` a line for each tensor."""
    from ..gguf.as_folder import contents
    from ..gguf.reader import GGUFFile

    file = GGUFFile(path)
    found = contents(file)
    if as_json:
        print_json(facts(file, found))
    else:
        _table(file, found, every)
        if (why := import_refusal(file)) is not None:
            say(f"lowbit does not import this file: {why}")


def import_refusal(file: GGUFFile) -> str | None:
    """Why lowbit cannot make a model folder of the file; None where it can."""
    from ..gguf.to_hf import read_hyperparameters, tensor_table

    try:
        tensor_table(file, read_hyperparameters(file))
    except UserError as e:
        return str(e)
    return None


def facts(file: GGUFFile, found: Contents) -> dict[str, Any]:
    """Everything but the contents of long lists, as plain JSON values."""
    return {
        "path": found.path,
        "parts": len(file.paths),
        "metadata": {
            key: f"{len(value)} entries"
            if isinstance(value, list) and len(value) > SHOWN
            else value
            for key, value in file.keys.items()
        },
        "import_refusal": import_refusal(file),
        "file_bytes": found.nbytes,
        "tensor_bytes": found.tensor_bytes,
        "weights": found.weights,
        "bits_per_weight": found.bits_per_weight,
        "types": {kind: total._asdict() for kind, total in found.types.items()},
        "tensors": {
            name: {"type": stored.kind, "shape": list(stored.shape)}
            for name, stored in file.tensors.items()
        },
    }


def shown(value: Any) -> str:
    """A value of the metadata on one line."""
    if isinstance(value, list):
        head = ", ".join(repr(entry) for entry in value[:SHOWN])
        more = f", ... ({len(value):,} entries)" if len(value) > SHOWN else ""
        text = f"[{head}{more}]"
    else:
        text = value if isinstance(value, str) else repr(value)
    text = text.replace("\n", "\\n")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _table(file: GGUFFile, found: Contents, every: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    console = terminal()
    title = found.path if len(file.paths) == 1 else f"{found.path} and its other parts"
    metadata = Table("key", "value", title=Text(title))
    for key, value in file.keys.items():
        metadata.add_row(Text(key), Text(shown(value)))
    console.print(metadata)
    types = Table("type", "tensors", "weights", "bytes", "bits per weight")
    for column in types.columns[1:]:
        column.justify = "right"
    whole = (len(file.tensors), found.weights, found.tensor_bytes)
    rows = [*((kind, *total) for kind, total in found.types.items()), ("all tensors", *whole)]
    for kind, tensors, weights, nbytes in rows:
        if kind == "all tensors":
            types.add_section()
        bits = f"{8 * nbytes / weights:.3f}"
        types.add_row(kind, f"{tensors:,}", f"{weights:,}", f"{nbytes:,}", bits)
    console.print(types)
    console.print(f"{found.nbytes / 1e6:.1f} MB on disk")
    if every:
        tensors_table = Table("tensor", "type", "shape")
        for name, stored in file.tensors.items():
            shape = " x ".join(str(size) for size in stored.shape)
            tensors_table.add_row(Text(name), stored.kind, shape)
        console.print(tensors_table)
