"""Quantize and dequantize cached keys and values: one definition for the runtime and the evals.

Keys and values are [batch, kv_heads, tokens, head_dim]. What shares a scale is either `group`
channels of one token and head (the whole head where group == head_dim), or one channel of a head
over `group` consecutive tokens (KIVI, arXiv:2402.02750: keys have channels that are large at every
token), or everything that one calibrated scale is given for.

A value is offset + code * scale, codes among the elements of kernels/elements.py, scale and offset
kept in float16. Symmetric entries have no offset. The offset is not a whole zero-point: a channel
of keys may lie far from zero, and a zero-point within the range of the codes would force the range
to reach there. Codes are rounded against the scale and offset as stored, so that the error is at
most half a step inside the range.

A Hadamard rotation of each head (QuaRot, arXiv:2404.00456) spreads a large channel over all of them
before codes are chosen; it is its own inverse. Keys are rotated after RoPE.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .affine import round_to_codes
from .bitplanes import pack_planes, unpack_planes
from .elements import Elements, elements_of
from .hadamard import sylvester

SCALE_DTYPE = torch.float16
SMALLEST_SCALE = 2.0**-14  # float16's smallest normal number
LARGEST = 65504.0  # float16's largest


class KVFormat(NamedTuple):
    """How keys or values are stored.

    axis: "channels": `group` channels of a token share a scale; "tokens": `group` tokens of a
        channel; "static": the scale is given, one or one for each head.
    clip: share of each range that the codes span; what lies beyond saturates.
    rotate: through a Hadamard matrix first.
    """

    kind: Literal["int", "float"]
    num_bits: int
    symmetric: bool
    axis: Literal["channels", "tokens", "static"]
    group: int = 0
    clip: float = 1.0
    rotate: bool = False

    @property
    def elements(self) -> Elements:
        return elements_of(self.kind, self.num_bits)


class KVCodes(NamedTuple):
    """Stored entries. codes: uint8 [b, h, tokens, bytes], packed or E4M3's bits; scale, offset:
    float16 [b, h, tokens, groups] or [b, h, groups, head_dim]; the scale None where it is static,
    the offset where the format is symmetric."""

    codes: Tensor
    scale: Tensor | None
    offset: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> KVCodes:
        """`change` of every part there is."""
        scale, offset = (None if part is None else change(part) for part in self[1:])
        return KVCodes(change(self.codes), scale, offset)

    def then(self, newer: KVCodes) -> KVCodes:
        """These entries, and `newer` after them."""
        scale, offset = (
            None if a is None or b is None else torch.cat([a, b], dim=2)
            for a, b in zip(self[1:], newer[1:], strict=True)
        )
        return KVCodes(torch.cat([self.codes, newer.codes], dim=2), scale, offset)


def quantize_kv(x: Tensor, fmt: KVFormat, static_scale: Tensor | None = None) -> KVCodes:
    """Entries of x [b, h, tokens, head_dim], any float dtype.

    static_scale: float [] or [h], for axis "static" alone. With axis "tokens", the number of tokens
    is a multiple of the group.
    """
    x = x.float()
    if fmt.rotate:
        x = rotate_heads(x)
    if fmt.axis == "static":
        assert static_scale is not None
        scale = static_scale.float().reshape(-1, 1, 1)
        return KVCodes(_packed(round_to_codes(x, scale, None, fmt.elements), fmt), None, None)
    grouped, axis = _grouped(x, fmt)
    scale, offset = choose_scales(grouped, fmt, axis)
    centred = grouped if offset is None else grouped - offset.float()
    codes = round_to_codes(centred, scale.float(), None, fmt.elements).view_as(x)
    return KVCodes(
        _packed(codes, fmt), scale.squeeze(axis), None if offset is None else offset.squeeze(axis)
    )


def dequantize_kv(
    entries: KVCodes,
    fmt: KVFormat,
    head_dim: int,
    dtype: torch.dtype,
    static_scale: Tensor | None = None,
) -> Tensor:
    """The values [b, h, tokens, head_dim] that `entries` stand for: in float32, rounded once."""
    codes = _unpacked(entries.codes, fmt, head_dim)
    if fmt.axis == "static":
        assert static_scale is not None
        x = codes * static_scale.float().reshape(-1, 1, 1)
    else:
        assert entries.scale is not None
        grouped, axis = _grouped(codes, fmt)
        x = grouped * entries.scale.float().unsqueeze(axis)
        if entries.offset is not None:
            x += entries.offset.float().unsqueeze(axis)
        x = x.view_as(codes)
    return (rotate_heads(x) if fmt.rotate else x).to(dtype)


def fake_quantize_kv(x: Tensor, fmt: KVFormat, static_scale: Tensor | None = None) -> Tensor:
    """x as it comes back from the cache, in its dtype.

    With axis "tokens" the last, incomplete group comes back as it is: it stays unquantized until
    its last token is there.
    """
    whole = x.shape[2]
    if fmt.axis == "tokens":
        whole -= whole % fmt.group
    if whole == 0:
        return x
    entries = quantize_kv(x[:, :, :whole], fmt, static_scale)
    stored = dequantize_kv(entries, fmt, x.shape[3], x.dtype, static_scale)
    return stored if whole == x.shape[2] else torch.cat([stored, x[:, :, whole:]], dim=2)


def choose_scales(grouped: Tensor, fmt: KVFormat, axis: int) -> tuple[Tensor, Tensor | None]:
    """Scale and offset (None: symmetric) of float32 values that share them along `axis`, float16,
    with that axis kept."""
    lowest, highest = fmt.elements.lowest, fmt.elements.highest
    if fmt.symmetric:
        peak = grouped.abs().amax(axis, keepdim=True)
        return _as_scale(peak * (fmt.clip / highest)), None
    low, high = grouped.amin(axis, keepdim=True), grouped.amax(axis, keepdim=True)
    offset = low - lowest * (high - low) / (highest - lowest)
    offset = offset.clamp_(-LARGEST, LARGEST).to(SCALE_DTYPE)
    # the rounded offset has moved: both ends must still be reached
    reach = torch.maximum((high - offset.float()) / highest, (low - offset.float()) / lowest)
    return _as_scale(reach * fmt.clip), offset


def rotate_heads(x: Tensor) -> Tensor:
    """x [..., head_dim], float32 or float64, through an orthonormal Hadamard matrix, which is
    symmetric and so its own inverse.

    Where head_dim is no power of two, in blocks of the largest one that divides it.
    """
    size = x.shape[-1] & -x.shape[-1]
    matrix = hadamard_matrix(size).to(x)
    return (x.unflatten(-1, (-1, size)) @ matrix).flatten(-2)


@functools.lru_cache
def hadamard_matrix(size: int) -> Tensor:
    """Sylvester's, float32 [size, size], orthonormal; size: a power of two."""
    with torch.inference_mode(False):  # it is kept for callers that want gradients too
        return sylvester(size).float() * size**-0.5


def _grouped(x: Tensor, fmt: KVFormat) -> tuple[Tensor, int]:
    """x with an axis of its own for what shares a scale, and that axis."""
    if fmt.axis == "channels":
        return x.unflatten(3, (-1, fmt.group)), 4
    return x.unflatten(2, (-1, fmt.group)), 3


def _packed(codes: Tensor, fmt: KVFormat) -> Tensor:
    if fmt.kind == "float":
        return codes.to(fmt.elements.dtype).view(torch.uint8)
    rows = pack_planes(codes.to(torch.int8).flatten(0, 2), fmt.num_bits)
    return rows.view(*codes.shape[:3], rows.shape[1])


def _unpacked(codes: Tensor, fmt: KVFormat, head_dim: int) -> Tensor:
    if fmt.kind == "float":
        return codes.view(fmt.elements.dtype).float()
    rows = unpack_planes(codes.flatten(0, 2), fmt.num_bits, head_dim)
    return (rows.float() - (1 << (fmt.num_bits - 1))).view(*codes.shape[:3], head_dim)


def _as_scale(scale: Tensor) -> Tensor:
    return scale.clamp_(SMALLEST_SCALE, LARGEST).to(SCALE_DTYPE)
