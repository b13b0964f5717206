"""Square matrices changed in place: they are the largest thing that GPTQ holds, so that every copy
counts (485 MB at 11008 columns in float32).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # columns done at once: a temporary takes as many rows or columns


def reordered(m: Tensor, order: Tensor) -> Tensor:
    """Rows and columns of m [n, n] in `order`, int64 [n]: a new matrix, and no other."""
    moved = m[order]
    for rows in moved.split(BLOCK):
        rows.copy_(rows[:, order])
    return moved


def mirror_upper_(m: Tensor) -> Tensor:
    """Copy the upper triangle of m [n, n] onto the lower one; m is then symmetric."""
    for start in range(0, len(m), BLOCK):
        stop = min(start + BLOCK, len(m))
        m[stop:, start:stop] = m[start:stop, stop:].T
        corner = m[start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).T)
    return m


def cholesky_(m: Tensor) -> bool:
    """Replace a symmetric m [n, n], contiguous, by its lower Cholesky factor L (m = L L^T).

    False when m is not positive definite; it is destroyed then. On a CPU it works in m itself, on
    other devices in a copy: their solvers are not known to take one matrix for both.
    """
    if m.device.type != "cpu":
        lower, info = torch.linalg.cholesky_ex(m)
        m.copy_(lower)
        return int(info) == 0
    columns_first = m.mT  # the same matrix in LAPACK's order, so that it works where m is;
    info = torch.empty((), dtype=torch.int32, device=m.device)
    torch.linalg.cholesky_ex(columns_first, upper=True, out=(columns_first, info))  # it gets L^T
    return int(info) == 0


def invert_lower_(m: Tensor) -> Tensor:
    """Replace a lower triangular m [n, n] by its inverse, block by block from the last one on.

    Left of a block that is inverted already, M^-1 is -(M22^-1 M21) M11^-1: products alone, a third
    less work than solving for the columns of the identity.
    """
    for start in reversed(range(0, len(m), BLOCK)):
        stop = min(start + BLOCK, len(m))
        corner = m[start:stop, start:stop]
        eye = torch.eye(stop - start, dtype=m.dtype, device=m.device)
        inverse = torch.linalg.solve_triangular(corner, eye, upper=False)
        if stop < len(m):
            below = m[stop:, start:stop]
            below.copy_((m[stop:, stop:] @ (below @ inverse)).neg_())
        corner.copy_(inverse)
    return m


def reverse_(m: Tensor) -> Tensor:
    """Reverse the rows and the columns of m [n, n], contiguous: lower becomes upper triangular."""
    flat = m.view(-1)
    half, step = len(flat) // 2, BLOCK * len(m)
    for start in range(0, half, step):
        stop = min(start + step, half)
        front, back = flat[start:stop], flat[len(flat) - stop : len(flat) - start]
        kept = front.flip(0)
        front.copy_(back.flip(0))
        back.copy_(kept)
    return m
