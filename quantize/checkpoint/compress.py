"""Compress and decompress twins: a quantized weight and the tensors that store it."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor

from ...kernels.errors import UserError
from ...kernels.packing import pack_bits, packed_words, unpack_bits
from ..quantized import Quantized
from ..spec import LayerScheme, QuantSpec
from .ct_config import format_of


def compress(module: str, q: Quantized) -> dict[str, Tensor]:
    """Tensor names and values of the quantized linear `module`.

    pack-quantized: weight_packed int32 [out, ceil(in*b/32)], weight_scale [out, groups],
    weight_shape int64 [2], and when asymmetric weight_zero_point int32 [ceil(out*b/32), groups].
    int-quantized (8 bits): weight int8 [out, in], weight_scale, and when asymmetric
    weight_zero_point int8 [out, groups].
    """
    bits = q.spec.num_bits
    tensors = {f"{module}.weight_scale": q.scale.contiguous()}
    if format_of(LayerScheme(q.spec)) == "int-quantized":
        tensors[f"{module}.weight"] = q.codes.contiguous()
        if q.zero_point is not None:
            tensors[f"{module}.weight_zero_point"] = q.zero_point.contiguous()
        return tensors
    tensors[f"{module}.weight_packed"] = pack_bits(q.codes, bits)
    tensors[f"{module}.weight_shape"] = torch.tensor(q.codes.shape, dtype=torch.int64)
    if q.zero_point is not None:
        packed = pack_bits(q.zero_point.T.contiguous(), bits)
        tensors[f"{module}.weight_zero_point"] = packed.T.contiguous()
    return tensors


def decompress(
    module: str, names: Container[str], get: Callable[[str], Tensor], spec: QuantSpec
) -> Quantized:
    """The quantized linear `module` from its stored tensors; the inverse of `compress`.

    names: tensor names that exist; get: a tensor by name. UserError when shapes or dtypes do not
    fit or a scale is not finite.
    """
    scale = get(f"{module}.weight_scale")
    if not (scale.is_floating_point() and bool(torch.isfinite(scale).all())):
        raise UserError(
            f"{module}.weight_scale must hold finite numbers: the checkpoint is damaged"
        )
    if f"{module}.weight_packed" not in names:
        zero_name = f"{module}.weight_zero_point"
        zero_point = _integers(get, zero_name, torch.int8) if zero_name in names else None
        codes = _integers(get, f"{module}.weight", torch.int8)
        return _checked(module, Quantized(codes, scale, zero_point, spec))
    shape = _integers(get, f"{module}.weight_shape", torch.int64).tolist()
    if len(shape) != 2 or min(shape) < 1:
        raise UserError(f"{module}.weight_shape is {shape}: the checkpoint is damaged")
    rows, columns = shape
    packed = _integers(get, f"{module}.weight_packed", torch.int32)
    expected = (rows, packed_words(columns, spec.num_bits))
    if tuple(packed.shape) != expected:
        raise UserError(
            f"{module}.weight_packed has shape {tuple(packed.shape)}, but {rows} x {columns} codes "
            f"of {spec.num_bits} bits take {expected}: the checkpoint is damaged"
        )
    zero_point = None
    if not spec.symmetric:
        zero_words = _integers(get, f"{module}.weight_zero_point", torch.int32).T.contiguous()
        if zero_words.shape[1] != packed_words(rows, spec.num_bits):
            raise UserError(
                f"{module}.weight_zero_point holds {zero_words.shape[1]} words a group, but "
                f"{rows} rows take {packed_words(rows, spec.num_bits)}: the checkpoint is damaged"
            )
        zero_point = unpack_bits(zero_words, spec.num_bits, rows).T.contiguous()
    codes = unpack_bits(packed, spec.num_bits, columns)
    return _checked(module, Quantized(codes, scale, zero_point, spec))


def _integers(get: Callable[[str], Tensor], name: str, dtype: torch.dtype) -> Tensor:
    tensor = get(name)
    if tensor.dtype != dtype:
        raise UserError(f"{name} is {tensor.dtype}, not {dtype}: the checkpoint is damaged")
    return tensor


def _checked(module: str, q: Quantized) -> Quantized:
    expected = (q.codes.shape[0], q.spec.groups(q.codes.shape[1]))
    for name, qparam in (("weight_scale", q.scale), ("weight_zero_point", q.zero_point)):
        if qparam is not None and tuple(qparam.shape) != expected:
            raise UserError(
                f"{module}.{name} has shape {tuple(qparam.shape)}, but {q.codes.shape[0]} rows in "
                f"{expected[1]} groups take {expected}: the checkpoint is damaged"
            )
    return q
