"""Rotations fused into the weights: QuaRot's and SpinQuant's R1 and R2.

An RMSNorm without a gain commutes with an orthogonal matrix: norm(x Q) = norm(x) Q. So once every
norm's gain g has moved into the linears that read it, the whole residual stream can be kept in
another basis, at no cost when the model runs (x: residual, W of a linear: y = W x, as rows):

    embedding   E -> E Q                        reads    W -> W diag(g) Q        R1 = Q [hidden]
    head        W -> W diag(g) Q                writes   W -> Q^T W, b -> b Q

The values of a head pass attention as a weighted sum over positions, which commutes with a matrix
R on the head's own coordinates:

    v_proj, per head  W -> R^T W, b -> b R      o_proj, per head  W -> W R       R2 = R [head_dim]

A rotated coordinate is a mixture of all old ones, so an outlier channel is spread over all.
Papers: QuaRot (Ashkboos et al. 2024, arXiv:2404.00456), SpinQuant (Liu et al. 2024,
arXiv:2405.16406), after computational invariance in SliceGPT (Ashkboos et al. 2024).

Functions of tensors of any float dtype, on any device; each returns a new tensor of that dtype.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...kernels.hadamard import Rotation, hadamard_rotation, random_rotation
from .settings import RotateSettings

ROWS_AT_ONCE = 8192  # of a large embedding, so that intermediate copies stay small


class HeadRows(NamedTuple):
    """Which rows of a linear are value heads: head h has the `dim` rows from start + h * stride."""

    heads: int
    dim: int
    stride: int
    start: int = 0


def residual_rotation(size: int, settings: RotateSettings) -> Rotation:
    """R1, for a residual stream of `size` channels."""
    return _rotation(size, settings, 0)


def value_rotation(size: int, layer: int, settings: RotateSettings) -> Rotation:
    """R2 of one layer, for heads of `size` channels; each layer has its own."""
    return _rotation(size, settings, layer + 1)


def rotate_reader(weight: Tensor, gain: Tensor | None, rotation: Rotation | None) -> Tensor:
    """What reads the residual: W diag(g) Q for W [..., out, in]; an embedding has no gain."""
    out = weight.clone()
    for rows in out.view(-1, out.shape[-1]).split(ROWS_AT_ONCE):
        if gain is not None:
            rows *= gain
        if rotation is not None:
            rows.copy_(rotation.apply(rows))
    return out


def rotate_writer(weight: Tensor, rotation: Rotation) -> Tensor:
    """What adds to the residual: Q^T W for W [..., out, in], b Q for a bias [out]."""
    if weight.ndim == 1:
        return rotation.apply(weight)
    return rotation.apply(weight.mT).mT.contiguous()


def rotate_value_outputs(weight: Tensor, rows: HeadRows, rotation: Rotation) -> Tensor:
    """What makes the values: R^T W for the rows of each head of W [out, in], b R for b [out]."""
    out = weight.clone()
    for h in range(rows.heads):
        first = rows.start + h * rows.stride
        part = out[first : first + rows.dim]
        part.copy_(rotate_writer(part, rotation))
    return out


def rotate_value_inputs(weight: Tensor, rotation: Rotation) -> Tensor:
    """What reads the heads' outputs: W R for the columns of each head of W [out, heads * dim]."""
    heads = weight.reshape(len(weight), -1, rotation.size)
    return rotation.apply(heads).reshape(weight.shape)


def _rotation(size: int, settings: RotateSettings, number: int) -> Rotation:
    make = hadamard_rotation if settings.kind == "hadamard" else random_rotation
    return make(size, number << 32 | settings.seed)
