"""Cases of `fp4_gemm`: NVFP4 and MXFP4, for the target whose tensor cores take them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..packing import unpack_e2m1
from ..triton_ops.fp4_gemm import FP4Config, fp4_config, fp4_gemm
from .case import Bars, Case, Maker, Operands, Size

_GROUPS = {"NVFP4": 16, "MXFP4": 32}


def cases(size: Size) -> Iterator[Case]:
    small = size == "small"
    shape, dtype = ((192, 512), torch.float16) if small else ((4096, 4096), torch.bfloat16)
    for scheme in _GROUPS:
        for rows in (16, 64, 256):
            yield _case(scheme, (min(rows, 70) if small else rows, *shape), dtype, rows)


def _case(scheme: str, shape: tuple[int, int, int], dtype: torch.dtype, named: int) -> Case:
    config: FP4Config = fp4_config(named)

    def run(o: Operands) -> torch.Tensor:
        x, x_scale, w, w_scale, factor = (o[k] for k in ("x", "x_scale", "w", "w_scale", "factor"))
        assert x is not None and x_scale is not None and w is not None
        assert w_scale is not None and factor is not None
        return fp4_gemm(x, x_scale, w, w_scale, factor, None, dtype, config)

    rows, out_features, in_features = shape
    return Case(
        "fp4_gemm", f"{scheme} M={named}", lambda make: _operands(make, scheme, shape), run,
        _reference, 2 * torch.finfo(dtype).eps,
        Bars(once=("w", "w_scale") if named <= 128 else (), wide=("w",), tensor_cores="fp4"),
        2 * rows * out_features * in_features, ("sm_100",), ci=named == 256,
        by_row=("x", "x_scale"),
    )  # fmt: skip


def _operands(make: Maker, scheme: str, shape: tuple[int, int, int]) -> Operands:
    rows, out_features, in_features = shape

    def scale(count: int) -> torch.Tensor:
        groups = in_features // _GROUPS[scheme]
        if scheme == "MXFP4":
            return make.integers(count, groups, low=124, high=130, dtype=torch.uint8)
        return make.uniform(count, groups, low=0.5, high=2.0, dtype=torch.float8_e4m3fn)

    def codes(count: int) -> torch.Tensor:
        return make.integers(count, in_features // 2, low=0, high=256, dtype=torch.uint8)

    return {
        "x": codes(rows), "x_scale": scale(rows), "w": codes(out_features),
        "w_scale": scale(out_features), "factor": make.uniform(1, low=0.001, high=0.002),
    }  # fmt: skip


def _reference(o: Operands) -> torch.Tensor:
    x, w = (_values(o[name], o[f"{name}_scale"]) for name in ("x", "w"))
    factor = o["factor"]
    assert factor is not None
    return x @ w.T * factor.double()


def _values(packed: torch.Tensor | None, scale: torch.Tensor | None) -> torch.Tensor:
    assert packed is not None and scale is not None
    elements = unpack_e2m1(packed).double()
    value = scale.double() if scale.dtype != torch.uint8 else torch.exp2(scale.double() - 127)
    return elements * value.repeat_interleave(elements.shape[1] // value.shape[1], 1)
