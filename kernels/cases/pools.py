"""Operands of the ops on KV pools: random blocks of each form, and sequences that lie in them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..attention_ops import PagedBatch
from ..kv_quant import KVFormat
from ..paged_kv import BlockPool, new_pool
from .case import Maker, Operands

BLOCK_SIZE = 16


def kv_form(name: str, head_dim: int) -> KVFormat | None:
    """ "dense", "int8", "fp8", "int4" (rotated, with offsets) or "int4_g32"."""
    match name:
        case "int8":
            return KVFormat("int", 8, True, "channels", head_dim)
        case "fp8":
            return KVFormat("float", 8, True, "channels", head_dim)
        case "int4":
            return KVFormat("int", 4, False, "channels", head_dim, 0.95, True)
        case "int4_g32":
            return KVFormat("int", 4, False, "channels", 32)
    assert name == "dense", name
    return None


class PoolShape(NamedTuple):
    """Blocks for `seqs` sequences of `context` keys, whole blocks each, and no others."""

    form: str
    seqs: int
    context: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def fmt(self) -> KVFormat | None:
        return kv_form(self.form, self.head_dim)


def pool_operands(make: Maker, name: str, s: PoolShape) -> Operands:
    """The parts of a pool of random numbers, as `pool_of` takes them."""
    pool = empty_pool(s, "meta")
    shape, fmt = tuple(pool.codes.shape), s.fmt
    if fmt is None:
        codes = make.normal(*shape, dtype=s.dtype)
    elif fmt.kind == "float":
        codes = make.normal(*shape, dtype=torch.float32, std=60.0)
        codes = codes.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = make.integers(*shape, low=0, high=256, dtype=torch.uint8)
    scale = offset = None
    if pool.scale is not None:
        peak = fmt.elements.highest if fmt else 1.0
        low, high = 1.0 / peak, 3.0 / peak
        scale = make.uniform(*pool.scale.shape, low=low, high=high, dtype=torch.float16)
    if pool.offset is not None:
        offset = make.normal(*pool.offset.shape, std=0.2)
    return {name: codes, f"{name}_scale": scale, f"{name}_offset": offset}


def empty_pool(s: PoolShape, device: torch.device | str) -> BlockPool:
    blocks = s.seqs * -(-s.context // BLOCK_SIZE)
    return new_pool(blocks, s.kv_heads, BLOCK_SIZE, s.head_dim, s.fmt, s.dtype, device)


def pool_of(o: Operands, name: str, form: str, head_dim: int) -> BlockPool:
    codes = o[name]
    assert codes is not None
    return BlockPool(codes, kv_form(form, head_dim), o[f"{name}_scale"], o[f"{name}_offset"])


def batch_operands(make: Maker, seqs: int, context: int) -> Operands:
    """Sequences whose blocks lie all over the pool."""
    blocks = context // BLOCK_SIZE
    order = torch.arange(seqs * blocks, device=make.device) * 7919 % (seqs * blocks)
    return {
        "tables": order.view(seqs, blocks).to(torch.int32),
        "lengths": torch.full((seqs,), context, dtype=torch.int32, device=make.device),
    }


def batch_of(o: Operands, context: int, queries: int) -> PagedBatch:
    """Of the sequences in `o`, as many as there are, each with `queries` new tokens."""
    tables, lengths = (_some(o[name]) for name in ("tables", "lengths"))
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device) * queries
    return PagedBatch(tables, lengths, starts, queries, context)


def kept_parts(s: PoolShape, name: str) -> tuple[str, ...]:
    """The operands that hold the pool `name`: codes, and scales and offsets where it has them."""
    pool = empty_pool(s, "meta")
    parts = {"": pool.codes, "_scale": pool.scale, "_offset": pool.offset}
    return tuple(name + part for part, held in parts.items() if held is not None)


def _some(part: Tensor | None) -> Tensor:
    assert part is not None
    return part
