"""What other programs refuse of quantized linears: facts of releases of mid 2026 (docs/formats.md).

Each was tried or read in the program's source. lowbit's own runtime takes all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..checkpoint.layouts import Layout
from ..checkpoint.layouts.gptq import GPTQ
from ..spec import LayerScheme
from .findings import Finding, finding


class Stored(NamedTuple):
    """How one linear is stored. ordered: whether its columns' groups are runs of columns, as far as
    the config says."""

    layout: Layout
    scheme: LayerScheme
    ordered: bool

    @property
    def packed(self) -> bool:
        """Whether whole numbers meet float inputs."""
        return self.scheme.weights.type == "int" and self.scheme.input_activations is None

    @property
    def bits(self) -> int:
        return self.scheme.weights.num_bits


class Limit(NamedTuple):
    """refused: which linears; taken: what the program takes instead; found: what it refuses."""

    refused: Callable[[Stored], bool]
    taken: str
    found: str


def _four_bit_floats(s: Stored) -> bool:
    return s.scheme.weights.type == "float" and s.bits == 4 and s.scheme.input_activations is None


def _static_fp8(s: Stored) -> bool:
    inputs = s.scheme.input_activations
    return inputs is not None and inputs.type == "float" and inputs.num_bits == 8 and not (
        inputs.dynamic
    )  # fmt: skip


def _is_gptq(s: Stored) -> bool:
    return isinstance(s.layout, GPTQ)


LIMITS = (
    Limit(
        lambda s: _is_gptq(s) and not s.ordered,
        "vLLM: desc_act false", "desc_act (columns in an order of their own, g_idx)",
    ),
    Limit(
        lambda s: _is_gptq(s) and not s.scheme.weights.symmetric,
        "vLLM: symmetric GPTQ", "zero-points of asymmetric GPTQ",
    ),
    Limit(
        lambda s: s.scheme.weights.type == "int" and s.bits not in (4, 8),
        "vLLM: whole numbers of 4 or 8 bits", "{bits}-bit codes",
    ),
    Limit(
        lambda s: s.packed and s.bits == 8,
        "vLLM without a GPU: 4-bit codes under float inputs", "8-bit codes under float inputs",
    ),
    Limit(
        _four_bit_floats,
        "vLLM without a GPU: no 4-bit floats", "4-bit floats under float inputs",
    ),
    Limit(
        _static_fp8,
        "vLLM without a GPU: FP8 whose inputs are quantized on the fly",
        "FP8 with stored scales of inputs",
    ),
)  # fmt: skip


def examine_readers(
    layout: Layout, schemes: Mapping[str, LayerScheme], quantization: Mapping[str, Any]
) -> Iterator[Finding]:
    """What some program refuses, each limit once, at the first linear that meets it."""
    told: set[tuple[str, str]] = set()
    ordered = not quantization.get("desc_act")
    for module, scheme in schemes.items():
        stored = Stored(layout, scheme, ordered)
        for limit in LIMITS:
            found = limit.found.format(bits=stored.bits)
            if (limit.taken, found) not in told and limit.refused(stored):
                told.add((limit.taken, found))
                yield finding("reader limit", module, limit.taken, found)
