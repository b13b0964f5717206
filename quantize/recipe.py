"""The recipe: what is quantized, where, how and on which calibration rows.

Three small frozen configs per pass: the scheme (what), targets and ignore rules (where), the
method's settings (how). A recipe is checked whole before any data is read, and reads and writes
YAML; an unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml

from ..kernels.errors import UserError, no_file
from .config_reading import build, known_keys, mapping, plain, read_yaml
from .layout_check import NATIVE, check_format
from .passes.settings import BudgetSettings, at_least_one, one_of
from .recipe_passes import (
    STAGES,
    TRANSFORMS,
    KVCachePass,
    Pass,
    Transform,
    WeightPass,
    pass_from_dict,
    pass_to_dict,
)

__all__ = ["Calibration", "Execution", "KVCachePass", "Pass", "Recipe", "Transform", "WeightPass"]

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Calibration:
    """Which token rows are seen: `samples` windows of `seq_len` tokens of `source`.

    shuffle: windows drawn by `seed` instead of the first ones.
    all_experts: every expert's statistics are those of all tokens, not of those routed to it.
    """

    source: str = "auto"
    samples: int = 128
    seq_len: int = 512
    seed: int = 0
    shuffle: bool = False
    all_experts: bool = False

    def __post_init__(self) -> None:
        at_least_one("samples", self.samples)
        if self.seq_len < 2:
            raise UserError(f"seq_len must be at least 2, got {self.seq_len}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be from 0 to 2**63 - 1, got {self.seed}")


@dataclass(frozen=True)
class Execution:
    """How the layer loop runs.

    order: "sequential" calibrates each linear on what the quantized ones before it hand over;
        "parallel" observes the unquantized layer (less memory, up to twice the time).
    batch_size: rows of one forward pass.
    dtype: of the forward passes; "auto" takes the faster of float32 and bfloat16 on this device.
    """

    order: Literal["sequential", "parallel"] = "sequential"
    batch_size: int = 8
    dtype: str = "auto"

    def __post_init__(self) -> None:
        at_least_one("batch_size", self.batch_size)
        one_of("order", self.order, ("sequential", "parallel"))
        one_of("dtype", self.dtype, DTYPES)


@dataclass(frozen=True)
class Recipe:
    """An ordered list of passes, the calibration rows, and how the loop runs.

    Transforms come first, then weight quantizers (at most one a linear), then the cache's.
    budget: each linear's bits and group size are chosen so that their mean keeps to it.
    format: the checkpoint layout that the output has.
    """

    passes: tuple[Pass, ...] = field(default_factory=lambda: (WeightPass(),))
    calibration: Calibration = field(default_factory=Calibration)
    execution: Execution = field(default_factory=Execution)
    budget: BudgetSettings | None = None
    format: str = NATIVE

    def __post_init__(self) -> None:
        check_order(self.passes)
        if "input_shift" in self.needs and self.execution.order == "parallel":
            raise UserError(
                "input_correction follows the float model in step with the quantized one, which "
                "order 'parallel' does not; use order 'sequential'"
            )
        if self.budget is not None:
            check_budget(self.passes)
        check_format(self.format, self.weight_passes, self.budget is not None)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return tuple(p for p in self.passes if isinstance(p, Transform))

    @property
    def weight_passes(self) -> tuple[WeightPass, ...]:
        return tuple(p for p in self.passes if isinstance(p, WeightPass))

    @property
    def has_g_idx(self) -> bool:
        """Whether some pass leaves columns that lie in no order of groups."""
        return any(
            p.method == "gptq" and p.gptq.act_order == "desc_act" for p in self.weight_passes
        )

    @property
    def kv_cache(self) -> KVCachePass | None:
        return next((p for p in self.passes if isinstance(p, KVCachePass)), None)

    @property
    def reads_text(self) -> bool:
        """Whether calibration text is read at all."""
        return bool(self.needs) or self.budget is not None

    @property
    def needs(self) -> frozenset[str]:
        """What the passes want observed; nothing: they need no calibration rows."""
        return frozenset().union(*(p.needs for p in self.passes))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, in the form that `from_dict` reads."""
        return {
            "passes": [pass_to_dict(p) for p in self.passes],
            "calibration": plain(asdict(self.calibration)),
            "execution": plain(asdict(self.execution)),
            **({} if self.budget is None else {"budget": plain(asdict(self.budget))}),
            **({} if self.format == NATIVE else {"format": self.format}),
        }

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_dict(cls, data: Any) -> Recipe:
        """UserError for unknown keys, wrong types and values out of range."""
        data = mapping(data, "recipe")
        known_keys(data, cls, "recipe")
        passes = data.get("passes", [{}])
        if not isinstance(passes, list):
            raise UserError("recipe: 'passes' must be a list")
        budget = data.get("budget")
        return cls(
            passes=tuple(pass_from_dict(p, f"passes[{i}]") for i, p in enumerate(passes)),
            calibration=build(Calibration, data.get("calibration", {}), "calibration"),
            execution=build(Execution, data.get("execution", {}), "execution"),
            budget=None if budget is None else build(BudgetSettings, budget, "budget"),
            format=str(data.get("format", NATIVE)),
        )

    @classmethod
    def from_yaml(cls, path: Path) -> Recipe:
        if not path.is_file():
            raise no_file(path, "recipe file")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"{path} is not valid YAML: {e}") from e
        data = read_yaml(text, str(path))
        if data is None:
            raise UserError(
                f"{path} is empty, so it is no recipe; quantize run --dump-recipe prints one"
            )
        return cls.from_dict(data)


