"""RMS norm and gated activations on a GPU: what the Triton kernels (triton_ops/norms.py) take."""

from __future__ import annotations

from .norm_ops import NormKernels, NormProblem
from .triton_ops.norms import DTYPES, MAX_WIDTH, gated_mul, rms_norm
from .triton_ops.shim import decline_triton


def _decline(problem: NormProblem) -> str | None:
    declined = decline_triton(problem.device)
    if declined is None and problem.dtype not in DTYPES:
        declined = f"takes 16 and 32-bit floats, not {problem.dtype}"
    if declined is None and problem.op == "rms_norm" and problem.width > MAX_WIDTH:
        declined = f"takes rows of at most {MAX_WIDTH}, not {problem.width}"
    return declined


TRITON = NormKernels("triton", _decline, rms_norm, gated_mul)
