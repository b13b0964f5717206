"""Which device and which dtype "auto" stand for, measured where it depends on the machine."""

from __future__ import annotations

import textwrap
import time

import torch
from torch import Tensor

from ..kernels.errors import UserError

PROBE = 1024  # rows, columns and inner size of the timed matrix product
WORTH_IT = 1.4  # bfloat16 must be this much faster to be worth its rounding
REPEATS = 5


def resolve_device(name: str) -> torch.device:
    """The torch device that `name` means; "auto" is a CUDA or ROCm device where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # what is on meta has no value
    except (RuntimeError, AssertionError, ImportError) as e:
        reason = textwrap.shorten(str(e), 100, placeholder=" ...")
        raise UserError(
            f"device '{name}' cannot be used here; use auto, cpu, cuda or cuda:N ({reason})"
        ) from e
    return device


def resolve_dtype(name: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The dtype of forward passes. "auto": the model's own on a GPU; on a CPU bfloat16 where its
    matrix product is measured at least 1.4 times as fast as float32's, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
            name
        ]
    if device.type != "cpu":
        return stored if stored in (torch.bfloat16, torch.float16) else torch.float32
    ratio = matmul_flops(torch.bfloat16) / matmul_flops(torch.float32)
    return torch.bfloat16 if ratio >= WORTH_IT else torch.float32


def matmul_flops(dtype: torch.dtype) -> float:
    """Operations a second of a matrix product on the CPU, the best of a few short timings."""
    a, b = (torch.ones(PROBE, PROBE, dtype=dtype) for _ in range(2))
    return 2 * PROBE**3 / min(_timed(a, b) for _ in range(REPEATS))


def _timed(a: Tensor, b: Tensor) -> float:
    start = time.perf_counter()
    torch.nn.functional.linear(a, b)
    return time.perf_counter() - start
