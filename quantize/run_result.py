"""What a run of a recipe hands back, whichever way it went."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..calib.text import Text
from .budget_plan import BudgetReport
from .planning.foresee import Foresight
from .recipe import Recipe


@dataclass(frozen=True)
class RunResult:
    """What a run did. dtype: of the forward passes (without any: of the arithmetic).
    resumed_layers: how many steps an earlier run had finished. relative_error: module -> output
    error over output energy (GPTQ only). pass_seconds: pass -> layer -> seconds spent in it, the
    forward passes not counted. budget: what was chosen within a bit budget. foreseen: what the run
    was expected to take."""

    out: Path
    recipe: Recipe
    notes: list[str]
    calibration: Text | None
    dtype: str
    resumed_layers: int
    dropped_rows: int
    relative_error: dict[str, float]
    seconds: float
    pass_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    budget: BudgetReport | None = None
    foreseen: Foresight | None = None
