"""Packed linear by dequantizing on every call: any bits, any group, any dtype, any device.

Codes stay packed in memory (kernels/bitplanes.py; 4-bit floats two to a byte). A call unpacks them,
computes the very values of `dequantize_affine` and multiplies; rows go in chunks, so that the dense
weight that lives for the length of a call is bounded whatever the layer's size (an output head has
100 million weights).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .affine import expand_groups, stored_scale_value
from .bitplanes import pack_planes, unpack_planes
from .linear_ops import LinearKernel, LinearOperands, LinearProblem
from .packing import pack_e2m1, unpack_e2m1
from .plain_linear import product_dtype, wide_linear
from .row_tiles import row_tiles

CHUNK_WEIGHTS = 1 << 24  # 64 MiB of float32


def _pack(operands: LinearOperands, problem: LinearProblem) -> tuple[Tensor, ...]:
    """Packed codes, scales as stored, then zero-points, or the global scale once a row."""
    codes, scale, zero_point, global_scale, _ = operands
    extra: tuple[Tensor, ...] = ()
    if zero_point is not None:
        extra = (zero_point,)
    elif global_scale is not None:
        extra = (global_scale.expand(len(codes), 1),)
    if problem.kind == "int":
        return pack_planes(codes, problem.num_bits), scale, *extra
    return pack_e2m1(codes) if problem.num_bits == 4 else codes.contiguous(), scale, *extra


def _dequantize_rows(
    tensors: tuple[Tensor, ...], problem: LinearProblem, start: int, stop: int
) -> Tensor:
    """Rows start..stop of W, [stop - start, in], in the problem's dtype."""
    packed, scale, *extra = (t[start:stop] for t in tensors)
    if problem.kind == "int":
        w = unpack_planes(packed, problem.num_bits, problem.in_features).float()
        half = 1 << (problem.num_bits - 1)
        zero = extra[0].float() + half if extra else torch.full((1, 1), half, device=w.device)
        return _scaled(w, scale.float(), zero, problem)
    w = unpack_e2m1(packed) if problem.num_bits == 4 else packed
    value = stored_scale_value(scale, extra[0] if extra else None)
    return _scaled(w.float(), value, None, problem)


def _scaled(w: Tensor, scale: Tensor, zero: Tensor | None, problem: LinearProblem) -> Tensor:
    """(w - zero) * scale with w [rows, in] consumed; scale and zero [rows, groups]."""
    rows, columns = w.shape
    if columns % problem.group_size:  # the last group is cut
        spread = lambda t: expand_groups(t, rows, columns, (1, problem.group_size))  # noqa: E731
    else:
        spread = lambda t: t.unsqueeze(-1)  # noqa: E731
        w = w.view(rows, -1, problem.group_size)
    if zero is not None:
        w = w.sub_(spread(zero))
    return w.mul_(spread(scale)).view(rows, columns).to(problem.dtype)


def _run(
    x: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, problem: LinearProblem
) -> Tensor:
    rows = max(1, CHUNK_WEIGHTS // problem.in_features)
    dtype = product_dtype(problem.dtype, x.device.type)
    outputs = []
    for start in range(0, problem.out_features, rows):
        stop = min(start + rows, problem.out_features)
        w = _dequantize_rows(tensors, problem, start, stop).to(dtype)
        part = None if bias is None else bias[start:stop]
        with row_tiles(problem.batch_invariant):
            outputs.append(wide_linear(x, w, part))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


DEQUANT = LinearKernel("dequant", lambda problem: None, _pack, _run)
