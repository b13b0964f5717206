"""Round to nearest (RTN): the baseline, data-free.

Every weight is rounded on its own, with scales from each group's plain range or, with a search,
those of least squared error. Take it when there is no calibration text or no time; every other
method is measured against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.affine import quantize_affine
from ..quantized import Quantized, elements
from ..ranges import QParams, ScaleStore, choose_qparams, uniform_importance
from ..spec import QuantSpec
from .settings import RTNSettings

PLAIN = RTNSettings()


def rtn_quantize(
    w: Tensor,
    spec: QuantSpec,
    scale_dtype: torch.dtype,
    settings: RTNSettings = PLAIN,
    store: ScaleStore | None = None,
) -> Quantized:
    """w [out, in] rounded to nearest; scales stored in `scale_dtype` (the model's), or as `store`
    says where w is part of a larger weight."""
    importance = uniform_importance(w) if settings.scale_search == "mse" else None
    return round_to_nearest(w, spec, choose_qparams(w, spec, scale_dtype, importance, store))


def round_to_nearest(w: Tensor, spec: QuantSpec, p: QParams) -> Quantized:
    """w [out, in] rounded with given scales."""
    codes = quantize_affine(w, p.float_scale(), p.zero_point, elements(spec), spec.block)
    return Quantized(codes, p.scale, p.zero_point, spec, p.global_scale)
