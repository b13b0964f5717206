"""Where a model runs and in which dtype, and what "auto" means for both.

Device: CUDA or ROCm where there is one, else the CPU. Dtype on a GPU: that of the checkpoint. On a
CPU: the checkpoint's 16 bits where the layers run as a tape (runtime/models/taped.py), which reads
floats as they are and computes in float32; else bfloat16 where a packed kernel can run (they
compute in it), or where the CPU has bfloat16 instructions and the checkpoint is of 16 bits (decode
reads every weight once a token, so half the bytes is about half the time; float16 has no fast
matrix product on a CPU); float32 otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..kernels.errors import UserError
from ..kernels.linear_dense import DENSE
from ..kernels.linear_dequant import DEQUANT
from ..kernels.linear_ops import LinearProblem, choose_linear

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(
    dtype: str | torch.dtype,
    device: torch.device,
    stored: torch.dtype,
    problems: Iterable[LinearProblem],
    taped: bool = False,
) -> torch.dtype:
    """The dtype of activations. stored: the checkpoint's. problems: its packed linears'. taped:
    whether its layers run as a tape on a CPU."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype != "auto":
        if dtype not in DTYPES:
            raise UserError(f"dtype must be auto or one of {', '.join(DTYPES)}, got '{dtype}'")
        return DTYPES[dtype]
    if device.type != "cpu":
        return stored
    if taped and stored.itemsize == 2:
        return stored
    as_bfloat16 = {p._replace(dtype=torch.bfloat16) for p in problems}
    if any(choose_linear(p).candidate not in (DENSE, DEQUANT) for p in as_bfloat16):
        return torch.bfloat16
    if stored != torch.float32 and torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32
