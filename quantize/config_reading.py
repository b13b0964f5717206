"""Plain mappings (from YAML) to frozen configs, with every key and type checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from ..kernels.errors import UserError, did_you_mean

T = TypeVar("T")


def build(cls: type[T], data: Any, where: str, defaults: T | None = None) -> T:
    """An instance of a flat frozen config; `where` names the mapping in errors.

    A field's type is that of its default; a default of None allows null beside numbers.
    """
    data = mapping(data, where)
    known_keys(data, cls, where)
    defaults = cls() if defaults is None else defaults
    values = {}
    for key, value in data.items():
        default = getattr(defaults, key)
        if isinstance(default, tuple):
            value = _tuple(cls, key, value, where)
        elif isinstance(default, float) and _is_number(value):
            value = float(value)
        elif default is None:
            value = _optional_number(cls, key, value, where)
        elif type(value) is not type(default):
            raise UserError(f"{where}: '{key}' must be {type(default).__name__}, got {value!r}")
        values[key] = value
    return cls(**values)


def read_yaml(text: str, where: str) -> Any:
    """What `text` says; UserError, which begins with `where`, when it is not YAML."""
    import yaml  # here, so that help does not wait for it

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise UserError(f"{where} is not valid YAML: {' '.join(str(e).split())}") from e


def mapping(data: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise UserError(f"{where} must be a mapping, got {data!r}")
    return data


def known_keys(data: Mapping[str, Any], cls: Any, where: str) -> None:
    known = [f.name for f in fields(cls)]
    for key in data:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise UserError(f"{where}: unknown key '{key}'{hint} (known: {', '.join(known)})")


def plain(value: Any) -> Any:
    """Lists and dicts only, for YAML."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def _tuple(cls: Any, key: str, value: Any, where: str) -> tuple[Any, ...]:
    """A field whose annotation is tuple[int, ...] or tuple[str, ...], from a list of such."""
    whole = "int" in str(next(f.type for f in fields(cls) if f.name == key))
    member, words = (int, "whole numbers") if whole else (str, "strings")
    if not isinstance(value, list | tuple) or not all(type(v) is member for v in value):
        raise UserError(f"{where}: '{key}' must be a list of {words}, got {value!r}")
    return tuple(value)


def _optional_number(cls: Any, key: str, value: Any, where: str) -> Any:
    """A field whose default is None: what its annotation names before "| None", or null."""
    kind = next(f.type for f in fields(cls) if f.name == key).split(" | ")[0]
    if value is None or (kind == "int" and type(value) is int):
        return value
    if kind == "float" and (type(value) is float or _is_number(value)):
        return float(value)
    if kind == "str" and type(value) is str:
        return value
    raise UserError(f"{where}: '{key}' must be {kind} or null, got {value!r}")


def _is_number(value: Any) -> bool:
    """Also for text like "1e-2", which YAML 1.1 does not take for a number."""
    try:
        return type(value) in (int, str) and float(value) is not None
    except ValueError:
        return False
