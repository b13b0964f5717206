"""The blocks of a report as Markdown. Figures are left out: their numbers are in the tables."""

from __future__ import annotations

import re

from .report_blocks import blocks
from .report_pieces import Cell, Figure, Heading, Piece, Sentence, Table, Texts
from .summary import Json

SPECIAL = re.compile(r"([\\`*_\[\]<>|])")


def markdown(summary: Json, title: str) -> str:
    """The whole report, with a final newline."""
    lines = [f"# {_escaped(title)}", ""]
    listed = False
    for block in blocks(summary):
        if isinstance(block, Figure):
            continue
        if listed and not isinstance(block, Sentence):
            lines.append("")
        listed = isinstance(block, Sentence)
        if isinstance(block, Heading):
            lines += [f"{'#' * block.level} {_escaped(block.text)}", ""]
        elif isinstance(block, Sentence):
            text = _text(block.pieces)
            lines.append(f"- **{text}**" if block.strong else f"- {text}")
        elif isinstance(block, Texts):
            cells = [[[Piece(text)] for text in row] for row in block.rows]
            lines += [*_table(Table(block.headings, cells)), ""]
        else:
            lines += [*_table(block), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Table) -> list[str]:
    rows = [[_escaped(h) for h in table.headings], ["---"] * len(table.headings)]
    rows += [[_text(cell) for cell in row] for row in table.rows]
    return [f"| {' | '.join(row)} |" for row in rows]


def _text(cell: Cell) -> str:
    return _escaped("".join(piece.text for piece in cell))


def _escaped(text: str) -> str:
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))
