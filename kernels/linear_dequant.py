"""Packed linear by dequantizing on every call: any bits, any group, any dtype, any device.

Codes stay packed in memory (kernels/bitplanes.py). A call unpacks them, computes the very values of
`dequantize_affine` and multiplies; rows go in chunks, so that the dense weight that lives for the
length of a call is bounded whatever the layer's size (an output head has 100 million weights).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .bitplanes import pack_planes, unpack_planes
from .linear_ops import LinearKernel, LinearProblem

CHUNK_WEIGHTS = 1 << 24  # 64 MiB of float32


def _decline(problem: LinearProblem) -> str | None:
    return None


def _pack(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, problem: LinearProblem
) -> tuple[Tensor, ...]:
    """Bit planes, then scale and zero-point as stored, with a last axis to broadcast on."""
    packed = pack_planes(codes, problem.num_bits)
    if zero_point is None:
        return packed, scale.unsqueeze(-1)
    return packed, scale.unsqueeze(-1), zero_point.unsqueeze(-1)


def _dequantize_rows(
    tensors: tuple[Tensor, ...], problem: LinearProblem, start: int, stop: int
) -> Tensor:
    """Rows start..stop of W, [stop - start, in], in the problem's dtype."""
    packed, scale, *zero_point = (t[start:stop] for t in tensors)
    unsigned = unpack_planes(packed, problem.num_bits, problem.in_features)
    w = unsigned.to(torch.float32).view(stop - start, -1, problem.group_size)
    half = 1 << (problem.num_bits - 1)
    w = w.sub_(zero_point[0].float() + half if zero_point else half).mul_(scale.float())
    return w.view(stop - start, problem.in_features).to(problem.dtype)


def _run(
    x: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, problem: LinearProblem
) -> Tensor:
    rows = max(1, CHUNK_WEIGHTS // problem.in_features)
    outputs = []
    for start in range(0, problem.out_features, rows):
        stop = min(start + rows, problem.out_features)
        w = _dequantize_rows(tensors, problem, start, stop)
        outputs.append(F.linear(x, w, None if bias is None else bias[start:stop]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


DEQUANT = LinearKernel("dequant", _decline, _pack, _run)
