"""Whole-number linear on a CPU: int8 inputs times int8 weights, summed in int32 (oneDNN).

Contract of `onednn.qlinear_pointwise`: x uint8 [M, in] with one scale and zero-point for all of it;
weights int8 [out, in] with a scale a row, reordered once. Given scale 1 and zero-point 128 it puts
out the exact sums times the weights' scales; the tokens' own scales are applied to that. Its signed
input is some 200 times slower, so codes are shifted by 128: by the addition that rounds them, since
a float32 of 1.5 * 2^23 and more has no digits behind the point, and the low byte of its bits is the
code. Sums are exact only where the CPU adds
products of uint8 and int8 in int32 (VNNI); older ones saturate pairs of them in int16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import ActivationFormat
from .elements import int_elements
from .linear_ops import LinearKernel, LinearOperands, LinearProblem

ZERO_POINT = 128
ROUND = 1.5 * 2**23 + ZERO_POINT
MAX_IN_FEATURES = 1 << 16  # 255 * 128 * in_features must fit int32


def _decline(problem: LinearProblem) -> str | None:
    activation = problem.activation
    if problem.device != "cpu":
        return f"runs on cpu, not {problem.device}"
    if activation is None or activation.elements != int_elements(8):
        return "takes inputs quantized to int8"
    if activation.group_size is not None:
        return f"takes one scale a token, not one for {activation.group_size} columns"
    if problem.kind != "int":
        return "holds whole numbers, not floats"
    if not problem.symmetric:
        return "has no zero-point"
    if problem.group_size != problem.in_features:
        return f"takes one scale a row, not one for {problem.group_size} columns"
    if problem.in_features > MAX_IN_FEATURES:
        return f"sums at most {MAX_IN_FEATURES} products in int32, not {problem.in_features}"
    if not torch.cpu._is_vnni_supported():
        return "needs a CPU with VNNI"
    return None


def _pack(operands: LinearOperands, problem: LinearProblem) -> tuple[Tensor, ...]:
    """Reordered codes, scales of rows, their zero-points (all 0), and a static scale of inputs."""
    packed = torch.ops.onednn.qlinear_prepack(operands.codes.contiguous(), None)
    scale = operands.float_scale().reshape(-1)
    zeros = torch.zeros(len(scale), dtype=torch.int32)
    static = () if operands.input_scale is None else (operands.input_scale,)
    return packed, scale, zeros, *static


def _run(
    x: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, problem: LinearProblem
) -> Tensor:
    packed, scale, zeros, *static = tensors
    assert problem.activation is not None
    rows = x.reshape(-1, problem.in_features)
    codes, scales = _shifted_codes(rows, problem.activation, static[0] if static else None)
    y = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, ZERO_POINT, packed, scale, zeros, None,
        1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    y.mul_(scales)
    if bias is not None:
        y += bias
    return y.to(x.dtype).view(*x.shape[:-1], problem.out_features)


def _shifted_codes(
    x: Tensor, fmt: ActivationFormat, static: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of `quantize_activation`, for int8 a token or with a static scale: codes + 128 as uint8, and
    scales, for rows of zeros the smallest there is. Clamping first gives the same codes."""
    x = x.float() if x.dtype == torch.float64 else x
    if static is None:
        peak = x.abs().amax(-1, keepdim=True).float()
        scales = peak.div_(fmt.half_range).clamp_min_(torch.finfo(torch.float32).tiny)
    else:
        scales = static.float().reshape(1)
    codes = torch.div(x, scales).clamp_(fmt.elements.lowest, fmt.elements.highest).add_(ROUND)
    return codes.view(torch.int32).to(torch.uint8), scales


W8A8_CPU = LinearKernel("w8a8_cpu", _decline, _pack, _run, quantizes_input=True)
