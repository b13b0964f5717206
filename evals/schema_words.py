"""The words that schemas of results are made of."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
FLAG: Schema = {"type": "boolean"}


def maybe(schema: Schema) -> Schema:
    """The same or null: not measured, or not there."""
    return {"anyOf": [schema, {"type": "null"}]}


def record(fields: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with all of `fields`; more keys may stand beside them."""
    return {
        "type": "object",
        "properties": {**fields, **(optional or {})},
        "required": list(fields),
    }
