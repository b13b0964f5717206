"""Device functions that several kernels call."""

from __future__ import annotations

from .shim import INTERPRETED, jit, tl


@jit
def dot(a, b, acc):
    """acc + a @ b: operands in their own dtype on a device, summed in acc's (float32 or int32).

    The interpreter multiplies bfloat16 and 8-bit floats wrongly: there floats are upcast first.
    """
    if INTERPRETED and not acc.dtype.is_int():
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, out_dtype=acc.dtype)
