"""What a checkpoint's linears are: bits, scheme and, where lowbit made it, the error of each.

The bits are counted from the shards' headers, the errors come from the quantization_report.json
that a run leaves beside the weights; a folder without one has no errors, an unquantized one no
linears.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from ..calib.safe_files import JsonLimits, read_json_object
from ..quantize.checkpoint.layouts import find_layout
from ..quantize.checkpoint.load import Checkpoint, read_config
from ..quantize.checkpoint.side_files import REPORT
from ..quantize.gguf.as_folder import contents_behind

LIMITS = JsonLimits(256 << 20, 4_000_000)


class LinearResult(NamedTuple):
    """One quantized linear. `bits`: all that is stored in place of its weight, over its weights;
    `relative_error`: output error over output energy on the calibration rows, None where no pass
    has measured it."""

    name: str
    bits: float
    method: str | None
    relative_error: float | None


def linear_results(folder: str | Path) -> list[LinearResult] | None:
    """The linears of a checkpoint's folder in their order; None where none can be read."""
    folder = Path(folder)
    quantization = read_config(folder).get("quantization_config")
    if contents_behind(folder) is not None or not quantization or find_layout(quantization) is None:
        return None
    checkpoint = Checkpoint(folder)
    said = _reported(folder)
    found = [
        LinearResult(
            name,
            _bits(checkpoint, name),
            _of(said.get(name), "method", str),
            _of(said.get(name), "relative_error", float),
        )
        for name in checkpoint.schemes
    ]
    checkpoint.shards.close()
    return found or None


def _bits(checkpoint: Checkpoint, name: str) -> float:
    stored = [n for n in checkpoint.stored_names(name) if ".input" not in n[len(name) :]]
    nbytes = sum(checkpoint.shards.info[n].nbytes for n in stored)
    return 8 * nbytes / math.prod(checkpoint.shape(name))


def _reported(folder: Path) -> dict[str, Any]:
    path = folder / REPORT
    if not path.is_file():
        return {}
    linears = read_json_object(path, LIMITS).get("linears")
    return linears if isinstance(linears, dict) else {}


def _of(said: Any, key: str, kind: type) -> Any:
    """The value of `key` where the report has one of that kind."""
    value = said.get(key) if isinstance(said, dict) else None
    return value if isinstance(value, kind) else None
