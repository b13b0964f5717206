"""Keys, or values, of one layer in blocks of tokens: the memory that paged attention reads.

A pool is laid out as kernels/kv_quant.py lays out a cache, its batch axis being the blocks: codes
[blocks, kv_heads, block_size, bytes], scales and offsets [blocks, kv_heads, block_size, groups]. So
one head of one block is one run of memory, and what a pool holds is what `dequantize_kv` says.
A slot is the place of one token: block * block_size + its offset in the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from .bitplanes import plane_widths
from .errors import UserError
from .kv_quant import SCALE_DTYPE, KVCodes, KVFormat, dequantize_kv, quantize_kv

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class BlockPool:
    """codes: floats [blocks, kv_heads, block_size, head_dim] where fmt is None, else uint8 of as
    many bytes as head_dim codes take; scale, offset: float16 [blocks, kv_heads, block_size, groups]
    where the format keeps them; static_scale: float32 [kv_heads], of axis "static"."""

    codes: Tensor
    fmt: KVFormat | None = None
    scale: Tensor | None = None
    offset: Tensor | None = None
    static_scale: Tensor | None = None
    pair: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        return self.codes.shape[1]

    @property
    def block_size(self) -> int:
        return self.codes.shape[2]

    @property
    def head_dim(self) -> int:
        """Heads are whole runs of 8 channels, so that bytes tell their number."""
        width = self.codes.shape[3]
        return width if self.fmt is None else width * 8 // self.fmt.num_bits

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scale, self.offset)
        return sum(part.nbytes for part in parts if part is not None)

    @cached_property
    def form(self) -> PoolForm:
        return PoolForm(self.fmt, self.kv_heads, self.head_dim, self.block_size, self.codes.dtype)


@dataclass(frozen=True, eq=False)
class Step:
    """What the layers of one step have in common. derived: what kernels made of it, see `once`."""

    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made for the first layer that asks for `key` and kept for others."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]


class PoolForm(NamedTuple):
    """What decides which kernel can work on a pool. dtype: of its codes."""

    fmt: KVFormat | None
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        """Such as "int4 a token, rotated, 3 heads of 64, blocks of 16"."""
        heads = f"{self.kv_heads} heads of {self.head_dim}, blocks of {self.block_size}"
        return f"{describe(self.fmt, self.dtype)}, {heads}"


def describe(fmt: KVFormat | None, dtype: torch.dtype) -> str:
    """How a pool keeps its numbers, in words."""
    if fmt is None:
        return str(dtype).removeprefix("torch.")
    share = "static" if fmt.axis == "static" else f"{fmt.group} {fmt.axis} a scale"
    rotated = ", rotated" if fmt.rotate else ""
    return f"{fmt.elements.name} {share}{'' if fmt.symmetric else ', offsets'}{rotated}"


def new_pool(
    blocks: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    fmt: KVFormat | None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    static_scale: Tensor | None = None,
) -> BlockPool:
    """An empty pool, all zeros: a key that is masked must not be NaN. dtype: where fmt is None.

    UserError when the format cannot be kept in such blocks.
    """
    shape = (blocks, kv_heads, block_size)
    if fmt is None:
        return BlockPool(_zeros((*shape, head_dim), dtype, device))
    if head_dim % 8:
        raise UserError(
            f"a quantized KV pool needs heads of a multiple of 8 channels, got {head_dim}; "
            "keep the cache in the model's dtype"
        )
    width = head_dim // 8 * sum(plane_widths(fmt.num_bits))
    codes = _zeros((*shape, width), torch.uint8, device)
    if fmt.axis == "static":
        if static_scale is None:
            raise UserError("a KV format with static scales needs them: none were given")
        scales = static_scale.float().reshape(-1).expand(kv_heads)
        return BlockPool(codes, fmt, static_scale=scales.contiguous().to(device))
    part = _scale_shape(fmt, shape, head_dim)
    scale, offset = (_zeros(part, SCALE_DTYPE, device) for _ in range(2))
    return BlockPool(codes, fmt, scale, None if fmt.symmetric else offset)


def new_pair(
    blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[BlockPool, BlockPool]:  # fmt: skip
    """Empty pools of unquantized keys and values in one memory: one op reads or writes both."""
    both = _zeros((2 * blocks, kv_heads, block_size, head_dim), dtype, device)
    return BlockPool(both[:blocks], pair=both), BlockPool(both[blocks:])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros. On a CPU they take memory where they are written to alone: torch would write them all,
    numpy asks the system for pages that are zero."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


def _scale_shape(fmt: KVFormat, shape: tuple[int, int, int], head_dim: int) -> tuple[int, ...]:
    if fmt.axis == "channels":
        if head_dim % fmt.group:
            raise UserError(f"groups of {fmt.group} channels do not divide a head of {head_dim}")
        return (*shape, head_dim // fmt.group)
    if shape[2] % fmt.group:
        raise UserError(f"groups of {fmt.group} tokens do not divide a block of {shape[2]}")
    return (*shape[:2], shape[2] // fmt.group, head_dim)


class Places(NamedTuple):
    """Where `tokens` (int64; None: all) of a step go: int64, block and offset in it of each."""

    tokens: Tensor | None
    block: Tensor
    offset: Tensor


def places_of(slots: Tensor, block_size: int) -> Places:
    """Of slots int64 [tokens]; -1 is left out."""
    kept = slots >= 0
    tokens = None if bool(kept.all()) else kept.nonzero().squeeze(1)
    slots = slots if tokens is None else slots[tokens]
    return Places(tokens, slots // block_size, slots % block_size)


def write_slots(pool: BlockPool, x: Tensor, slots: Tensor, places: Places | None = None) -> None:
    """Quantize x [tokens, kv_heads, head_dim] into `slots`, int64 [tokens]; -1 is left out. places:
    of the slots, where they are known.

    The definition of a store. Scales over groups of tokens cannot be written a token at a time:
    UserError.
    """
    if pool.fmt is not None and pool.fmt.axis == "tokens":
        raise UserError(
            "a KV format with scales over groups of tokens cannot be written a token at a time; "
            "choose one with scales for each token, such as int4_hadamard"
        )
    tokens, block, offset = places or places_of(slots, pool.block_size)
    if tokens is not None:
        x = x[tokens]
    if pool.fmt is None:
        pool.codes[block, :, offset] = x.to(pool.codes.dtype)
        return
    entries = quantize_kv(x.unsqueeze(2), pool.fmt, pool.static_scale)
    stores = (pool.codes, pool.scale, pool.offset)
    for store, part in zip(stores, entries, strict=True):
        if store is not None and part is not None:
            store[block, :, offset] = part[:, :, 0]


def block_rows(tables: Tensor, kv_heads: int) -> Tensor:
    """int64 [seqs * kv_heads * n]: where the blocks of `tables` [seqs, n] lie for each head, in a
    pool whose axes of blocks and heads are taken as one."""
    head = torch.arange(kv_heads, device=tables.device)[None, :, None]
    return (tables.long()[:, None, :] * kv_heads + head).reshape(-1)


def gather_blocks(
    pool: BlockPool, tables: Tensor, dtype: torch.dtype, rows: Tensor | None = None
) -> Tensor:
    """What the blocks of `tables` (int [seqs, n]) hold: [seqs, kv_heads, n * block_size, head_dim]
    in `dtype`. rows: of `block_rows`, where they are known."""
    if rows is None:
        rows = block_rows(tables, pool.kv_heads)
    seqs, blocks = tables.shape

    def gathered(part: Tensor) -> Tensor:
        taken = part.flatten(0, 1).flatten(1).index_select(0, rows)
        return taken.view(seqs, part.shape[1], blocks * part.shape[2], part.shape[3])

    entries = KVCodes(pool.codes, pool.scale, pool.offset).each(gathered)
    if pool.fmt is None:
        return entries.codes.to(dtype)
    return dequantize_kv(entries, pool.fmt, pool.head_dim, dtype, pool.static_scale)
