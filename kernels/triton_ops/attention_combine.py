"""Add up the parts that split attention leaves, one row (a token's head) a program.

Parts are added in the order of their keys, and an empty one adds nothing, so that the result does
not depend on how many parts there was room for. Values that were stored through a Hadamard matrix
are turned back here, where it costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_device import LN2, with_sink
from .kv_codes import hadamard_rows
from .launch import Warps, launch
from .shim import jit, tl
from .tiles import padded


@jit
def combine_kernel(
    part_ptr, part_lse_ptr, sinks_ptr, out_ptr, lse_ptr, heads, splits,
    VALUE_DIM: tl.constexpr, PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
    ROTATION: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, heads. ROTATION: the size of the Hadamard matrix, 1 for none."""
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * heads + head
    part_lse_ptr += row * splits
    part_ptr += row * splits * VALUE_DIM
    index = tl.arange(0, SPLITS_PAD)
    part_lse = tl.load(part_lse_ptr + index, mask=index < splits, other=-float("inf"))
    peak = tl.max(part_lse, 0)
    count = tl.max(tl.where(part_lse > -float("inf"), index + 1, 0), 0)
    channel = tl.arange(0, PAD)
    one = tl.zeros((1,), tl.int32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((PAD,), tl.float32)
    for i in range(0, count):
        weight = tl.exp2(tl.load(part_lse_ptr + i + one) - peak)
        mask = (channel < VALUE_DIM) & (weight > 0)
        acc += weight * tl.load(part_ptr + i * VALUE_DIM + channel, mask=mask, other=0.0)
        total += weight
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, -float("inf"), peak + tl.log2(total))
    share = 1.0 / total
    if SINKS:
        lse, kept = with_sink(lse, sinks_ptr, head + one, lse == lse)
        share *= kept
    out = acc * share
    if ROTATION > 1:
        out = tl.reshape(hadamard_rows(tl.reshape(out, (1, PAD)), 1, PAD, ROTATION), (PAD,))
    tl.store(lse_ptr + row + one, lse * LN2)
    tl.store(
        out_ptr + row * VALUE_DIM + channel,
        out.to(out_ptr.dtype.element_ty),
        mask=channel < VALUE_DIM,
    )


def combine(
    parts: Tensor, part_lse: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, rotation: int
) -> None:
    """parts: float32 [tokens, heads, splits, value_dim], part_lse: float32 [tokens, heads, splits]
    in log2, all contiguous, into out [tokens, heads, value_dim] and lse float32 [tokens, heads]."""
    tokens, heads, splits, value_dim = parts.shape
    assert parts.dtype == part_lse.dtype == torch.float32
    args = {
        "part_ptr": parts,
        "part_lse_ptr": part_lse,
        "sinks_ptr": sinks,
        "out_ptr": out,
        "lse_ptr": lse,
        "heads": heads,
        "splits": splits,
    }
    constants = {
        "VALUE_DIM": value_dim,
        "PAD": padded(value_dim),
        "SPLITS_PAD": padded(splits),
        "ROTATION": rotation,
        "SINKS": sinks is not None,
    }
    launch(combine_kernel, (tokens, heads), args, constants, Warps(min(4, -(-value_dim // 64)), 2))
