"""Storing keys and values on a GPU: what the Triton kernel (triton_ops/kv_store.py) takes."""

from __future__ import annotations

from .attention_triton import decline_pool
from .kv_store_ops import StoreKernel, StoreProblem
from .paged_kv import PoolForm
from .triton_ops.kv_store import DTYPES, kv_store
from .triton_ops.shim import decline_triton
from .triton_ops.tiles import padded


def decline_packing(name: str, form: PoolForm) -> str | None:
    """Why heads cannot be packed in registers, or None."""
    fmt, head_dim = form.fmt, form.head_dim
    group = head_dim if fmt is None or fmt.axis == "static" else fmt.group
    half = head_dim // 2 if fmt is not None and fmt.num_bits == 4 else head_dim
    if group != head_dim and (group != padded(group) or half % group):
        return f"packs {name} in groups that are powers of two and divide {half}, not {group}"
    if fmt is not None and fmt.rotate and half != head_dim and head_dim != padded(head_dim):
        return f"rotates 4-bit {name} of a power of two of channels, not {head_dim}"
    return None


def _decline(problem: StoreProblem) -> str | None:
    declined = decline_triton(problem.device)
    if declined is None and problem.dtype not in DTYPES:
        declined = f"takes 16 and 32-bit floats, not {problem.dtype}"
    for name, form in (("keys", problem.keys), ("values", problem.values)):
        declined = declined or decline_pool(name, form, problem.dtype)
        declined = declined or decline_packing(name, form)
    return declined


TRITON = StoreKernel("triton", _decline, kv_store)
