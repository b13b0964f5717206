"""What a quantized linear asks of the kernels (kernels/linear_ops.py), from its scheme."""

from __future__ import annotations

import torch

from ..kernels.errors import UserError
from ..kernels.linear_ops import LinearProblem
from .activations import activation_format
from .spec import Block, Channel, Group, LayerScheme, TensorWise


def linear_problem(
    module: str,
    scheme: LayerScheme,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> LinearProblem:
    """The kernel question that a weight of `shape` [out, in] stored as `scheme` asks."""
    out_features, in_features = shape
    spec = scheme.weights
    match spec.granularity:
        case Group(size):
            group_size = size
        case Channel() | TensorWise():
            group_size = in_features
        case Block(_, columns):
            group_size = columns
        case other:
            raise UserError(f"{module} has weight scales for each {other}, which is not run")
    if in_features % group_size and spec.block is None:
        raise UserError(
            f"{module} has groups of {group_size} columns, which do not divide its {in_features}"
        )
    inputs = scheme.input_activations
    try:
        activation = None if inputs is None else activation_format(inputs)
    except UserError as e:
        raise UserError(f"{module}: {e}") from e
    return LinearProblem(
        spec.num_bits, group_size, spec.symmetric, in_features, out_features, dtype, device.type,
        spec.type, activation,
    )  # fmt: skip
