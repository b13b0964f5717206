"""Cases of `wna16_gemm` and of its dequantization: every shipped tile, the dtypes, the formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..linear_ops import LinearOperands, LinearProblem, linear_reference
from ..triton_ops.launch import launch_arch
from ..triton_ops.tiles import GemmConfig
from ..triton_ops.wna16_gemm import LOCK_ROWS, wna16_dequantize, wna16_gemm
from ..wna16_forms import BLOCK_N, wna16_config
from ..wna16_layout import (
    RUN,
    PackedWeight,
    WNA16Format,
    tile_columns,
    tile_planes,
    unpack_scales,
    unpack_words,
)
from .case import Bars, Case, Maker, Operands, Size


class _Shape(NamedTuple):
    fmt: WNA16Format
    dtype: torch.dtype
    rows: int
    out_features: int
    in_features: int

    def config(self, arch: int | str) -> GemmConfig:
        bits = self.fmt.num_bits
        tiles = -(-self.in_features // tile_columns(bits))
        return wna16_config(self.rows, self.out_features, tiles, bits, arch)

    @property
    def label(self) -> str:
        group = f"g{self.fmt.group_size}" if self.fmt.group_size else "channel"
        kind = "asym" if self.fmt.asymmetric else "sym"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"w{self.fmt.num_bits} {group} {kind} {dtype} M={self.rows}"


_W4, _W4_ASYM = WNA16Format(4, 128, False), WNA16Format(4, 128, True)
_SHIPPED = [
    *((_W4, torch.float16, rows) for rows in (16, 32, 64, 128)),
    *((_W4_ASYM, torch.bfloat16, rows) for rows in (16, 32, 64, 128)),
    (WNA16Format(4, 32, True), torch.bfloat16, 16),
    (WNA16Format(4, 0, False), torch.float16, 16),
    (WNA16Format(4, 32, True), torch.bfloat16, 128),
    *((WNA16Format(8, 0, False), torch.bfloat16, rows) for rows in (16, 64)),
    *((WNA16Format(8, 128, False), torch.float16, rows) for rows in (32, 128)),
    *((WNA16Format(3, 128, False), torch.float16, rows) for rows in (16, 32)),
    *((WNA16Format(2, 64, True), torch.bfloat16, rows) for rows in (16, 32, 64)),
]
_IN_CI = {(_W4, 16), *((_W4_ASYM, rows) for rows in (32, 64, 128))}


def cases(size: Size) -> Iterator[Case]:
    shape = (192, 1024) if size == "small" else (4096, 4096)
    for fmt, dtype, rows in _SHIPPED:
        s = _Shape(fmt, torch.float16 if size == "small" else dtype, rows, *shape)
        yield _gemm_case(s, ci=(fmt, rows) in _IN_CI)
    for fmt, dtype in ((_W4, torch.float16), (_W4_ASYM, torch.bfloat16)):
        s = _Shape(fmt, torch.float16 if size == "small" else dtype, 0, *shape)
        yield _dequantize_case(s)


def _gemm_case(s: _Shape, ci: bool) -> Case:
    def run(o: Operands) -> torch.Tensor:
        x, weight = o["x"], _weight(o)
        assert x is not None
        config = s.config(launch_arch(x.device))
        return wna16_gemm(x, weight, o["bias"], s.fmt, config)

    tile = tile_columns(s.fmt.num_bits)
    bars = Bars(
        once=("words", "scale"), wide=("words",), tensor_cores="fp16",
        codes_in_loop=lambda launch: launch.constants["BLOCK_N"] * tile,
        max_logic=1.25 if s.fmt.num_bits == 4 else None,
    )  # fmt: skip
    return Case(
        "wna16_gemm", s.label, lambda make: _operands(make, s), run,
        lambda o: _reference(o, s), 2 * torch.finfo(s.dtype).eps, bars,
        operations=2 * s.rows * s.out_features * s.in_features, ci=ci, by_row=("x",),
    )  # fmt: skip


def _dequantize_case(s: _Shape) -> Case:
    def run(o: Operands) -> torch.Tensor:
        return wna16_dequantize(_weight(o), s.in_features, s.fmt, s.dtype, 0, s.out_features)

    def reference(o: Operands) -> torch.Tensor:
        weight, p = _unpacked(o, s)
        eye = torch.eye(s.in_features, dtype=torch.float64, device=weight.codes.device)
        return linear_reference(eye, weight, None, p).T

    def make(maker: Maker) -> Operands:
        return {k: v for k, v in _operands(maker, s).items() if k not in ("x", "bias")}

    bars = Bars(once=("words", "scale"), wide=("words",))
    label = s.label.rpartition(" M=")[0]
    eps = torch.finfo(s.dtype).eps
    return Case("wna16_dequantize", label, make, run, reference, eps, bars)


def _operands(make: Maker, s: _Shape) -> Operands:
    bits, group = s.fmt.num_bits, s.fmt.group_size
    tile = tile_columns(bits)
    tiles = -(-s.in_features // tile)
    groups = -(-tiles * tile // group) if group else 1
    shape = (tiles, tile_planes(bits), s.out_features, RUN)
    scale = make.uniform(groups, s.out_features, low=0.005, high=0.015).view(torch.int32)
    if s.fmt.asymmetric:
        zero = make.integers(groups, s.out_features, low=0, high=1 << bits, dtype=torch.int32)
        scale = (scale & -256) | zero
    locks = make.integers(
        LOCK_ROWS * -(-s.out_features // BLOCK_N), low=0, high=1, dtype=torch.int32
    )
    return {
        "x": make.normal(s.rows, s.in_features, dtype=s.dtype),
        "words": make.integers(*shape, low=-(1 << 15), high=1 << 15, dtype=torch.int16),
        "scale": scale,
        "locks": locks,
        "bias": make.normal(s.out_features, dtype=s.dtype),
    }


def _weight(o: Operands) -> PackedWeight:
    words, scale, locks = o["words"], o["scale"], o["locks"]
    assert words is not None and scale is not None and locks is not None
    return PackedWeight(words, scale, locks)


def _unpacked(o: Operands, s: _Shape) -> tuple[LinearOperands, LinearProblem]:
    """The weight as the definition takes it."""
    weight, half = _weight(o), 1 << (s.fmt.num_bits - 1)
    group = s.fmt.group_size or s.in_features
    used = -(-s.in_features // group)
    scale, zero = unpack_scales(weight.scale, s.fmt.asymmetric)
    codes = unpack_words(weight.words, s.fmt.num_bits, s.in_features)
    p = LinearProblem(
        s.fmt.num_bits, group, zero is None, s.in_features, s.out_features, s.dtype, "cuda"
    )
    zero = None if zero is None else (zero[:, :used].to(torch.int16) - half).to(torch.int8)
    codes = (codes.to(torch.int16) - half).to(torch.int8)
    return LinearOperands(codes, scale[:, :used], zero), p


def _reference(o: Operands, s: _Shape) -> torch.Tensor:
    weight, p = _unpacked(o, s)
    x, bias = o["x"], o["bias"]
    assert x is not None and bias is not None
    return linear_reference(x.double(), weight, bias.double(), p)
