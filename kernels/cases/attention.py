"""Cases of paged attention: decode and prefill over every stored form, head sizes, flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention_ops import (
    AttentionOptions,
    AttentionOutput,
    PagedBatch,
    paged_attention_reference,
)
from ..paged_kv import BlockPool
from ..triton_ops.launch import Launch
from ..triton_ops.paged_attention import Form, default_tiles, paged_attention
from .case import Bars, Case, Maker, Operands, Size
from .pools import (
    PoolShape,
    batch_of,
    batch_operands,
    empty_pool,
    kept_parts,
    pool_of,
    pool_operands,
)


class _Shape(NamedTuple):
    seqs: int
    context: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    key: str
    value: str
    dtype: torch.dtype
    flags: str = ""

    @property
    def options(self) -> AttentionOptions:
        """gpt-oss's, Gemma 2's or a plain decoder's; queries come turned."""
        scale, window = self.head_dim**-0.5, self.context // 2
        return AttentionOptions(
            scale, window if "window" in self.flags else None,
            50.0 if "softcap" in self.flags else None, rotated_queries=True,
        )  # fmt: skip

    @property
    def form(self) -> Form:
        return "split" if self.queries == 1 else "whole"

    def pool(self, form: str) -> PoolShape:
        return PoolShape(form, self.seqs, self.context, self.kv_heads, self.head_dim, self.dtype)


_FORMS = (
    ("dense", "dense"), ("int8", "int8"), ("fp8", "fp8"), ("int8", "int4"), ("int4", "int4"),
    ("int4_g32", "int4_g32"),
)  # fmt: skip
_SIZES = ((64, 9, 3), (128, 32, 8), (256, 16, 8))
_ALL_SIZES = ("dense", "int8", "int4")  # forms of keys that are audited with each of them
_IN_CI = {
    *((form, 1, 128) for form in ("dense", "int8", "fp8", "int4", "int4_g32")),
    ("int8", 1, 64), ("int4", 1, 256), ("dense", 512, 128), ("int8", 512, 128), ("int4", 512, 256),
}  # fmt: skip


_FLAGGED = {"window sinks": (64, 64, 8), "window softcap": (256, 16, 8)}


def cases(size: Size) -> Iterator[Case]:
    small = size == "small"
    for queries in (1, 512):
        for key, value in _FORMS:
            for head_dim, heads, kv_heads in (
                _SIZES if key in _ALL_SIZES and key == value else (_SIZES[1:2])
            ):
                shape = (2, 96, min(queries, 24), 2, 1, 32) if small else (
                    16, 4096, queries, heads, kv_heads, head_dim)  # fmt: skip
                dtype = torch.float16 if small else torch.bfloat16
                s = _Shape(*shape, key, value, dtype)
                name = f"{'decode' if queries == 1 else 'prefill'} {key} {value} D={head_dim}"
                yield _case(s, name, key == value and (key, queries, head_dim) in _IN_CI)
        for flags, (head_dim, heads, kv_heads) in _FLAGGED.items():
            shape = (2, 96, min(queries, 24), 2, 1, 32) if small else (
                16, 4096, queries, heads, kv_heads, head_dim)  # fmt: skip
            dtype = torch.float16 if small else torch.bfloat16
            s = _Shape(*shape, "int8", "int8", dtype, flags)
            name = f"{'decode' if queries == 1 else 'prefill'} int8 int8 D={head_dim} {flags}"
            yield _case(s, name, False)


def _case(s: _Shape, name: str, ci: bool) -> Case:
    def make(maker: Maker) -> Operands:
        q = maker.normal(s.seqs * s.queries, s.heads, s.head_dim, dtype=s.dtype)
        batch = batch_operands(maker, s.seqs, s.context)
        stored = pool_operands(maker, "keys", s.pool(s.key))
        sinks = maker.normal(s.heads, dtype=torch.float32) if "sinks" in s.flags else None
        stored |= pool_operands(maker, "values", s.pool(s.value))
        return {"q": q, **stored, **batch, "sinks": sinks}

    def run(o: Operands) -> AttentionOutput:
        return paged_attention(*_inputs(o, s), s.options._replace(sinks=o["sinks"]))

    def reference(o: Operands) -> AttentionOutput:
        q, keys, values, batch = _inputs(o, s)
        options = s.options._replace(sinks=o["sinks"])
        return paged_attention_reference(q.double(), keys, values, batch, options)

    decode = s.queries == 1
    keys, values = (empty_pool(s.pool(name), "meta").form for name in (s.key, s.value))
    parts = (*kept_parts(s.pool(s.key), "keys"), *kept_parts(s.pool(s.value), "values"))
    # packed tiles of prefill are small, and read from the L2 cache
    wide = ("keys", "values") if decode or s.key == s.value == "dense" else ()
    bars = Bars(
        once=parts if decode and "window" not in s.flags else (), wide=wide,
        tensor_cores="fp16", tile_rows=default_tiles(s.form, keys, values, s.heads).block_m,
        codes_in_loop=None if s.key == "dense" else _codes_in_loop,
    )  # fmt: skip
    seen = s.context if decode else s.context - s.queries // 2
    operations = 4 * s.seqs * s.queries * s.heads * seen * s.head_dim
    tolerance = 4 * torch.finfo(s.dtype).eps
    return Case("paged_attention", name, make, run, reference, tolerance, bars, operations, ci=ci,
                by_row=("q", "tables", "lengths") if decode else ())  # fmt: skip


def _codes_in_loop(launch: Launch) -> int:
    return launch.constants["BLOCK_N"] * (
        launch.constants["HEAD_DIM"] + launch.constants["VALUE_DIM"]
    )


def _inputs(o: Operands, s: _Shape) -> tuple[Tensor, BlockPool, BlockPool, PagedBatch]:
    q = o["q"]
    assert q is not None
    keys, values = (
        pool_of(o, name, form, s.head_dim) for name, form in (("keys", s.key), ("values", s.value))
    )
    return q, keys, values, batch_of(o, s.context, s.queries)
