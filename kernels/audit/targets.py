"""What kernels are compiled for, and what those devices can do.

Bandwidth in bytes a second and matrix rates in operations a second are the vendors' for dense
matrices; shared memory is what one program may use, in bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from ..triton_ops.launch import Target

TARGETS = {
    "sm_80": Target("cuda", 80),
    "sm_90": Target("cuda", 90),
    "sm_100": Target("cuda", 100),
    "gfx942": Target("hip", "gfx942"),
}
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}

TENSOR_CORES: dict[str, dict[str, str]] = {
    "sm_80": {"fp16": r"\bHMMA", "int8": r"\bIMMA", "fp8": r"\bHMMA", "fp4": r"\bHMMA"},
    "sm_90": {"fp16": r"\bHGMMA", "int8": r"\bIGMMA", "fp8": r"\bQGMMA", "fp4": r"\bHGMMA"},
    "sm_100": {
        "fp16": r"\bUTCHMMA", "int8": r"\b(UTCIMMA|IMMA)", "fp8": r"\bUTCQMMA",
        "fp4": r"\bUTCOMMA|\bUTCQMMA",
    },
    "gfx942": {
        "fp16": r"\bv_mfma_f32_\w+_(b?f16)", "int8": r"\bv_mfma_i32_\w+_i8",
        "fp8": r"\bv_mfma_f32_\w+", "fp4": r"\bv_mfma_f32_\w+",
    },
}  # fmt: skip
"""Instructions that multiply a tile of 64 rows or more, by what is multiplied. Where a target has
none of that kind (8-bit floats before Hopper; OCP's on gfx942, whose own 8-bit floats are others),
codes are converted and multiplied as float16."""

NARROW_CORES = {"fp16": r"\bHMMA", "int8": r"\bIMMA", "fp8": r"\b(QMMA|HMMA)", "fp4": r"\bHMMA"}
"""The same for tiles under 64 rows on CUDA."""


class Device(NamedTuple):
    """bandwidth: of memory. rates: by what is multiplied."""

    bandwidth: float
    rates: dict[str, float]


DEVICES = {
    "H200": Device(4.8e12, {"fp16": 989e12, "int8": 1979e12, "fp8": 1979e12, "fp4": 989e12}),
    "H100": Device(3.35e12, {"fp16": 989e12, "int8": 1979e12, "fp8": 1979e12, "fp4": 989e12}),
    "A100": Device(2.04e12, {"fp16": 312e12, "int8": 624e12, "fp8": 312e12, "fp4": 312e12}),
}


def tensor_core_pattern(target: str, kind: str, rows: int) -> str:
    """The instruction that must multiply `kind` in tiles of `rows`, as a regular expression."""
    if rows < 64 and target in ("sm_90", "sm_100"):
        return NARROW_CORES[kind]
    return TENSOR_CORES[target][kind]


def predicted_seconds(device: Device, moved: int, operations: int, kind: str | None) -> float:
    """The larger of two floors: bytes over bandwidth, operations over the matrix rate."""
    rate = device.rates[kind] if kind else 0.0
    return max(moved / device.bandwidth, operations / rate if rate else 0.0)
