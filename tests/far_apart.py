"""Tensors whose rows lie so far apart that an offset of 32 bits does not reach the last."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor


def far_apart(t: Tensor, step: int | None = None) -> Tensor:
    """A copy of `t` whose entries along the first axis lie `step` elements apart (by default, as
    many as put the last one 2^31 elements on). What lies between is not touched and takes no memory
    on a CPU."""
    step = step or -(-(1 << 31) // max(1, len(t) - 1) // 16) * 16
    count = step * (len(t) - 1) + t[0].numel()
    if t.device.type == "cuda":
        if torch.cuda.mem_get_info()[0] < 2 * count * t.element_size():
            pytest.skip(f"needs {2 * count * t.element_size() >> 30} GiB of GPU memory")
        memory = torch.empty(count, dtype=t.dtype, device=t.device)
    else:
        untouched = numpy.empty(count * t.element_size(), dtype=numpy.uint8)
        memory = torch.from_numpy(untouched).view(t.dtype)
    far = memory.as_strided(t.shape, (step, *t.contiguous().stride()[1:]))
    assert (len(t) - 1) * far.stride(0) >= 1 << 31
    return far.copy_(t)
