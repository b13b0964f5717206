"""Compress and decompress twins: a quantized weight and the tensors that store it."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor

from ...kernels.errors import UserError
from ...kernels.packing import pack_bits, packed_words, unpack_bits
from ..spec import LayerScheme, Quantized, QuantSpec
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

    names: tensor names that exist; get: a tensor by name. UserError when shapes do not fit.
    """
    scale = get(f"{module}.weight_scale")
    if f"{module}.weight_packed" not in names:
        zero_name = f"{module}.weight_zero_point"
        zero_point = get(zero_name) if zero_name in names else None
        return _checked(module, Quantized(get(f"{module}.weight"), scale, zero_point, spec))
    rows, columns = (int(n) for n in get(f"{module}.weight_shape").tolist())
    packed = get(f"{module}.weight_packed")
    expected = (rows, packed_words(columns, spec.num_bits))
    if tuple(packed.shape) != expected:
        raise UserError(
            f"{module}.weight_packed has shape {tuple(packed.shape)}, but {rows} x {columns} codes "
            f"of {spec.num_bits} bits take {expected}: the checkpoint is damaged"
        )
    zero_point = None
    if not spec.symmetric:
        zero_words = get(f"{module}.weight_zero_point").T.contiguous()
        if zero_words.shape[1] != packed_words(rows, spec.num_bits):
            raise UserError(
                f"{module}.weight_zero_point holds {zero_words.shape[1]} words a group, but "
                f"{rows} rows take {packed_words(rows, spec.num_bits)}: the checkpoint is damaged"
            )
        zero_point = unpack_bits(zero_words, spec.num_bits, rows).T.contiguous()
    codes = unpack_bits(packed, spec.num_bits, columns)
    return _checked(module, Quantized(codes, scale, zero_point, spec))


def _checked(module: str, q: Quantized) -> Quantized:
    expected = (q.codes.shape[0], q.spec.groups(q.codes.shape[1]))
    for name, qparam in (("weight_scale", q.scale), ("weight_zero_point", q.zero_point)):
        if qparam is not None and tuple(qparam.shape) != expected:
            raise UserError(
                f"{module}.{name} has shape {tuple(qparam.shape)}, but {q.codes.shape[0]} rows in "
                f"{expected[1]} groups take {expected}: the checkpoint is damaged"
            )
    return q
