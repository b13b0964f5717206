"""Compress and decompress twins: a quantized weight and the tensors that store it."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from ...kernels.affine import stored_scale_value
from ...kernels.errors import UserError
from ...kernels.packing import (
    pack_bits,
    pack_e2m1,
    packed_words,
    padded_words,
    unpack_bits,
    unpack_e2m1,
    unpack_padded,
)
from ..quantized import Quantized
from ..spec import LayerScheme, QuantSpec, TensorWise
from .checks import Get, checked, read_g_idx, read_matrix, read_tensor
from .ct_config import format_of


def compress(module: str, q: Quantized, scheme: LayerScheme) -> dict[str, Tensor]:
    """Tensor names and values of the quantized linear `module`, stored as `scheme` is.

    pack-quantized: weight_packed int32 [out, ceil(in*b/32)], weight_scale [out, groups],
    weight_shape int64 [2], and when asymmetric weight_zero_point int32 [ceil(out*b/32), groups].
    int-quantized: weight int8 [out, in], weight_scale, and when asymmetric weight_zero_point int8
    [out, groups]. float-quantized, naive-quantized, mxfp8-quantized: weight float8_e4m3fn [out,
    in], weight_scale. nvfp4- and mxfp4-pack-quantized: weight_packed uint8 [out, in/2],
    weight_scale. weight_scale has the dtype of `q.scale`, and its shape ([1] for a whole tensor);
    beside one in E4M3 stands weight_global_scale float32 [1], which it is divided by.
    """
    assert scheme.weights == q.spec, (scheme, q.spec)
    assert q.g_idx is None, "refused by the layout"
    whole = isinstance(q.spec.granularity, TensorWise)
    tensors = {"weight_scale": q.scale.reshape(1) if whole else q.scale.contiguous()}
    if q.global_scale is not None:
        tensors["weight_global_scale"] = q.global_scale
    match format_of(scheme):
        case "pack-quantized":
            tensors |= _packed_integers(q)
        case "nvfp4-pack-quantized" | "mxfp4-pack-quantized":
            tensors["weight_packed"] = pack_e2m1(q.codes)
        case _:
            tensors["weight"] = q.codes.contiguous()
            if q.zero_point is not None:
                tensors["weight_zero_point"] = q.zero_point.contiguous()
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def decompress(module: str, names: Container[str], get: Get, spec: QuantSpec) -> Quantized:
    """The quantized linear `module` from its stored tensors; the inverse of `compress`.

    names: tensor names that exist; get: a tensor by name. UserError when shapes or dtypes do not
    fit or a scale is not finite. Also reads what compressed-tensors no longer writes: codes of 3,
    5, 6 or 7 bits that do not cross words (told by the number of words), and weight_g_idx.
    """
    scale, global_scale = _scales(module, get, spec)
    packed = f"{module}.weight_packed" in names
    zero_point = None
    if spec.type == "float":
        codes = _floats(module, get, spec)
    elif packed:
        codes, zero_point = _unpacked_integers(module, get, spec)
    else:
        codes = read_matrix(get, f"{module}.weight", torch.int8)
        if not spec.symmetric:
            zero_point = read_matrix(get, f"{module}.weight_zero_point", torch.int8)
    g_idx = None
    if f"{module}.weight_g_idx" in names:
        g_idx = read_g_idx(get, f"{module}.weight_g_idx", codes.shape[1], spec)
    q = Quantized(codes, scale, zero_point, spec, global_scale, g_idx)
    return checked(module, q, "weight_scale", "weight_zero_point")


def read_shape(module: str, get: Get) -> tuple[int, int]:
    """[out, in] of the weight of `module` as weight_shape has it."""
    shape = read_tensor(get, f"{module}.weight_shape", torch.int64).tolist()
    if not isinstance(shape, list) or len(shape) != 2 or min(shape) < 1:
        raise UserError(f"{module}.weight_shape is {shape}: the checkpoint is damaged")
    return shape[0], shape[1]


def compress_input_scale(module: str, spec: QuantSpec, scale: Tensor) -> dict[str, Tensor]:
    """The scale of the inputs of `module`, as `input_scale_of_peak` gives it, by its name."""
    name = input_scale_name(spec)
    assert name is not None, spec
    return {f"{module}.{name}": scale.reshape(1)}


def decompress_input_scale(
    module: str, names: Container[str], get: Get, spec: QuantSpec
) -> Tensor | None:
    """The scale [1] of the inputs of `module`; None where it is made for each input.

    UserError when it is missing or no positive number.
    """
    leaf = input_scale_name(spec)
    if leaf is None:
        return None
    name = f"{module}.{leaf}"
    if name not in names:
        raise UserError(f"{name} is missing: the checkpoint is damaged")
    scale = get(name)
    usable = scale.is_floating_point() and scale.numel() == 1
    if not (usable and 0 < scale.float().item() < torch.inf):
        raise UserError(f"{name} must hold one positive number: the checkpoint is damaged")
    return scale.reshape(1)


def input_scale_name(spec: QuantSpec) -> str | None:
    """What the scale of a linear's inputs is stored as; None where it is made for each input."""
    if spec.scale_dtype == "e4m3":
        return "input_global_scale"
    return None if spec.dynamic else "input_scale"


