"""What every layout checks when it reads a linear's tensors, since files are not trusted."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.errors import UserError
from ..quantized import Quantized, plain_g_idx
from ..spec import Group, QuantSpec, TensorWise

Get = Callable[[str], Tensor]


def read_tensor(get: Get, name: str, dtype: torch.dtype) -> Tensor:
    """The tensor `name`, which has to be of `dtype`."""
    tensor = get(name)
    if tensor.dtype != dtype:
        raise UserError(f"{name} is {tensor.dtype}, not {dtype}: the checkpoint is damaged")
    return tensor


def read_matrix(get: Get, name: str, dtype: torch.dtype) -> Tensor:
    """The tensor `name`, which has to be of `dtype` with two axes."""
    tensor = read_tensor(get, name, dtype)
    if tensor.dim() != 2:
        raise UserError(f"{name} has {tensor.dim()} axes, not 2: the checkpoint is damaged")
    return tensor


def read_float_scale(get: Get, name: str) -> Tensor:
    """Scales of any float dtype, all finite (they may be negative)."""
    scale = get(name)
    if not scale.is_floating_point():
        raise UserError(f"{name} is {scale.dtype}, which holds no scale: the checkpoint is damaged")
    if not bool(torch.isfinite(scale.float()).all()):
        raise UserError(f"{name} must hold finite numbers: the checkpoint is damaged")
    return scale


def read_g_idx(get: Get, name: str, columns: int, spec: QuantSpec) -> Tensor | None:
    """The group of each column, int32 [in]; None where groups are runs of columns.

    Some older files have -1 throughout, which means that too. UserError when it names groups that
    do not exist.
    """
    g_idx, groups = read_tensor(get, name, torch.int32), spec.groups(columns)
    if tuple(g_idx.shape) != (columns,):
        raise UserError(
            f"{name} has shape {tuple(g_idx.shape)}, but the weight has {columns} columns: the "
            "checkpoint is damaged"
        )
    if bool((g_idx == -1).all()):
        return None
    wrong = g_idx[(g_idx < 0) | (g_idx >= groups)]
    if len(wrong):
        raise UserError(
            f"{name} names group {int(wrong[0])}, but there are {groups}, from 0: the checkpoint "
            "is damaged"
        )
    return None if torch.equal(g_idx, plain_g_idx(columns, spec).to(g_idx.device)) else g_idx


def check_groups(module: str, columns: int, spec: QuantSpec) -> None:
    """UserError when groups of the spec's size do not divide the columns."""
    match spec.granularity:
        case Group(size) if columns % size:
            raise UserError(f"{module}: groups of {size} do not divide {columns} columns")


def checked(module: str, q: Quantized, scale_leaf: str, zero_leaf: str) -> Quantized:
    """`q` with its scale in the spec's shape; UserError when that or a zero-point cannot be.

    scale_leaf, zero_leaf: what the tensors are called in the file.
    """
    rows, columns = q.codes.shape
    check_groups(module, columns, q.spec)
    if isinstance(q.spec.granularity, TensorWise) and q.scale.numel() == 1:
        q = q._replace(scale=q.scale.reshape(1, 1))
    expected = q.spec.scale_shape(rows, columns)
    for leaf, qparam in ((scale_leaf, q.scale), (zero_leaf, q.zero_point)):
        if qparam is not None and tuple(qparam.shape) != expected:
            raise UserError(
                f"{module}.{leaf} has shape {tuple(qparam.shape)}, but {rows} x {columns} codes in "
                f"{math.prod(expected)} groups take {expected}: the checkpoint is damaged"
            )
    return q
