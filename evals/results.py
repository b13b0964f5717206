"""The results file: JSON that `quantize eval`, `run`, `demo`, `compare` write and `report` reads.

Its head says format, version and producer; `environment`, `protocol` and `rows` hold what was
measured, by the schema in evals/results_schema.py (docs/results.schema.json). More keys may stand
beside them. A reader takes versions that it knows and no other: what a number means may change.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..calib.safe_files import DamagedFile, JsonLimits, read_json_object
from ..kernels.errors import UserError, no_file

FORMAT, VERSION = "lowbit-results", 1
LIMITS = JsonLimits(256 << 20, 8_000_000)
PACKAGES = ("jsonschema", "jinja2", "matplotlib")  # of the extra
REMEDY = "quantize eval --report FILE.json writes one"
NEEDED = "reports need packages that are not installed ({}): pip install 'lowbit[evals]'"


def header(command: str) -> dict[str, Any]:
    """The first keys of a results file that `quantize COMMAND` writes now."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "producer": {"name": "lowbit", "version": version("lowbit"), "command": command},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def require_extra() -> None:
    """UserError where a package of the extra `evals` is not installed."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise UserError(NEEDED.format(name))


def check_results(value: Any, where: str | Path) -> None:
    """UserError, naming the first fault and its place in the file, where `value` is no results
    file of this version; `where`: its path, for the message."""
    require_extra()
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    from .results_schema import SCHEMA

    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UserError(f"{where} is no results file: its 'format' is not '{FORMAT}'; {REMEDY}")
    if value.get("version") != VERSION:
        raise UserError(
            f"{where} is a results file of version {value.get('version')!r}; this lowbit reads "
            f"version {VERSION}: measure again, or use the lowbit that wrote it"
        )
    fault = best_match(Draft202012Validator(SCHEMA).iter_errors(value))
    if fault is not None:
        place = "/".join(map(str, fault.absolute_path)) or "the whole"
        raise UserError(f"{where} is no valid results file: at {place}: {fault.message[:200]}")
    if not all(math.isfinite(number) for number in numbers_of(value)):
        raise UserError(f"{where} is no valid results file: it holds NaN or an infinite number")


def read_results(path: str | Path) -> dict[str, Any]:
    """The value of a results file; UserError when it is missing, damaged or not one."""
    path = Path(path)
    if not path.is_file():
        raise no_file(path, "results file")
    try:
        value = read_json_object(path, LIMITS)
    except DamagedFile as e:
        raise UserError(
            f"{path} is no results file ({e.found}; expected {e.expected}); {REMEDY}"
        ) from e
    check_results(value, path)
    return value


def numbers_of(value: Any) -> Iterator[float | int]:
    """Every number in a JSON value."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from numbers_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers_of(inner)
