"""The numbers inside GGUF blocks that can be wrong by themselves: scales, and sums of codes.

A block's scales are half floats at fixed places (FIELDS); one that is not finite makes all its
weights so. The types that are used while computing, Q8_K and Q8_1, also store sums of their codes,
which have to be those. Rows are looked at a few megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import gguf
import torch
from torch import Tensor

from ..gguf.container import StoredTensor
from ..gguf.reader import read_rows
from .findings import Finding, finding
from .values import LARGEST

CHUNK_BYTES = 1 << 24
FLOATS = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
}  # fmt: skip
FIELDS: dict[str, tuple[int, ...]] = {  # type -> where its half floats begin in a block
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q8_1": (0, 2),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ1_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,),
}  # fmt: skip
LARGEST_EXPONENT = 127 + 14  # of MXFP4's first byte: its largest weight is still a half float
ROPES = ("rope_freqs", "rope_factors")  # where huge factors switch a frequency off


def examine_blocks(path: Path, name: str, stored: StoredTensor) -> Iterator[Finding]:
    """The contents of one tensor of the file `path`."""
    width = stored.nbytes // prod(stored.shape[:-1])
    step = max(1, CHUNK_BYTES // width)
    zero = True
    for start in range(0, prod(stored.shape[:-1]), step):
        rows = read_rows(path, stored, start, start + step)
        zero = zero and not bool(rows.any())
        fault = _fault(stored.kind, rows, bounded=not name.startswith(ROPES))
        if fault is not None:
            expected, found = fault
            yield finding("GGUF block", name, expected, f"{found}, from row {start} on")
            return
    if zero and len(stored.shape) > 1:
        yield finding("all zero", name, "a matrix of other bytes too", "zeros alone")


def _fault(kind: str, rows: Tensor, bounded: bool) -> tuple[str, str] | None:
    """What is wrong with uint8 rows of blocks: what was expected and what was found.

    bounded: whether a number beyond a half float's range is wrong.
    """
    if kind in FLOATS:
        values = rows.view(FLOATS[kind]).float()
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            return "finite numbers", f"{bad} NaN or infinite"
        peak = float(values.abs().max())
        return (f"at most {LARGEST:g}", f"{peak:g}") if bounded and peak > LARGEST else None
    nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = rows.reshape(-1, nbytes)
    bad = sum(int((~torch.isfinite(_halves(blocks, at))).sum()) for at in FIELDS.get(kind, ()))
    if kind == "MXFP4":
        bad = int((blocks[:, 0] > LARGEST_EXPONENT).sum())
    if kind == "Q8_K":
        bad = int((~(blocks[:, :4].contiguous().view(torch.float32).abs() <= LARGEST)).sum())
    if bad:
        return "finite scales of blocks", f"{bad} NaN, infinite or beyond a half float"
    wrong = _wrong_sums(kind, blocks)
    return ("sums of the block's codes", f"{wrong} blocks with others") if wrong else None


def _halves(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _wrong_sums(kind: str, blocks: Tensor) -> int:
    """Blocks whose stored sums are not those of their codes."""
    if kind == "Q8_K":  # d f32, 256 codes, the sums of each 16 as int16
        codes = blocks[:, 4:260].contiguous().view(torch.int8).int().view(-1, 16, 16).sum(-1)
        return int((blocks[:, 260:].contiguous().view(torch.int16) != codes).any(-1).sum())
    if kind == "Q8_1" and blocks.shape[1] == 36:  # d f16, d times the sum f16, 32 codes
        codes = blocks[:, 4:].contiguous().view(torch.int8).float().sum(-1, keepdim=True)
        said, scale = _halves(blocks, 2).float(), _halves(blocks, 0).float()
        off = (said - scale * codes).abs() > 1e-2 * scale.abs() * codes.abs().clamp_min(32)
        return int(off.sum())
    return 0