def check_order(passes: Sequence[Pass]) -> None:
    """UserError for an order or a combination of passes that makes no sense."""
    if not passes:
        raise UserError("a recipe needs at least one pass")
    stages = [STAGES.index(type(p)) for p in passes]
    for a, b in pairwise(range(len(passes))):
        if stages[a] > stages[b]:
            raise UserError(
                f"'{passes[b].method}' comes after '{passes[a].method}'; the order is transforms "
                f"({', '.join(TRANSFORMS)}), weight quantizers, kv_cache"
            )
    methods = [p.method for p in passes]
    for once in (*TRANSFORMS, "kv_cache"):
        if methods.count(once) > 1:
            raise UserError(f"'{once}' is listed {methods.count(once)} times; once is enough")
    if "rotate" in methods and methods[0] != "rotate":
        raise UserError("'rotate' turns the original weights; it has to come first")
    if {"awq", "smoothquant"} <= set(methods):
        raise UserError(
            "'awq' and 'smoothquant' both set the scale of the same inputs, and the second would "
            "undo the first; keep one (awq for weight-only schemes, smoothquant for W8A8)"
        )
    quantizers = [p for p in passes if isinstance(p, WeightPass)]
    scaled = next((m for m in methods if m in TRANSFORMS), None)
    if scaled and not quantizers:
        raise UserError(f"'{scaled}' prepares weights for a quantizer, but none follows; add one")
    plain_inputs = all(p.layer_scheme.input_activations is None for p in quantizers)
    if "smoothquant" in methods and plain_inputs:
        raise UserError(
            "'smoothquant' makes activations easier to quantize, but no pass quantizes them "
            f"(scheme {quantizers[0].scheme}); use awq, or a scheme such as W8A8"
        )


def check_budget(passes: Sequence[Pass]) -> None:
    """UserError where the passes leave nothing for a bit budget to choose."""
    quantizers = [p for p in passes if isinstance(p, WeightPass)]
    if not quantizers:
        raise UserError("a bit budget is for weights, but no pass quantizes any; add gptq or rtn")
    floats = [p.scheme for p in quantizers if p.layer_scheme.weights.type == "float"]
    if floats:
        raise UserError(
            f"a bit budget chooses the width of whole numbers, but {floats[0]} stores floats; take "
            "a scheme like W4A16"
        )
    bytes_each = [p.scheme for p in quantizers if p.layer_scheme.input_activations is not None]
    if bytes_each:
        raise UserError(
            f"a bit budget saves nothing with {bytes_each[0]}: beside quantized activations each "
            "weight is stored in a byte; take a scheme like W4A16"
        )
