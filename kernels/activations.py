"""The one definition of a quantized activation: what a linear with such inputs multiplies.

An input x [..., in] becomes elements (kernels/elements.py) times scales. A scale belongs to a whole
token (a row of x), to each group of consecutive columns of one, or to every input alike; that last
one is given, the others are made from the largest magnitude of what they cover: peak over half the
width of the format's range (127.5 for int8, so that -128 is used too, and 127 with an error of up
to half a step at the peak itself), as compressed-tensors does. MX formats (OCP MX 1.0) take a power
of two, NVFP4 an E4M3 scale under a given scale of the tensor.

All of it is computed in float32 whatever x's dtype is. compressed-tensors computes in x's dtype, so
with bfloat16 activations its scales are rounded to 8 bits more: results then differ in the last
bits, here for the better; with float32 they are equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .elements import E4M3_MAX, Elements, mx_exponents


class ActivationFormat(NamedTuple):
    """How the inputs of a linear are quantized.

    group_size: consecutive columns that share a scale; None where a whole token does. static: one
    scale for all, which is given. scale_dtype: float32; uint8 for powers of two (MX); float8_e4m3fn
    for E4M3 under a given scale of the tensor (NVFP4).
    """

    elements: Elements
    group_size: int | None = None
    static: bool = False
    scale_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        """Such as "int8 a token" or "float4 in groups of 16"."""
        share = "a token" if self.group_size is None else f"in groups of {self.group_size}"
        return f"{self.elements.name} {'with a static scale' if self.static else share}"

    @property
    def takes_scale(self) -> bool:
        """Whether a scale is given beside the input."""
        return self.static or self.scale_dtype == torch.float8_e4m3fn

    @property
    def half_range(self) -> float:
        """The magnitude that a scale of one reaches: what a peak is divided by."""
        return (self.elements.highest - self.elements.lowest) / 2


def fake_quantize_activation(x: Tensor, fmt: ActivationFormat, scale: Tensor | None) -> Tensor:
    """x [..., in] as its quantized form is worth, in x's dtype; see `quantize_activation`."""
    codes, scales = quantize_activation(x, fmt, scale)
    if fmt.group_size is None:
        return codes.mul_(scales).to(x.dtype)
    groups = _grouped(codes, fmt.group_size).mul_(scales.unsqueeze(-1))
    return groups.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def quantize_activation(
    x: Tensor, fmt: ActivationFormat, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Elements of x [..., in] and their scales, both float32.

    scale, one number, is given when `fmt.takes_scale`: what elements are multiplied with (static)
    or what E4M3 scales are divided by. The scales are [..., 1] for tokens, [..., groups] for groups
    (the last one may be cut), and [1] when static.
    """
    assert (scale is not None) == fmt.takes_scale, fmt
    x = x.float()
    if fmt.static:
        assert scale is not None
        scales = scale.float().reshape(1)
        return fmt.elements.snap_(x / scales), scales
    if fmt.group_size is None:
        scales = _scales(x.abs().amax(-1, keepdim=True), fmt, scale)
        return fmt.elements.snap_(x / scales), scales
    groups = _grouped(x, fmt.group_size)
    scales = _scales(groups.abs().amax(-1), fmt, scale)
    codes = fmt.elements.snap_(groups / scales.unsqueeze(-1))
    return codes.flatten(-2)[..., : x.shape[-1]], scales


def scale_of_peak(peak: Tensor, fmt: ActivationFormat) -> Tensor:
    """The scale [1], float32, to give with inputs whose largest magnitude is `peak`.

    Static: the peak reaches the end of the range. NVFP4: E4M3 scales reach theirs with it. Inputs
    that were always zero get 1.
    """
    assert fmt.takes_scale, fmt
    peak = peak.float().reshape(1)
    reach = E4M3_MAX * fmt.half_range
    scale = peak / fmt.half_range if fmt.static else (reach / peak).clamp_(max=torch.finfo().max)
    return torch.where(peak > 0, scale, 1.0)


def _scales(peak: Tensor, fmt: ActivationFormat, scale: Tensor | None) -> Tensor:
    """Scales of what has the largest magnitude `peak`, float32 of its shape; never zero."""
    if fmt.scale_dtype == torch.uint8:
        return torch.exp2(mx_exponents(peak, fmt.elements))
    scales = peak / fmt.half_range
    if scale is not None:
        whole = scale.float().reshape(1)
        scales = (scales * whole).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn).float() / whole
        # a group too small for E4M3 is worth nothing: under the largest scale all of it rounds to 0
        return torch.where(scales == 0, E4M3_MAX / whole, scales)
    return torch.where(scales == 0, 1.0, scales)


def _grouped(x: Tensor, size: int) -> Tensor:
    """x [..., in] as [..., groups, size], a cut group filled up with zeros."""
    return F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
