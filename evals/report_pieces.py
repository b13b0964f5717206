"""What reports are made of: text whose numbers know their values, headings, tables, figures.

A `Piece` with a value shows a number of the summary; the text of others holds none of its own, so
that every number of a page can be looked up (and a test does).
"""

from __future__ import annotations

from typing import NamedTuple


class Piece(NamedTuple):
    """Text, and the number that it shows; None for words."""

    text: str
    value: float | int | None = None


Cell = list[Piece]


class Heading(NamedTuple):
    level: int
    text: str


class Sentence(NamedTuple):
    pieces: Cell
    strong: bool = False


class Table(NamedTuple):
    """The first column holds names, the others numbers."""

    headings: list[str]
    rows: list[list[Cell]]


class Figure(NamedTuple):
    """`kind`: which plot of evals/report_plots.py; `group`: of the summary, by place."""

    kind: str
    caption: str
    group: int


class Texts(NamedTuple):
    """Longer texts side by side."""

    headings: list[str]
    rows: list[list[str]]


Block = Heading | Sentence | Table | Figure | Texts


def number(value: float | int | None, form: str, scale: float = 1) -> Cell:
    """A number times `scale` in a format of Python's; a dash where there is none."""
    return [Piece("-")] if value is None else [Piece(f"{value * scale:{form}}", value)]


def with_error(value: float | None, error: float | None, form: str) -> Cell:
    shown = number(value, form)
    return shown if error is None else [*shown, Piece(" ± "), *number(error, form)]
