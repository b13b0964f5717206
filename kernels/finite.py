"""Whether a tensor holds NaN or infinite values, without a temporary of its size."""

from __future__ import annotations

import math

from torch import Tensor


def all_finite(x: Tensor) -> bool:
    """Whether every element of x (any shape, any float dtype that torch compares) is finite."""
    if not x.numel():
        return True
    low, high = (float(end) for end in x.detach().aminmax())  # NaN is handed through
    return math.isfinite(low) and math.isfinite(high)
