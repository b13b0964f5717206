"""What launchers check before they launch: a wrong tensor raises ValueError, naming it.

A kernel reads by shapes and strides that it was told; a tensor of another shape would be read out
of bounds. These are mistakes of the calling code, not of a user, so they are no `UserError`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_tensor(
    op: str,
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    contiguous: bool = False,
) -> None:
    """`tensor` has `shape` (None: any size), one of `dtypes`, and its last axis is contiguous.

    contiguous: all of it is. device: where it must be. ValueError otherwise.
    """
    got = tuple(tensor.shape)
    fits = len(got) == len(shape) and all(
        want in (None, size) for size, want in zip(got, shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{op}: {name} has shape {got}, not ({sizes})")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(dtype_name(d) for d in dtypes)
        raise ValueError(f"{op}: {name} is {dtype_name(tensor.dtype)}, not {allowed}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, not {device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous, its strides are {tensor.stride()}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{op}: the last axis of {name} must be contiguous, its strides are {tensor.stride()}"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "float16"."""
    return str(dtype).removeprefix("torch.")
