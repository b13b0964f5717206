"""Round to nearest (RTN): the baseline, data-free.

Scales from each group's plain range, every weight rounded on its own. Take it when there is no
calibration text or no time; every other method is measured against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.affine import quantize_affine
from ..ranges import choose_qparams
from ..spec import Quantized, QuantSpec


def rtn_quantize(w: Tensor, spec: QuantSpec, scale_dtype: torch.dtype) -> Quantized:
    """w [out, in] rounded to nearest; scales stored in `scale_dtype`."""
    scale, zero_point = choose_qparams(w, spec, scale_dtype)
    return Quantized(quantize_affine(w, scale, zero_point, spec.num_bits), scale, zero_point, spec)
