"""The nouns: how one tensor is stored, and which tensors of a layer are.

The words are those of compressed-tensors and vLLM. A granularity is stored here once and never
guessed from a scale's shape.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..kernels.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorWise:
    """One scale for the whole tensor."""


@dataclass(frozen=True)
class Channel:
    """One scale for each output channel (row of the weight)."""


@dataclass(frozen=True)
class Group:
    """One scale for each `size` consecutive input columns of each row."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"group_size must be at least 1, got {self.size}")


@dataclass(frozen=True)
class Token:
    """One scale for each row of the activation."""


@dataclass(frozen=True)
class Block:
    """One scale for each rectangle of `rows` x `columns`."""

    rows: int
    columns: int


Granularity = TensorWise | Channel | Group | Token | Block


@dataclass(frozen=True)
class QuantSpec:
    """How one tensor is stored.

    `dynamic`: scales are computed from the tensor when it is used (activations only).
    """

    num_bits: int
    type: Literal["int", "float"] = "int"
    granularity: Granularity = Channel()
    symmetric: bool = True
    dynamic: bool = False

    def __post_init__(self) -> None:
        if self.type == "int" and not 2 <= self.num_bits <= 8:
            raise UserError(f"int formats hold 2 to 8 bits, got num_bits={self.num_bits}")
        if self.type == "float" and self.num_bits not in (4, 8):
            raise UserError(f"float formats hold 4 or 8 bits, got num_bits={self.num_bits}")
        if self.type == "float" and not self.symmetric:
            raise UserError("float formats are symmetric: they have no zero-point")

    def groups(self, in_features: int) -> int:
        """Number of scale groups along a weight row of `in_features` columns."""
        if isinstance(self.granularity, Group):
            return in_features // self.granularity.size
        return 1


@dataclass(frozen=True)
class LayerScheme:
    """How a linear layer's weights and input activations are stored."""

    weights: QuantSpec
    input_activations: QuantSpec | None = None


@dataclass(frozen=True)
class KVSpec:
    """How cached keys and values are stored."""

    key: QuantSpec
    value: QuantSpec


class Quantized(NamedTuple):
    """A quantized weight: value ~ (codes - zero_point) * scale, see kernels/affine.py.

    codes int8 [out, in]; scale [out, groups] in the dtype that it is stored in;
    zero_point int8 [out, groups], None when symmetric.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    spec: QuantSpec


def _weights(num_bits: int, symmetric: bool = True) -> LayerScheme:
    return LayerScheme(QuantSpec(num_bits, granularity=Group(128), symmetric=symmetric))


PRESETS: dict[str, LayerScheme] = {
    "W4A16": _weights(4),
    "W4A16_ASYM": _weights(4, symmetric=False),
    "W3A16": _weights(3),
    "W3A16_ASYM": _weights(3, symmetric=False),
    "W2A16": _weights(2),
    "W2A16_ASYM": _weights(2, symmetric=False),
    "W8A16": LayerScheme(QuantSpec(8, granularity=Channel())),
}


def scheme_from_name(name: str, group_size: int | None = None) -> LayerScheme:
    """The preset `name`; `group_size` overrides its granularity (-1: one group a channel).

    Raises UserError with the nearest names when there is no such preset.
    """
    scheme = PRESETS.get(name.upper())
    if scheme is None:
        near = difflib.get_close_matches(name.upper(), PRESETS, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"unknown scheme '{name}'{hint} (known: {', '.join(PRESETS)})")
    return scheme if group_size is None else with_group_size(scheme, group_size)


def with_group_size(scheme: LayerScheme, group_size: int) -> LayerScheme:
    """`scheme` with its weights in groups of `group_size` columns (-1: one group a channel)."""
    if group_size == 0 or group_size < -1:
        raise UserError(f"group_size must be a positive number or -1 (channel), got {group_size}")
    granularity = Channel() if group_size == -1 else Group(group_size)
    return replace(scheme, weights=replace(scheme.weights, granularity=granularity))
