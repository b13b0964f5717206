"""Cases of `a8_gemm`: W8A8, FP8 by row and by block, W4A8, in every shipped tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..a8_forms import BLOCK_N, a8_config
from ..a8_layout import TILE, A8Weight, unpack_halves
from ..triton_ops.a8_gemm import LOCK_ROWS, a8_gemm
from ..triton_ops.launch import Launch, launch_arch
from .case import Bars, Case, Maker, Operands, Size

_FP8_TARGETS = ("sm_90", "sm_100", "gfx942")


class _Shape(NamedTuple):
    kind: str  # int8, fp8, int4: of the weight
    group: int
    rows: int
    out_features: int
    in_features: int
    dtype: torch.dtype

    @property
    def codes(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.kind == "fp8" else torch.int8

    @property
    def groups(self) -> int:
        return self.in_features // self.group if self.group else 1


_FORMATS = [("int8", 0), ("fp8", 0), ("fp8", 128), ("int4", 128)]
_LABELS = {"int8": "W8A8", "fp8": "FP8", "int4": "W4A8"}
_ROWS = (16, 64, 256, 1024)
_IN_CI = {
    ("int8", 0, 16), ("int8", 0, 1024), ("fp8", 128, 64), ("fp8", 128, 256), ("int4", 128, 16),
    ("int4", 128, 256),
}  # fmt: skip


def cases(size: Size) -> Iterator[Case]:
    shape, dtype = (
        ((192, 1024), torch.float16) if size == "small" else ((4096, 4096), torch.bfloat16)
    )
    for kind, group in _FORMATS:
        for rows in _ROWS:
            ci = (kind, group, rows) in _IN_CI
            some = min(rows, 300) if size == "small" else rows
            yield _case(_Shape(kind, group, some, *shape, dtype), rows, ci)


def _case(s: _Shape, rows: int, ci: bool) -> Case:
    def run(o: Operands) -> torch.Tensor:
        x, x_scale, codes, scale, locks, bias = o.values()
        assert x is not None and x_scale is not None and codes is not None
        tiles, arch = -(-s.in_features // TILE), launch_arch(x.device)
        config = a8_config(rows, s.out_features, tiles, s.kind == "fp8", arch)
        assert scale is not None and locks is not None
        weight = A8Weight(codes, scale, locks)
        return a8_gemm(x, x_scale, weight, bias, s.group, s.dtype, config)

    label = f"{_LABELS[s.kind]} {f'g{s.group}' if s.group else 'channel'} M={rows}"
    once = ("codes", "scale") if rows <= 128 else ()
    unpacks = s.kind == "int4"
    bars = Bars(
        once=once, wide=("codes",), tensor_cores="fp8" if s.kind == "fp8" else "int8",
        codes_in_loop=_codes if unpacks else None,
    )  # fmt: skip
    return Case(
        "a8_gemm", label, lambda make: _operands(make, s), run, lambda o: _reference(o, s),
        2 * torch.finfo(s.dtype).eps, bars, 2 * s.rows * s.out_features * s.in_features,
        _FP8_TARGETS if s.kind == "fp8" else (), ci, by_row=("x", "x_scale"),
    )  # fmt: skip


def _codes(launch: Launch) -> int:
    """Codes of a tile."""
    return launch.constants["BLOCK_N"] * TILE


def _operands(make: Maker, s: _Shape) -> Operands:
    def codes(*shape: int) -> torch.Tensor:
        if s.kind == "fp8":
            return make.normal(*shape, dtype=s.codes)
        return make.integers(*shape, low=-128, high=128, dtype=torch.int8)

    packed = (-(-s.in_features // TILE), s.out_features, TILE // 2)
    grouped = s.groups if s.kind == "fp8" else 1
    return {
        "x": codes(s.rows, s.in_features),
        "x_scale": make.uniform(grouped, s.rows, low=0.005, high=0.015).T,
        "codes": codes(*(packed if s.kind == "int4" else (s.out_features, s.in_features))),
        "scale": make.uniform(s.groups, s.out_features, low=0.005, high=0.015),
        "locks": make.integers(
            LOCK_ROWS * -(-s.out_features // BLOCK_N), low=0, high=1, dtype=torch.int32
        ),
        "bias": make.normal(s.out_features, dtype=s.dtype),
    }


def _reference(o: Operands, s: _Shape) -> torch.Tensor:
    x, x_scale, codes, scale, _, bias = o.values()
    assert x is not None and x_scale is not None and codes is not None
    assert scale is not None and bias is not None
    if s.kind == "int4":
        codes = unpack_halves(codes, s.in_features).to(torch.float64) * 16
    size = s.group or s.in_features
    w = codes.double() * scale.double().T.repeat_interleave(size, 1)
    spread = x_scale.double()
    if spread.shape[1] > 1:
        spread = spread.repeat_interleave(size, 1)
    return (x.double() * spread) @ w.T + bias.double()
