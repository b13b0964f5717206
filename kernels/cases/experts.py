"""Cases of `moe_gemm`: Qwen3-30B-A3B's and Mixtral's experts, few and many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..linear_ops import LinearOperands, LinearProblem
from ..moe_ops import ExpertsProblem, moe_gemm_reference
from ..triton_ops.moe_gemm import default_tiles, moe_gemm
from ..wna16_layout import RUN, WNA16Format, tile_columns, tile_planes, unpack_scales, unpack_words
from .case import Bars, Case, Maker, Operands, Size


class _Shape(NamedTuple):
    fmt: WNA16Format
    tokens: int
    top_k: int
    experts: int
    out_features: int
    in_features: int
    dtype: torch.dtype


def cases(size: Size) -> Iterator[Case]:
    w4, w8 = WNA16Format(4, 128, False), WNA16Format(8, 0, False)
    for fmt, tokens, top_k, experts, out_features, in_features in (
        (w4, 16, 8, 128, 1536, 2048), (w4, 1024, 8, 128, 1536, 2048), (w8, 64, 2, 8, 4096, 4096),
    ):  # fmt: skip
        name = f"w{fmt.num_bits} tokens={tokens} experts={experts}"
        shape = (tokens, top_k, experts, out_features, in_features, torch.bfloat16)
        if size == "small":
            shape = (min(tokens, 40), 2, 4, 96, 256, torch.float16)
        yield _case(_Shape(fmt, *shape), name)


def _case(s: _Shape, name: str) -> Case:
    depth = -(-s.in_features // tile_columns(s.fmt.num_bits))

    def make(maker: Maker) -> Operands:
        groups = s.in_features // s.fmt.group_size if s.fmt.group_size else 1
        words = (s.experts, depth, tile_planes(s.fmt.num_bits), s.out_features, RUN)
        scale = maker.uniform(s.experts, groups, s.out_features, low=0.005, high=0.015)
        ids = maker.integers(s.tokens, s.top_k, low=0, high=s.experts, dtype=torch.int64)
        return {
            "x": maker.normal(s.tokens, s.in_features, dtype=s.dtype),
            "words": maker.integers(*words, low=-(1 << 15), high=1 << 15, dtype=torch.int16),
            "scale": scale.view(torch.int32),
            "ids": ids,
        }

    def run(o: Operands) -> Tensor:
        x, words, scale, ids = (o[name] for name in ("x", "words", "scale", "ids"))
        assert x is not None and words is not None and scale is not None and ids is not None
        return moe_gemm(x, words, scale, ids, s.fmt)

    tiles = default_tiles(s.tokens * s.top_k, s.experts)
    bars = Bars(
        once=("words", "scale") if tiles.block_m == 16 else (), wide=("words",),
        tensor_cores="fp16", tile_rows=tiles.block_n,
    )  # fmt: skip
    operations = 2 * s.tokens * s.top_k * s.out_features * s.in_features
    return Case("moe_gemm", name, make, run, lambda o: _reference(o, s),
                2 * torch.finfo(s.dtype).eps, bars, operations, ci=s.fmt.num_bits == 4,
                floor=_floor)  # fmt: skip


def _floor(o: Operands) -> dict[str, int]:
    """Bytes of the experts that some token goes to; all of them where that is not known."""
    words, scale, ids = o["words"], o["scale"], o["ids"]
    assert words is not None and scale is not None and ids is not None
    used = len(words) if ids.is_meta else len(ids.unique())
    return {"words": words[0].nbytes * used, "scale": scale[0].nbytes * used}


def _reference(o: Operands, s: _Shape) -> Tensor:
    x, words, scale, ids = (o[name] for name in ("x", "words", "scale", "ids"))
    assert x is not None and words is not None and scale is not None and ids is not None
    bits, half = s.fmt.num_bits, 1 << (s.fmt.num_bits - 1)
    group = s.fmt.group_size or s.in_features
    linear = LinearProblem(bits, group, True, s.in_features, s.out_features, s.dtype, "cuda")
    operands = []
    for w, packed in zip(words, scale, strict=True):
        codes = unpack_words(w, bits, s.in_features).to(torch.int16) - half
        operands.append(LinearOperands(codes.to(torch.int8), unpack_scales(packed, False)[0]))
    return moe_gemm_reference(x.double(), operands, ids, ExpertsProblem(linear, s.experts))
