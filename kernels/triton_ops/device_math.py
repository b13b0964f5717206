# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
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


@jit
def put_part(acc, at, on, lock, SPLIT_K: tl.constexpr):
    """Write this program's part of a sum over K at pointers `at`; True in the program that is last
    of SPLIT_K to do so, which then adds them with `sum_parts`. `lock`: int32, zero before."""
    tl.store(at, acc, mask=on)
    tl.debug_barrier()  # all threads have written before one of them says so
    return tl.atomic_add(lock, 1, sem="acq_rel") == SPLIT_K - 1


@jit
def sum_parts(at, stride, on, lock, SPLIT_K: tl.constexpr):
    """All parts, `stride` apart, added in their order; `lock` is zero again."""
    acc = tl.load(at, mask=on, other=0.0, cache_modifier=".cg")
    for _ in tl.static_range(SPLIT_K - 1):
        at += stride
        acc += tl.load(at, mask=on, other=0.0, cache_modifier=".cg")
    tl.store(lock, 0)
    return acc


@jit
def round_even(x):
    """The nearest whole number of float32 x, |x| < 2^22, halves to the even one."""
    return (x + 12582912.0) - 12582912.0


@jit
def to_e4m3(x):
    """float32 x, within -448 to 448, as float8 E4M3, to nearest, ties to even.

    The interpreter does not carry a round-up into the exponent, so there x is rounded first.
    """
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF  # 3 bits of significand
        normal = bits.to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, round_even(x * 512.0) / 512.0, normal)
    return x.to(tl.float8e4nv)
