"""The recipe: what is quantized, where, how and on which calibration rows.

Three small frozen configs per pass: the scheme (what), targets and ignore rules (where), the
method's settings (how). A recipe is checked whole before any data is read, and reads and writes
YAML; an unknown key is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from ..kernels.errors import UserError
from .passes.settings import GPTQSettings
from .spec import LayerScheme, scheme_from_name

Method = Literal["gptq", "rtn"]
DTYPES = ("auto", "float32", "bfloat16", "float16")
T = TypeVar("T")


@dataclass(frozen=True)
class Calibration:
    """Which token rows are seen: `samples` windows of `seq_len` tokens of `source`.

    shuffle: windows drawn by `seed` instead of the first ones.
    """

    source: str = "auto"
    samples: int = 128
    seq_len: int = 512
    seed: int = 0
    shuffle: bool = False

    def __post_init__(self) -> None:
        _at_least_one("samples", self.samples)
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
        _at_least_one("batch_size", self.batch_size)
        _one_of("order", self.order, ("sequential", "parallel"))
        _one_of("dtype", self.dtype, DTYPES)


@dataclass(frozen=True)
class WeightPass:
    """One weight quantizer and the linears that it takes.

    group_size: None chooses the largest of 128, 64, 32, 16 that divides every target (-1: channel).
    targets, ignore: module names, "re:" patterns or class names; "Linear" means every linear of the
    decoder layers (lm_head has to be named).
    """

    method: Method = "gptq"
    scheme: str = "W4A16"
    group_size: int | None = None
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()
    gptq: GPTQSettings = field(default_factory=GPTQSettings)

    def __post_init__(self) -> None:
        _one_of("method", self.method, ("gptq", "rtn"))
        scheme_from_name(self.scheme, self.group_size)
        if not self.targets:
            raise UserError("a pass without targets does nothing; name at least one")

    @property
    def layer_scheme(self) -> LayerScheme:
        """The scheme by name; its group size is the preset's where `group_size` is None."""
        return scheme_from_name(self.scheme, self.group_size)

    @property
    def needs(self) -> frozenset[str]:
        """The statistics that the method wants."""
        return frozenset({"hessian"}) if self.method == "gptq" else frozenset()


@dataclass(frozen=True)
class Recipe:
    """An ordered list of passes, the calibration rows, and how the loop runs."""

    passes: tuple[WeightPass, ...] = field(default_factory=lambda: (WeightPass(),))
    calibration: Calibration = field(default_factory=Calibration)
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        if not self.passes:
            raise UserError("a recipe needs at least one pass")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(p.needs for p in self.passes))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, in the form that `from_dict` reads."""
        return _plain(asdict(self))

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_dict(cls, data: Any) -> Recipe:
        """UserError for unknown keys, wrong types and values out of range."""
        data = _mapping(data, "recipe")
        _known_keys(data, cls, "recipe")
        passes = data.get("passes", [{}])
        if not isinstance(passes, list):
            raise UserError("recipe: 'passes' must be a list")
        return cls(
            passes=tuple(_pass_from_dict(p, f"passes[{i}]") for i, p in enumerate(passes)),
            calibration=_build(Calibration, data.get("calibration", {}), "calibration"),
            execution=_build(Execution, data.get("execution", {}), "execution"),
        )

    @classmethod
    def from_yaml(cls, path: Path) -> Recipe:
        if not path.is_file():
            raise UserError(f"no such recipe file: {path}")
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as e:
            raise UserError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from e
        return cls.from_dict(data if data is not None else {})


def _pass_from_dict(data: Any, where: str) -> WeightPass:
    data = dict(_mapping(data, where))
    data["gptq"] = _build(GPTQSettings, data.get("gptq", {}), f"{where}.gptq")
    return _build(WeightPass, data, where)


def _build(cls: type[T], data: Any, where: str) -> T:
    """An instance of a flat frozen config, with its keys and types checked."""
    data = _mapping(data, where)
    _known_keys(data, cls, where)
    defaults = cls()
    values = {}
    for key, value in data.items():
        default = getattr(defaults, key)
        if isinstance(default, tuple):
            if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
                raise UserError(f"{where}: '{key}' must be a list of strings, got {value!r}")
            value = tuple(value)
        elif isinstance(default, float) and _is_number(value):
            value = float(value)
        elif type(value) is not type(default) and not _optional_int(default, value):
            kind = "int or null" if default is None else type(default).__name__
            raise UserError(f"{where}: '{key}' must be {kind}, got {value!r}")
        values[key] = value
    return cls(**values)


def _is_number(value: Any) -> bool:
    """Also for text like "1e-2", which YAML 1.1 does not take for a number."""
    try:
        return type(value) in (int, str) and float(value) is not None
    except ValueError:
        return False


def _optional_int(default: Any, value: Any) -> bool:
    return default is None and (value is None or type(value) is int)


def _mapping(data: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise UserError(f"{where} must be a mapping, got {data!r}")
    return data


def _known_keys(data: Mapping[str, Any], cls: Any, where: str) -> None:
    known = [f.name for f in fields(cls)]
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise UserError(f"{where}: unknown key '{key}'{hint} (known: {', '.join(known)})")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{name} must be at least 1, got {value}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UserError(f"unknown {name} '{value}'{hint} (known: {', '.join(known)})")
