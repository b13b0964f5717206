"""The nouns: how one tensor is stored, and which tensors of a layer are.

The words are those of compressed-tensors and vLLM. A granularity is stored here once and never
guessed from a scale's shape.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

from ..kernels.errors import UserError


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

    def __post_init__(self) -> None:
        for size in (self.rows, self.columns):
            if type(size) is not int or size < 1:
                raise UserError(f"a block has at least 1 row and column, got {str(size)[:40]}")


@dataclass(frozen=True)
class Head:
    """One scale for all tokens of each attention head of the cached keys or values."""


@dataclass(frozen=True)
class TokenGroup:
    """One scale for each channel of a head over `size` consecutive tokens of the cache."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"a group of tokens has at least 1, got {self.size}")


Granularity = TensorWise | Channel | Group | Token | Block | Head | TokenGroup


@dataclass(frozen=True)
class QuantSpec:
    """How one tensor is stored.

    `dynamic`: scales are computed from the tensor when it is used (activations only).
    `scale_dtype`: "model" stores scales in the model's dtype; "e4m3" in 8-bit floats under one
    float32 scale of the whole tensor (NVFP4); "e8m0" as powers of two (MX formats).
    """

    num_bits: int
    type: Literal["int", "float"] = "int"
    granularity: Granularity = Channel()
    symmetric: bool = True
    dynamic: bool = False
    scale_dtype: Literal["model", "e4m3", "e8m0"] = "model"

    def __post_init__(self) -> None:
        if self.type not in ("int", "float"):
            raise UserError(f"a tensor is stored as int or float, not {str(self.type)[:40]!r}")
        if self.type == "int" and not 2 <= self.num_bits <= 8:
            raise UserError(f"int formats hold 2 to 8 bits, got num_bits={self.num_bits}")
        if self.type == "float" and self.num_bits not in (4, 8):
            raise UserError(f"float formats hold 4 or 8 bits, got num_bits={self.num_bits}")
        if self.type == "float" and not self.symmetric:
            raise UserError("float formats are symmetric: they have no zero-point")
        if self.scale_dtype != "model" and not isinstance(self.granularity, Group):
            raise UserError(f"{self.scale_dtype} scales are for groups of columns")

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, where they are blocks of both."""
        match self.granularity:
            case Block(rows, columns):
                return rows, columns
        return None

    def groups(self, in_features: int) -> int:
        """Number of scale groups along a weight row of `in_features` columns."""
        match self.granularity:
            case Group(size):
                return in_features // size
            case Block(_, columns):
                return -(-in_features // columns)
        return 1

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """The shape of a weight's scale."""
        match self.granularity:
            case TensorWise():
                return 1, 1
            case Block(rows, _):
                return -(-out_features // rows), self.groups(in_features)
        return out_features, self.groups(in_features)


@dataclass(frozen=True)
class LayerScheme:
    """How a linear layer's weights and input activations are stored."""

    weights: QuantSpec
    input_activations: QuantSpec | None = None


@dataclass(frozen=True)
class KVSpec:
    """How cached keys and values are stored; None: as they were computed.

    Their granularities: Token (one scale a token and head), Group (some channels of one),
    TokenGroup (one channel over some tokens); static ones, whose scales are calibrated: TensorWise,
    Head. rotate_key, rotate_value: through a Hadamard matrix of each head. key_before_rope: keys
    are taken back to what they were before their rotary embedding. skip_layers: decoder layers
    (from 0) whose keys and values stay as they were computed.
    """

    key: QuantSpec | None
    value: QuantSpec | None
    rotate_key: bool = False
    rotate_value: bool = False
    key_before_rope: bool = False
    skip_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.key is None and self.value is None:
            raise UserError("a cache whose keys and values both stay as they are is not quantized")
        for name, part in (("keys", self.key), ("values", self.value)):
            if part is not None:
                _check_cached(name, part)
        if self.rotate_key and self.key_before_rope:
            raise UserError("keys are rotated after their rotary embedding: key_before_rope is off")
        if any(layer < 0 for layer in self.skip_layers):
            raise UserError(f"skip_layers counts layers from 0, got {min(self.skip_layers)}")

    @property
    def is_static(self) -> bool:
        """Whether some scales are calibrated and stored in the checkpoint."""
        return any(part is not None and not part.dynamic for part in (self.key, self.value))


def _check_cached(name: str, part: QuantSpec) -> None:
    dynamic = isinstance(part.granularity, Token | Group | TokenGroup)
    if not dynamic and not isinstance(part.granularity, TensorWise | Head):
        raise UserError(f"cached {name} have no {type(part.granularity).__name__} granularity")
    if part.dynamic != dynamic:
        raise UserError(
            f"cached {name} by {type(part.granularity).__name__} have "
            f"{'dynamic' if dynamic else 'static'} scales"
        )
    if not dynamic and not part.symmetric:
        raise UserError(f"static scales of cached {name} are symmetric")
    if part.type == "float" and part.num_bits != 8:
        raise UserError(f"cached {name} are int of 2 to 8 bits or float of 8, got {part.num_bits}")


def _weights(num_bits: int, symmetric: bool = True) -> LayerScheme:
    return LayerScheme(QuantSpec(num_bits, granularity=Group(128), symmetric=symmetric))


def _float8(weights: Granularity, activations: Granularity, dynamic: bool = True) -> LayerScheme:
    return LayerScheme(
        QuantSpec(8, "float", weights), QuantSpec(8, "float", activations, dynamic=dynamic)
    )


def _dynamic_int8(weights: QuantSpec) -> LayerScheme:
    return LayerScheme(weights, QuantSpec(8, granularity=Token(), dynamic=True))


def _micro(num_bits: int, size: int, scale_dtype: Literal["e4m3", "e8m0"]) -> QuantSpec:
    return QuantSpec(num_bits, "float", Group(size), scale_dtype=scale_dtype)


def _micro_both(num_bits: int, size: int, scale_dtype: Literal["e4m3", "e8m0"]) -> LayerScheme:
    weights = _micro(num_bits, size, scale_dtype)
    return LayerScheme(weights, replace(weights, dynamic=True))


PRESETS: dict[str, LayerScheme] = {
    "W2A16": _weights(2),
    "W2A16_ASYM": _weights(2, symmetric=False),
    "W3A16": _weights(3),
    "W3A16_ASYM": _weights(3, symmetric=False),
    "W4A16": _weights(4),
    "W4A16_ASYM": _weights(4, symmetric=False),
    "W5A16": _weights(5),
    "W5A16_ASYM": _weights(5, symmetric=False),
    "W6A16": _weights(6),
    "W6A16_ASYM": _weights(6, symmetric=False),
    "W8A16": LayerScheme(QuantSpec(8, granularity=Channel())),
    "W8A8": _dynamic_int8(QuantSpec(8, granularity=Channel())),
    "W8A8_STATIC": LayerScheme(
        QuantSpec(8, granularity=Channel()), QuantSpec(8, granularity=TensorWise())
    ),
    "W4A8": _dynamic_int8(QuantSpec(4, granularity=Group(128))),
    "FP8": _float8(TensorWise(), TensorWise(), dynamic=False),
    "FP8_DYNAMIC": _float8(Channel(), Token()),
    "FP8_BLOCK": _float8(Block(128, 128), Group(128)),
    "NVFP4A16": LayerScheme(_micro(4, 16, "e4m3")),
    "NVFP4": _micro_both(4, 16, "e4m3"),
    "MXFP4A16": LayerScheme(_micro(4, 32, "e8m0")),
    "MXFP4": _micro_both(4, 32, "e8m0"),
    "MXFP8A16": LayerScheme(_micro(8, 32, "e8m0")),
    "MXFP8": _micro_both(8, 32, "e8m0"),
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
    if scheme.weights.type == "float" and granularity != scheme.weights.granularity:
        raise UserError(
            f"group_size {group_size} is given, but float formats have scales of their own "
            f"({scheme.weights.granularity}); leave it out"
        )
    return replace(scheme, weights=replace(scheme.weights, granularity=granularity))
