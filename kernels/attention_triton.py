"""Paged attention on a GPU: what the Triton kernel (triton_ops/paged_attention.py) takes."""

from __future__ import annotations

import torch

from .attention_ops import AttentionKernel, AttentionProblem
from .paged_kv import PoolForm
from .triton_ops.paged_attention import DTYPES, MAX_ROWS, paged_attention
from .triton_ops.shim import decline_triton

WIDTHS = (4, 8)
MAX_HEAD_DIM = 256


def decline_pool(name: str, form: PoolForm, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot read or write such a pool beside `dtype`, or None."""
    if not 8 <= form.head_dim <= MAX_HEAD_DIM:
        return f"takes {name} of 8 to {MAX_HEAD_DIM} channels, not {form.head_dim}"
    fmt = form.fmt
    if fmt is None:
        same = form.dtype == dtype
        return None if same else f"takes {name} in the dtype of the queries, not {form.dtype}"
    if fmt.num_bits not in WIDTHS:
        return f"unpacks {name} of 4 or 8 bits, not {fmt.num_bits}"
    if fmt.axis == "tokens":
        return f"takes scales for each token of {name}, not for groups of tokens"
    return None


def _decline(problem: AttentionProblem) -> str | None:
    declined = decline_triton(problem.device)
    if declined is not None:
        return declined
    if problem.dtype not in DTYPES:
        return f"takes queries in 16 or 32-bit floats, not {problem.dtype}"
    group = problem.heads // problem.keys.kv_heads
    if group > MAX_ROWS:
        return f"takes at most {MAX_ROWS} query heads a kv head, not {group}"
    return decline_pool("keys", problem.keys, problem.dtype) or decline_pool(
        "values", problem.values, problem.dtype
    )


TRITON = AttentionKernel("triton", _decline, paged_attention)
