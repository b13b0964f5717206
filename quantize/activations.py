"""Quantized input activations by spec: what kernels/activations.py defines, in this stage's nouns.

The layer loop and the evals put `fake_quantize_input` before a linear; the runtime hands
`activation_format` to its kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.activations import ActivationFormat, fake_quantize_activation, scale_of_peak
from ..kernels.elements import elements_of
from ..kernels.errors import UserError
from .spec import Group, QuantSpec, TensorWise, Token

SCALE_DTYPES = {"model": torch.float32, "e4m3": torch.float8_e4m3fn, "e8m0": torch.uint8}


def activation_format(spec: QuantSpec) -> ActivationFormat:
    """What an activation spec means to a kernel; UserError when no linear computes with it."""
    elements = elements_of(spec.type, spec.num_bits)
    dtype = SCALE_DTYPES[spec.scale_dtype]
    if not spec.symmetric:
        raise UserError("activations with a zero-point are not computed; quantize symmetrically")
    match spec.granularity:
        case TensorWise() if not spec.dynamic:
            return ActivationFormat(elements, static=True)
        case Token() if spec.dynamic:
            return ActivationFormat(elements)
        case Group(size) if spec.dynamic:
            return ActivationFormat(elements, size, scale_dtype=dtype)
    when = "dynamic" if spec.dynamic else "static"
    raise UserError(
        f"{when} activation scales for each {spec.granularity} are not computed; take static ones "
        "for the tensor, or dynamic ones for tokens or groups"
    )


def fake_quantize_input(x: Tensor, spec: QuantSpec, scale: Tensor | None = None) -> Tensor:
    """x [..., in] as its quantized form is worth, in x's dtype.

    scale: one number, for static specs and for NVFP4, as `input_scale_of_peak` gives it; None for
    all others, which make their scales of x.
    """
    return fake_quantize_activation(x, activation_format(spec), scale)


def input_scale_of_peak(
    peak: Tensor, spec: QuantSpec, model_dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """The scale [1], as it is stored, of inputs whose largest magnitude was `peak` (one number).

    A static scale is in the model's dtype, NVFP4's scale of the tensor in float32. None where no
    scale is stored.
    """
    fmt = activation_format(spec)
    if not fmt.takes_scale:
        return None
    scale = scale_of_peak(peak, fmt)
    if not fmt.static:
        return scale
    info = torch.finfo(model_dtype)
    return scale.clamp_(info.tiny, info.max).to(model_dtype)
