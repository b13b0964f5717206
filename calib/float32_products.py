"""How products of float32 matrices are computed, set for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def float32_products(on_cpu: str) -> Iterator[None]:
    """Products of float32 matrices without TF32 on a GPU, and on a CPU as `on_cpu` says: "ieee", or
    "bf16" for matrices that hold nothing that bfloat16 cannot, whose products bfloat16 instructions
    then sum exactly as float32's do, in half the time."""
    backends: Any = torch.backends  # whose type stubs lack them
    settings = {backends.mkldnn.matmul: on_cpu, backends.cuda.matmul: "ieee"}
    before = {setting: setting.fp32_precision for setting in settings}
    try:
        for setting, precision in settings.items():
            setting.fp32_precision = precision
        yield
    finally:
        for setting, precision in before.items():
            setting.fp32_precision = precision
