"""Sequences in blocks, with keys and values of every stored form, for tests of paged attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lowbit.kernels.attention_ops import AttentionOptions, PagedBatch
from lowbit.kernels.kv_quant import KVFormat
from lowbit.kernels.paged_kv import BlockPool, new_pool, write_slots
from torch import Tensor


def stored_forms(head_dim: int) -> dict[str, KVFormat | None]:
    """The forms that kernels read, by name."""
    return {
        "dense": None,
        "int8": KVFormat("int", 8, True, "channels", head_dim),
        "int8_offsets": KVFormat("int", 8, False, "channels", head_dim),
        "int8_static": KVFormat("int", 8, True, "static"),
        "fp8": KVFormat("float", 8, True, "channels", head_dim),
        "fp8_static": KVFormat("float", 8, True, "static"),
        "int8_g16": KVFormat("int", 8, True, "channels", 16),
        "int4": KVFormat("int", 4, True, "channels", head_dim),
        "int4_rotated": KVFormat("int", 4, False, "channels", head_dim, 0.95, True),
        "int4_g16": KVFormat("int", 4, False, "channels", 16),
    }


class Sequences:
    """`queries` new tokens of sequences of `lengths`, whose keys and values lie in shuffled blocks.

    poison: blocks that no sequence owns, and slots beyond a sequence's end, hold NaN where they
    can.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        queries: Sequence[int],
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 32,
        forms: tuple[KVFormat | None, KVFormat | None] = (None, None),
        block_size: int = 16,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        seed: int = 0,
        poison: bool = True,
    ) -> None:
        self.lengths, self.queries, self.block_size = list(lengths), list(queries), block_size
        self._generator = torch.Generator().manual_seed(seed)
        value_dim = value_dim or head_dim
        counts = [-(-n // block_size) for n in lengths]
        blocks = sum(counts) + 3
        order = torch.randperm(blocks, generator=self._generator).int()
        self.tables = torch.zeros(len(lengths), max([*counts, 1]), dtype=torch.int32)
        for seq, (n, end) in enumerate(zip(counts, torch.tensor(counts).cumsum(0), strict=True)):
            self.tables[seq, :n] = order[int(end) - n : int(end)]
        static = torch.tensor([0.03])
        shape = (blocks, kv_heads, block_size)
        self.keys = new_pool(*shape, head_dim, forms[0], dtype, static_scale=static)
        self.values = new_pool(*shape, value_dim, forms[1], dtype, static_scale=static * 1.5)
        for pool in (self.keys, self.values):
            if pool.fmt is None and poison:
                pool.codes.fill_(torch.nan)
        for seq, n in enumerate(lengths):
            slots = self.slots(seq, 0, n)
            write_slots(self.keys, self._normal(n, kv_heads, head_dim).to(dtype), slots)
            write_slots(self.values, self._normal(n, kv_heads, value_dim).add(0.3).to(dtype), slots)
        self.keys, self.values = (_to(pool, device) for pool in (self.keys, self.values))
        self.q = self._normal(sum(queries), heads, head_dim).to(device, dtype)
        self.batch = batch_of(lengths, queries, self.tables, device)

    def slots(self, seq: int, begin: int, end: int) -> Tensor:
        """int64 [end - begin]: where the tokens of a sequence lie."""
        token = torch.arange(begin, end)
        return self.tables[seq, token // self.block_size].long() * self.block_size + (
            token % self.block_size
        )

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)


def batch_of(
    lengths: Sequence[int], queries: Sequence[int], tables: Tensor, device: torch.device | str
) -> PagedBatch:
    return PagedBatch(
        tables.to(device),
        torch.tensor(list(lengths), dtype=torch.int32, device=device),
        torch.tensor([0, *queries]).cumsum(0).to(device, torch.int32),
        max([*queries, 0]),
        max([*lengths, 0]),
    )


def options(
    heads: int, head_dim: int, *flags: str, device: torch.device | str = "cpu"
) -> AttentionOptions:
    """flags: "window", "softcap", "sinks", "alibi"."""
    slopes = torch.linspace(0.05, 0.5, heads, device=device)
    return AttentionOptions(
        head_dim**-0.5,
        sliding_window=19 if "window" in flags else None,
        softcap=2.0 if "softcap" in flags else None,
        sinks=torch.linspace(-1, 3, heads, device=device) if "sinks" in flags else None,
        alibi_slopes=slopes if "alibi" in flags else None,
    )


def _to(pool: BlockPool, device: torch.device | str) -> BlockPool:
    parts = (pool.scale, pool.offset, pool.static_scale)
    moved = (None if part is None else part.to(device) for part in parts)
    return BlockPool(pool.codes.to(device), pool.fmt, *moved)
