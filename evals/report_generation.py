"""What a report says of greedy continuations: a table, and the texts side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .report_pieces import Block, Heading, Piece, Table, Texts, number
from .summary import Json


def generations(rows: Sequence[Json]) -> Iterator[Block]:
    """Of the rows that have some."""
    known = [row for row in rows if row.get("generation")]
    if not known:
        return
    yield Heading(3, "Generation")
    lines = []
    for row in known:
        g = row["generation"]
        lines.append([
            [Piece(row["label"])], number(g["prompts"], "d"), number(g["new_tokens"], "d"),
            number(g["repetition"], ".1%"), number(g["loops"], "d"), number(g["same"], "d"),
            number(g["first_difference"], "g"),
        ])  # fmt: skip
    headings = ["model", "prompts", "new tokens", "repeated runs of four", "loops"]
    yield Table([*headings, "as the base", "first other token, median"], lines)
    for row in known:
        samples = [s for s in row["generation"]["samples"] if s["base"] is not None]
        if samples:
            words = ["prompt", "base", row["label"]]
            yield Texts(words, [[s["prompt"], s["base"], s["text"]] for s in samples])
