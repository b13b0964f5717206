"""The bit budget's report in the terminal: the frontier, and what each layer got."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..budget_plan import BudgetReport, UnitChoice


def frontier_table(report: BudgetReport) -> Any:
    """Bits against predicted divergence: mixed schemes, one scheme for all, and the chosen one."""
    from rich.table import Table

    table = Table(title=f"bits per weight and predicted KL divergence, budget {report.asked:g}")
    table.add_column("schemes")
    table.add_column("bits", justify="right")
    table.add_column("KL divergence", justify="right")
    lines = [("mixed", p["bits"], p["predicted_kld"]) for p in report.frontier]
    lines += [(f"all {name}", p["bits"], p["predicted_kld"]) for name, p in report.uniform.items()]
    lines.append(("chosen", report.bits, report.predicted_kld))
    for name, bits, kld in sorted(lines, key=lambda line: line[1]):
        style = "bold" if name == "chosen" else None
        table.add_row(name, f"{bits:.3f}", f"{kld:.5f}", style=style)
    return table


def choice_table(report: BudgetReport) -> Any:
    """The scheme of each layer's units."""
    from rich.table import Table

    layers: dict[str, dict[str, str]] = {}
    for unit in report.units:
        layer, name = _place(unit)
        layers.setdefault(layer, {})[name] = unit["scheme"]
    columns = list(dict.fromkeys(name for units in layers.values() for name in units))
    table = Table("layer", *columns)
    for layer, units in layers.items():
        table.add_row(layer, *(units.get(name, "-") for name in columns))
    return table


def _place(unit: UnitChoice) -> tuple[str, str]:
    """A unit's layer and its linears' own names: "3" and "q_proj k_proj v_proj"."""
    first = unit["linears"][0]
    number = re.search(r"\.(\d+)\.", first)
    if ".experts." in first:
        return number[1] if number else first, "experts"
    names = " ".join(name.rpartition(".")[2] for name in unit["linears"])
    return number[1] if number else first, names
