"""A quantized weight: its codes and what turns them into values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.affine import dequantize_affine, stored_scale_value
from ..kernels.elements import Elements, elements_of
from ..kernels.errors import UserError
from .spec import QuantSpec


def elements(spec: QuantSpec) -> Elements:
    """What the codes of a tensor stored as `spec` can be."""
    return elements_of(spec.type, spec.num_bits)


def plain_g_idx(columns: int, spec: QuantSpec) -> Tensor:
    """int32 [in]: the group of each column where groups are runs of columns."""
    return torch.arange(columns, dtype=torch.int32) // -(-columns // spec.groups(columns))


class Quantized(NamedTuple):
    """A quantized weight: value ~ (codes - zero_point) * scale, see kernels/affine.py.

    codes [out, in], int8 or (float formats) float8_e4m3fn; scale, of `spec.scale_shape`, as it is
    stored: in the model's dtype, as float8_e4m3fn to be divided by global_scale, or as uint8
    exponents (E8M0, 127 is one); zero_point int8 of the same shape, None when symmetric;
    global_scale float32 [1], None where the scale needs none; g_idx int32 [in], the group of each
    column, None where groups are runs of columns.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    spec: QuantSpec
    global_scale: Tensor | None = None
    g_idx: Tensor | None = None

    def by_group(self) -> tuple[Quantized, Tensor]:
        """The weight with its columns in the order of their groups, and which they were, int64 [in]
        (x @ W.T is x[..., columns] @ V.T). UserError where groups are not of one size."""
        columns = self.codes.shape[1]
        if self.g_idx is None:
            return self, torch.arange(columns, device=self.codes.device)
        groups = self.scale.shape[1]
        sizes = torch.bincount(self.g_idx, minlength=groups)
        if not bool((sizes == columns // groups).all()):
            raise UserError(
                f"g_idx gives groups of {int(sizes.min())} to {int(sizes.max())} columns, where "
                f"{columns // groups} each are expected"
            )
        order = torch.argsort(self.g_idx, stable=True)
        return self._replace(codes=self.codes[:, order], g_idx=None), order

    def float_scale(self) -> Tensor:
        """What an element is multiplied with, float32, in the scale's shape."""
        return stored_scale_value(self.scale, self.global_scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [out, in]: computed in float32, rounded once to `dtype`."""
        scale = self.float_scale()
        return dequantize_affine(
            self.codes, scale, self.zero_point, dtype, self.spec.block, self.g_idx
        )
