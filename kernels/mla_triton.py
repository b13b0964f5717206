"""Latent attention on a GPU: what the Triton kernel (triton_ops/mla_decode.py) takes."""

from __future__ import annotations

from .mla_ops import LatentKernel, LatentProblem
from .triton_ops.mla_decode import DTYPES, mla_decode
from .triton_ops.shim import decline_triton

MAX_RANK = 512


def _decline(problem: LatentProblem) -> str | None:
    declined = decline_triton(problem.device)
    if declined is not None:
        return declined
    if problem.dtype not in DTYPES:
        return f"takes queries in 16-bit floats, not {problem.dtype}"
    if problem.rank > MAX_RANK:
        return f"takes latents of at most {MAX_RANK}, not {problem.rank}"
    fmt = problem.cache.fmt
    if fmt is None:
        same = problem.cache.dtype == problem.dtype
        return None if same else f"takes a cache in the queries' dtype, not {problem.cache.dtype}"
    whole = fmt.axis == "static" or fmt.group == problem.cache.head_dim
    if fmt.num_bits != 8 or not fmt.symmetric or fmt.rotate or not whole or fmt.axis == "tokens":
        return "takes 8-bit entries with one scale each, without offsets or rotation"
    if problem.rank % 4 or problem.cache.head_dim % 4:
        return f"takes 8-bit latents of a multiple of 4, not {problem.rank}"
    return None


TRITON = LatentKernel("triton", _decline, mla_decode)