def _packed_integers(q: Quantized) -> dict[str, Tensor]:
    bits = q.spec.num_bits
    tensors = {
        "weight_packed": pack_bits(q.codes, bits),
        "weight_shape": torch.tensor(q.codes.shape, dtype=torch.int64),
    }
    if q.zero_point is not None:
        packed = pack_bits(q.zero_point.T.contiguous(), bits)
        tensors["weight_zero_point"] = packed.T.contiguous()
    return tensors


def _unpacked_integers(module: str, get: Get, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    """Codes and zero-points of the format pack-quantized."""
    rows, columns = read_shape(module, get)
    packed = read_tensor(get, f"{module}.weight_packed", torch.int32)
    expected, bits = (rows, packed_words(columns, spec.num_bits)), spec.num_bits
    count, unpack = packed_words, unpack_bits
    if tuple(packed.shape) == (rows, padded_words(columns, bits)) != expected:
        count, unpack = padded_words, unpack_padded
    elif tuple(packed.shape) != expected:
        raise UserError(
            f"{module}.weight_packed has shape {tuple(packed.shape)}, but {rows} x {columns} codes "
            f"of {bits} bits take {expected}: the checkpoint is damaged"
        )
    codes = unpack(packed, bits, columns)
    if spec.symmetric:
        return codes, None
    zero_words = read_matrix(get, f"{module}.weight_zero_point", torch.int32).T.contiguous()
    if zero_words.shape[1] != count(rows, bits):
        raise UserError(
            f"{module}.weight_zero_point holds {zero_words.shape[-1]} words a group, but "
            f"{rows} rows take {count(rows, bits)}: the checkpoint is damaged"
        )
    return codes, unpack(zero_words, bits, rows).T.contiguous()


def _floats(module: str, get: Get, spec: QuantSpec) -> Tensor:
    if spec.num_bits == 8:
        return read_matrix(get, f"{module}.weight", torch.float8_e4m3fn)
    return unpack_e2m1(read_matrix(get, f"{module}.weight_packed", torch.uint8))


def _scales(module: str, get: Get, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    """weight_scale as it is stored, and weight_global_scale where the spec has one."""
    name = f"{module}.weight_scale"
    scale, global_scale = get(name), None
    if spec.scale_dtype == "e8m0":
        if scale.dtype != torch.uint8:
            raise UserError(f"{name} is {scale.dtype}, not uint8: the checkpoint is damaged")
    elif not scale.is_floating_point():
        raise UserError(f"{name} is {scale.dtype}, which holds no scale: the checkpoint is damaged")
    if spec.scale_dtype == "e4m3":
        global_scale = read_tensor(get, f"{module}.weight_global_scale", torch.float32).reshape(-1)
        if global_scale.numel() != 1 or not global_scale.item() > 0:
            raise UserError(
                f"{module}.weight_global_scale must hold one positive number: the checkpoint is "
                "damaged"
            )
    if not bool(torch.isfinite(stored_scale_value(scale, global_scale)).all()):
        raise UserError(f"{name} must hold finite numbers: the checkpoint is damaged")
    return scale, global_scale
