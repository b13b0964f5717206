"""The audit's tables, as docs/kernels.md shows them: those of a family between two markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..cases.case import Case, Maker
from .targets import DEVICES, predicted_seconds
from .traffic import Moved
from .verdict import Verdict


def write_tables(
    path: Path,
    family: str,
    cases: Sequence[Case],
    verdicts: Sequence[Verdict],
    moved: dict[str, dict[str, Moved]],
) -> None:
    """Replace what stands between the markers of `family` in `path`."""
    start, end = f"<!-- audit {family} -->\n", f"<!-- /audit {family} -->\n"
    before, found, rest = path.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} lacks the lines {start.strip()} and {end.strip()}")
    tables = "\n".join((_compiled(verdicts), _moved(moved), _predicted(cases)))
    path.write_text(f"{before}{start}\n{tables}\n{end}{after}", encoding="utf-8")


def _table(header: str, rows: Iterable[Sequence[object]]) -> str:
    columns = header.count("|") + 1
    lines = [f"| {header} |", "|" + "---|" * columns]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _compiled(verdicts: Sequence[Verdict]) -> str:
    header = (
        "kernel | target | registers | shared, bytes | stack, spills | tensor cores | "
        "bits a load | conversions, logic, all instructions a code | bars"
    )
    rows = [
        (
            v.case, v.target, v.registers, v.shared, f"{v.stack}, {v.spills}", v.cores or "-",
            v.widths or "-",
            f"{v.conversions:.2f}, {v.logic:.2f}, {v.instructions:.1f}" if v.logic else "-",
            "; ".join(v.faults) or "met",
        )
        for v in verdicts
    ]  # fmt: skip
    return "Compiled:\n\n" + _table(header, rows)


def _moved(moved: dict[str, dict[str, Moved]]) -> str:
    rows = []
    for name, operands in moved.items():
        ratios = ", ".join(f"{k} {m.ratio:.2f}" for k, m in operands.items() if m.floor)
        extra = operands["other"]
        rows.append((name, ratios, extra.loaded + extra.stored))
    header = "kernel (small shapes) | bytes moved over those of the operand | other bytes"
    return "Bytes moved:\n\n" + _table(header, rows)


def _predicted(cases: Sequence[Case]) -> str:
    """The two floors of the real shapes."""
    rows = []
    for case in cases:
        operands = case.make(Maker("meta"))
        floors = {k: t.nbytes for k, t in operands.items() if t is not None}
        floors |= case.floor(operands) if case.floor else {}
        floor = sum(floors.values())
        times = (
            f"{1e6 * predicted_seconds(d, floor, case.operations, case.bars.tensor_cores):.1f}"
            for d in DEVICES.values()
        )
        rows.append((case.name, floor, case.operations, *times))
    header = "kernel (real shapes) | bytes | operations | " + " | ".join(
        f"{name}, us" for name in DEVICES
    )
    return "Predicted from the floors:\n\n" + _table(header, rows)
