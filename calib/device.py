"""Which dtype "auto" stands for, measured where it depends on the machine."""

from __future__ import annotations

import time

import torch
from torch import Tensor

PROBE = 1024  # rows, columns and inner size of the timed matrix product
WORTH_IT = 1.4  # bfloat16 must be this much faster to be worth its rounding
REPEATS = 9
CLEAR = 2  # a ratio this many times above or below what is worth it needs no more timings
CPU_DTYPES = (torch.float32, torch.bfloat16)


def resolve_dtype(name: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The dtype of forward passes. "auto": the model's own on a GPU; on a CPU bfloat16 where its
    matrix product is measured at least 1.4 times as fast as float32's, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
            name
        ]
    if device.type != "cpu":
        return stored if stored in (torch.bfloat16, torch.float16) else torch.float32
    pairs = {t: tuple(torch.ones(PROBE, PROBE, dtype=t) for _ in range(2)) for t in CPU_DTYPES}
    fastest = dict.fromkeys(CPU_DTYPES, float("inf"))
    ratio = WORTH_IT
    for turn in range(REPEATS):
        for t in CPU_DTYPES:  # by turns, so that what else the machine does falls on both
            fastest[t] = min(fastest[t], _timed(*pairs[t]))
        ratio = fastest[torch.float32] / fastest[torch.bfloat16]
        if turn and not WORTH_IT / CLEAR < ratio < WORTH_IT * CLEAR:
            break  # without bfloat16 instructions one product takes most of a second
    return torch.bfloat16 if ratio >= WORTH_IT else torch.float32


def _timed(a: Tensor, b: Tensor) -> float:
    start = time.perf_counter()
    torch.nn.functional.linear(a, b)
    return time.perf_counter() - start
