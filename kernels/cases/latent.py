"""Cases of latent attention: DeepSeek-V2-Lite's 16 heads and DeepSeek-V3's 128."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..attention_ops import AttentionOutput
from ..mla_ops import mla_decode_reference
from ..triton_ops.mla_decode import mla_decode
from .case import Bars, Case, Maker, Operands, Size
from .pools import PoolShape, batch_of, batch_operands, kept_parts, pool_of, pool_operands

_IN_CI = {(16, "fp8"), (128, "dense")}


def cases(size: Size) -> Iterator[Case]:
    for heads, form in ((16, "dense"), (16, "fp8"), (128, "dense"), (128, "fp8")):
        if size == "small":
            yield _case(PoolShape(form, 2, 96, 1, 48, torch.float16), min(heads, 32), 32, heads)
        else:
            yield _case(PoolShape(form, 16, 4096, 1, 576, torch.bfloat16), heads, 512, heads)


def _case(s: PoolShape, heads: int, rank: int, label: int) -> Case:
    scale = s.head_dim**-0.5

    def make(maker: Maker) -> Operands:
        q = maker.normal(s.seqs, heads, s.head_dim, dtype=s.dtype)
        batch = batch_operands(maker, s.seqs, s.context)
        return {"q": q, **pool_operands(maker, "cache", s), **batch}

    def run(o: Operands) -> AttentionOutput:
        q = o["q"]
        assert q is not None
        cache = pool_of(o, "cache", s.form, s.head_dim)
        return mla_decode(q, cache, rank, batch_of(o, s.context, 1), scale)

    def reference(o: Operands) -> AttentionOutput:
        q = o["q"]
        assert q is not None
        cache = pool_of(o, "cache", s.form, s.head_dim)
        return mla_decode_reference(q.double(), cache, rank, batch_of(o, s.context, 1), scale)

    # of packed entries the turned channels are 64 bytes a row: 8 or 4 of them for each of 8 warps
    bars = Bars(
        once=kept_parts(s, "cache") if heads <= 16 else (), wide=() if s.fmt else ("cache",),
        tensor_cores="fp16", tile_rows=64 if heads > 16 and s.fmt is None else 16,
    )  # fmt: skip
    operations = 2 * s.seqs * heads * s.context * (s.head_dim + rank)
    name = f"{s.form} heads={label}"
    tolerance = 4 * torch.finfo(s.dtype).eps
    return Case("mla_decode", name, make, run, reference, tolerance, bars, operations,
                ci=(label, s.form) in _IN_CI, by_row=("q", "tables", "lengths"))  # fmt: skip
