"""What is wrong with a body, in its client's own words: pydantic's errors name the branches of
unions and its own types, which nobody has written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...kernels.errors import counted

MAX_SHOWN = 60  # letters of a string
_MAX_ITEMS, _MAX_DEPTH = 4, 2  # of a list or an object

_KINDS = {
    "string_type": "a string", "int_type": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "an object",
    "model_type": "an object", "model_attributes_type": "an object",
    "finite_number": "a finite number",
}  # fmt: skip
_BRANCHES = {
    "str": "a string", "list[str]": "a list of strings", "list[int]": "a list of token ids",
    "list[list[int]]": "a list of lists of token ids", "dict[str,any]": "an object",
    "list[TextPart]": "a list of parts",
}  # fmt: skip
_LIMITS = {
    "greater_than_equal": "at least {ge}", "greater_than": "above {gt}",
    "less_than_equal": "at most {le}", "less_than": "below {lt}",
}  # fmt: skip


class Wrong(NamedTuple):
    """field: as a client would write it, messages[0].content; empty: the body as a whole. code:
    None, or a word for programs."""

    field: str
    message: str
    code: str | None = None


class _Place(NamedTuple):
    """path: keys and indices that are in the body, or that are missing at its end. branch: of a
    union, the first there is; base: the length of the path before it."""

    path: tuple[str | int, ...]
    branch: str | None
    base: int


def what_is_wrong(errors: Sequence[Mapping[str, Any]], body: Any) -> Wrong:
    """The first thing. errors: pydantic's, one or more, of `body`, in which "body" begins the
    places."""
    first = errors[0]
    if first["type"] == "json_invalid":
        told = f"{first['ctx']['error']} at character {first['loc'][-1]}"
        return Wrong("", f"the body is no JSON: {told}")
    place = _place(first, body)
    if place.branch is None:
        return _one(first, place)
    around = place.path[: place.base]
    same = [(e, _place(e, body)) for e in errors]
    same = [(e, p) for e, p in same if p.branch is not None and p.path[: p.base] == around]
    inside = [(e, p) for e, p in same if len(p.path) > p.base]
    if len({p.branch for _, p in inside}) == 1:
        return _one(*inside[0])
    branches = dict.fromkeys(_branch(p.branch, same) for _, p in same if p.branch is not None)
    field = _written(around)
    return Wrong(field, f"{field} must be {_either(list(branches))}, got {_at(body, around)}")


def _one(error: Mapping[str, Any], place: _Place) -> Wrong:
    kind, context, field = error["type"], error.get("ctx") or {}, _written(place.path)
    name, value = field or "the body", shown(error.get("input"))
    if kind == "extra_forbidden":
        return Wrong(field, f"unknown field: {field}", "unknown_field")
    if kind == "missing":
        return Wrong(field, f"{field} is missing" if field else "the body is empty: send JSON")
    if kind == "no_content":
        return Wrong(f"{field}.content", f"{field}.content is missing: {error['msg']}")
    if kind == "literal_error":
        return Wrong(field, f"{name} must be {context['expected']}, got {value}")
    if kind in _LIMITS:
        return Wrong(field, f"{name} must be {_LIMITS[kind].format(**context)}, got {value}")
    if kind in ("too_short", "string_too_short"):
        what = "item" if kind == "too_short" else "character"
        return Wrong(field, f"{name} must have at least {counted(context['min_length'], what)}")
    if kind in ("too_long", "string_too_long"):
        what = "item" if kind == "too_long" else "character"
        return Wrong(field, f"{name} must have at most {counted(context['max_length'], what)}")
    wanted = _KINDS.get(kind)
    return Wrong(field, f"{name} must be {wanted}, got {value}" if wanted else error["msg"])


def shown(value: Any, depth: int = _MAX_DEPTH) -> str:
    """As JSON, the beginning of what is long or deep."""
    if isinstance(value, str):
        return json.dumps(value[:MAX_SHOWN], ensure_ascii=False) + "..." * (len(value) > MAX_SHOWN)
    if not isinstance(value, list | dict):
        return json.dumps(value, default=str)[:MAX_SHOWN]
    opened, closed = "[]" if isinstance(value, list) else "{}"
    if value and depth == 0:
        return f"{opened}...{closed}"
    if isinstance(value, list):
        items = [shown(item, depth - 1) for item in value[:_MAX_ITEMS]]
    else:
        some = list(value.items())[:_MAX_ITEMS]
        items = [f"{shown(key)}: {shown(item, depth - 1)}" for key, item in some]
    items += ["..."] * (len(value) > _MAX_ITEMS)
    return f"{opened}{', '.join(items)}{closed}"


def _place(error: Mapping[str, Any], body: Any) -> _Place:
    path: list[str | int] = []
    branch, base, here = None, 0, body
    parts = error["loc"][1:]
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        if _has(here, part):
            here = here[part]
        elif not (is_last and error["type"] == "missing"):
            if branch is None:
                branch, base = str(part), len(path)
            continue
        path.append(part)
    return _Place(tuple(path), branch, base)


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and 0 <= part < len(value)
    return isinstance(value, dict) and part in value


def _at(body: Any, path: Sequence[str | int]) -> str:
    for part in path:
        body = body[part]
    return shown(body)


def _written(path: Sequence[str | int]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def _branch(branch: str, errors: Sequence[tuple[Mapping[str, Any], _Place]]) -> str:
    """In words."""
    if branch.startswith("literal["):
        return next(e["ctx"]["expected"] for e, p in errors if p.branch == branch)
    return _BRANCHES.get(branch, "an object")


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
