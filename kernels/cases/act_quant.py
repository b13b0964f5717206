"""Cases of `act_quant`: alone, and fused into RMSNorm and SiLU * up."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..activations import ActivationFormat
from ..elements import E4M3, int_elements
from ..norm_ops import gated_mul_reference, rms_norm_reference
from ..triton_ops.act_quant import Quantized, act_quant, rms_norm_quant, silu_mul_quant
from .case import Bars, Case, Maker, Operands, Size

_EPS = 1e-5
_INT8 = ActivationFormat(int_elements(8))
_FORMATS = {"int8": _INT8, "fp8": ActivationFormat(E4M3), "fp8 g128": ActivationFormat(E4M3, 128)}
_FP8_TARGETS = ("sm_90", "sm_100", "gfx942")


def cases(size: Size) -> Iterator[Case]:
    rows, dtype = (3, torch.float16) if size == "small" else (128, torch.bfloat16)
    widths = {"plain": 4096, "rms_norm": 4096, "silu_mul": 14336}
    for source, width in widths.items():
        columns = 1024 if size == "small" else width
        for name, fmt in _FORMATS.items():
            yield _case(source, name, fmt, (rows, columns), dtype)


def _case(
    source: str, name: str, fmt: ActivationFormat, shape: tuple[int, int], dtype: torch.dtype
) -> Case:
    def make(maker: Maker) -> Operands:
        operands: Operands = {"x": maker.normal(*shape, dtype=dtype)}
        if source == "rms_norm":
            operands["weight"] = maker.normal(shape[1], dtype=dtype)
        if source == "silu_mul":
            operands["up"] = maker.normal(*shape, dtype=dtype)
        return operands

    def run(o: Operands) -> Quantized:
        x, weight, up = o["x"], o.get("weight"), o.get("up")
        assert x is not None
        if weight is not None:
            return rms_norm_quant(x, weight, _EPS, fmt)
        if up is not None:
            return silu_mul_quant(x, up, fmt)
        return act_quant(x, fmt)

    def reference(o: Operands) -> tuple[torch.Tensor]:
        x, weight, up = o["x"], o.get("weight"), o.get("up")
        assert x is not None
        x = x.double()
        if weight is not None:
            x = rms_norm_reference(x, weight, _EPS).out
        if up is not None:
            x = gated_mul_reference(torch.cat([x, up.double()], dim=-1), "silu")
        return (x,)

    # half a step: of int8 it is 1/255 of the peak, which a product has further out; E4M3's is 1/16
    tolerance = 0.03 if name == "int8" else 0.04
    once = ("x", "up") if source == "silu_mul" else ("x",)
    return Case(
        "act_quant", f"{source} {name}", make, run, reference, tolerance,
        Bars(once=once, wide=("x",)),
        targets=_FP8_TARGETS if name != "int8" else (), ci=name == "int8" and source == "silu_mul",
        by_row=once, worth=lambda results: _worth(results, fmt),
    )  # fmt: skip


def _worth(results: tuple[torch.Tensor, ...], fmt: ActivationFormat) -> tuple[torch.Tensor]:
    """Codes alone may differ from the reference's where x / scale is a tie."""
    codes, scales = results
    size = fmt.group_size or codes.shape[1]
    spread = scales.repeat_interleave(size, 1)[:, : codes.shape[1]]
    return (codes.double() * spread,)
