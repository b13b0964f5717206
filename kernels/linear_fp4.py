"""Linear with weights and inputs of 4-bit floats, NVFP4 and MXFP4, on a GPU that multiplies them.

By `triton_ops/fp4_gemm.py`. Inputs are quantized by their definition (`activations.py`) and packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import quantize_activation
from .elements import E2M1, E8M0_BIAS
from .linear_ops import LinearKernel, LinearOperands, LinearProblem
from .packing import pack_e2m1
from .triton_ops.shim import decline_triton

GROUPS = {torch.float8_e4m3fn: 16, torch.uint8: 32}


def _decline(problem: LinearProblem) -> str | None:
    reason = decline_triton(problem.device)
    if reason is not None:
        return reason
    activation = problem.activation
    if (problem.kind, problem.num_bits) != ("float", 4):
        return "holds 4-bit floats"
    if activation is None or activation.elements != E2M1:
        return "takes inputs quantized to 4-bit floats"
    group = GROUPS.get(activation.scale_dtype)
    if not problem.group_size == activation.group_size == group:
        return "takes NVFP4's groups of 16 or MXFP4's of 32"
    if problem.in_features % 128:
        return f"in_features must be a multiple of 128, not {problem.in_features}"
    if not _has_fp4(problem.device):
        return "needs tensor cores for 4-bit floats (compute capability 10)"
    return None


def _has_fp4(device: str) -> bool:
    """Whether its tensor cores multiply them; a device that is not there is taken not to."""
    if torch.version.hip or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device)[0] == 10


def pack_fp4(operands: LinearOperands, problem: LinearProblem) -> tuple[Tensor, ...]:
    """Packed codes, scales, then the weight's and the inputs' scales of the tensor, float32 [1]."""
    codes, scale, _, global_scale, input_scale = operands
    one = torch.ones(1, device=codes.device)
    tensors = (one if s is None else s.float().reshape(1) for s in (global_scale, input_scale))
    return pack_e2m1(codes).contiguous(), scale.contiguous(), *tensors


def run_fp4(
    x: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, problem: LinearProblem
) -> Tensor:
    from .triton_ops.fp4_gemm import fp4_config, fp4_gemm

    w, w_scale, weight_scale, input_scale = tensors
    fmt = problem.activation
    assert fmt is not None
    rows = x.reshape(-1, problem.in_features)
    codes, scales = quantize_activation(rows, fmt, input_scale if fmt.takes_scale else None)
    if fmt.scale_dtype == torch.uint8:
        stored = (torch.log2(scales) + E8M0_BIAS).to(torch.uint8)
    else:
        stored = (scales * input_scale).to(torch.float8_e4m3fn)
    packed = pack_e2m1(codes.to(torch.float8_e4m3fn))
    factor = 1 / (weight_scale * input_scale)
    config = fp4_config(len(rows))
    y = fp4_gemm(packed, stored, w, w_scale, factor, bias, x.dtype, config)
    return y.view(*x.shape[:-1], problem.out_features)


FP4 = LinearKernel("fp4", _decline, pack_fp4, run_fp4, quantizes_input=True)
