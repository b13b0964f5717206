"""Cases of RMS norm and gated activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..norm_ops import Gate, gated_mul_reference, rms_norm_reference
from ..triton_ops.norms import gated_mul, rms_norm
from .case import Bars, Case, Maker, Operands, Size


def cases(size: Size) -> Iterator[Case]:
    rows = 3 if size == "small" else 4096
    dtype = torch.float16 if size == "small" else torch.bfloat16
    for width in (576, 4096, 16384):
        yield _norm_case(rows, min(width, 640) if size == "small" else width, width, dtype)
    for gate in ("silu", "gelu", "gelu_tanh"):
        yield _gated_case(rows, 1100 if size == "small" else 14336, gate, dtype)


def _norm_case(rows: int, width: int, label: int, dtype: torch.dtype) -> Case:
    def make(maker: Maker) -> Operands:
        x, residual = (maker.normal(rows, width, dtype=dtype) for _ in range(2))
        return {"x": x, "residual": residual, "weight": maker.normal(width, dtype=dtype)}

    def run(o: Operands) -> tuple[Tensor, ...]:
        x, weight = o["x"], o["weight"]
        assert x is not None and weight is not None
        return rms_norm(x, weight, 1e-5, o["residual"])

    def reference(o: Operands) -> tuple[Tensor, ...]:
        x, weight, residual = o["x"], o["weight"], o["residual"]
        assert x is not None and weight is not None and residual is not None
        return rms_norm_reference((x + residual).double(), weight, 1e-5)

    bars = Bars(once=("x", "residual"), wide=("x", "residual"))
    eps = torch.finfo(dtype).eps
    return Case("rms_norm", f"residual {label}", make, run, reference, eps, bars, ci=label == 4096,
                by_row=("x", "residual"))  # fmt: skip


def _gated_case(rows: int, width: int, gate: Gate, dtype: torch.dtype) -> Case:
    def run(o: Operands) -> Tensor:
        x = o["x"]
        assert x is not None
        return gated_mul(x, gate)

    def reference(o: Operands) -> Tensor:
        x = o["x"]
        assert x is not None
        return gated_mul_reference(x.double(), gate)

    return Case(
        "gated_mul", gate, lambda make: {"x": make.normal(rows, 2 * width, dtype=dtype)}, run,
        reference, torch.finfo(dtype).eps, Bars(once=("x",), wide=("x",)), by_row=("x",),
    )  # fmt: skip
