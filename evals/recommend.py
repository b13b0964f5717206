"""Which of several measured quantizations to take, for what the user can afford or must have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..kernels.errors import UserError

Row = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """Limits, None where there is none. max_bytes: of the weights' file; max_kld: mean KL
    divergence in nats; min_speed: decode tokens per second."""

    max_bytes: int | None = None
    max_kld: float | None = None
    min_speed: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise UserError(f"{name} must be above 0, got {value}")

    @property
    def anything(self) -> bool:
        return any(value is not None for value in vars(self).values())


def fits(row: Row, wanted: Wanted) -> bool:
    """Whether a row of a results file keeps to every limit; what was not measured does not."""
    kld, speed = _kld(row), _speed(row)
    return (
        (wanted.max_bytes is None or row["size"]["file_bytes"] <= wanted.max_bytes)
        and (wanted.max_kld is None or (kld is not None and kld <= wanted.max_kld))
        and (wanted.min_speed is None or (speed is not None and speed >= wanted.min_speed))
    )


def recommend(rows: Sequence[Row], wanted: Wanted) -> Row | None:
    """The row to take of those with a divergence; None where none fits.

    A size or a speed is a limit within which quality is the aim: the least divergence. Where only
    a quality is named, size is: the smallest file. Equal ones: the smaller, then the first.
    """
    fitting = [row for row in rows if _kld(row) is not None and fits(row, wanted)]
    only_quality = wanted.max_bytes is None and wanted.min_speed is None

    def order(row: Row) -> tuple[float, float]:
        nbytes, kld = row["size"]["file_bytes"], _kld(row) or 0.0
        return (nbytes, kld) if only_quality else (kld, nbytes)

    return min(fitting, key=order, default=None)


def recommendation(rows: Sequence[Row], wanted: Wanted) -> dict[str, Any]:
    """The same as JSON: what was asked, the row's name, and how near the others come where no row
    fits (the least bytes, divergence and the highest speed of any)."""
    found = recommend(rows, wanted)
    compared = [row for row in rows if _kld(row) is not None]
    speeds = [s for row in compared if (s := _speed(row)) is not None]
    return {
        "asked": vars(wanted).copy(),
        "row": None if found is None else found["name"],
        "nearest": {
            "bytes": min((row["size"]["file_bytes"] for row in compared), default=None),
            "kld": min((k for row in compared if (k := _kld(row)) is not None), default=None),
            "speed": max(speeds, default=None),
        },
    }


def _kld(row: Row) -> float | None:
    found = row.get("divergence")
    return None if found is None else found["kld_mean"]


def _speed(row: Row) -> float | None:
    found = row.get("speed")
    return None if found is None else found["decode"]
