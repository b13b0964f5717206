"""A plan under a bit budget: which schemes could be taken, what was chosen, and the frontier.

The budget is a mean over the weights of all planned linears, scales and zero-points counted.
Linears that engines run as one (q/k/v, gate/up, a layer's experts) take one scheme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypedDict

from torch import Tensor
from tqdm import tqdm

from ..calib.model import LayeredModel
from ..kernels.errors import UserError
from .checkpoint.journal import Journal
from .linear_plan import Plan, PlannedLinear
from .passes.budget import allocate, total_cost, total_size, uniform_choices
from .passes.settings import BudgetSettings
from .sensitivity import MeasuredLinear, Unit, measure_sensitivity
from .spec import Group, LayerScheme, with_group_size

FRONTIER = (2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75, 4.0, 4.5, 5.0, 6.0, 7.0)  # bits per weight
FEEDBACK = ("gptq", "signround")  # methods that let later columns make up for earlier ones


class Point(TypedDict):
    """Bits per weight and the KL divergence, in nats a token, that is predicted for them."""

    bits: float
    predicted_kld: float


class UnitChoice(Point):
    """The scheme of a unit; `predicted_kld` is the unit's share."""

    linears: list[str]
    scheme: str


@dataclass(frozen=True)
class BudgetReport:
    """What was chosen, in plain values. `bound`: below the prediction of every choice in the
    budget. `frontier`: the best choices for other budgets; `uniform`: one scheme for all, by name.
    """

    asked: float
    bits: float
    predicted_kld: float
    bound: float
    frontier: list[Point]
    uniform: dict[str, Point]
    units: list[UnitChoice]


def budgeted_plan(
    model: LayeredModel, plan: Plan, settings: BudgetSettings, rows: Tensor, journal: Journal
) -> tuple[Plan, BudgetReport]:
    """`plan` with the schemes chosen on the first of `rows`, int64 [rows, seq].

    A resumed run takes what the journal says was chosen.
    """
    linears = candidate_linears(plan, settings)
    known = journal.kept("budget")
    if known is not None:
        report = BudgetReport(**known)
    else:
        bar = tqdm(total=len(model.layers), desc="sensitivity", unit="layer", disable=None)
        with bar:
            units = measure_sensitivity(
                model, rows[: settings.samples], linears, progress=lambda _: bar.update()
            )
        report = choose_schemes(units, linears, settings)
        journal.keep("budget", asdict(report))
    return with_chosen_schemes(plan, linears, report), report


def candidate_linears(plan: Plan, settings: BudgetSettings) -> dict[str, MeasuredLinear]:
    """The plan's linears with the schemes that each could take."""
    return {
        name: MeasuredLinear(
            planned.shape, _candidates(name, planned, settings), planned.taken_by.method in FEEDBACK
        )
        for name, planned in plan.linears.items()
    }


def choose_schemes(
    units: Sequence[Unit], linears: Mapping[str, MeasuredLinear], settings: BudgetSettings
) -> BudgetReport:
    """The choice of least predicted divergence within `settings.bits`.

    UserError when even the smallest candidates exceed it.
    """
    weights = sum(out * columns for out, columns in (m.shape for m in linears.values()))
    options = [unit.options for unit in units]

    def point(size: int, cost: float) -> Point:
        return {"bits": size / weights, "predicted_kld": cost}

    least = sum(min(o.size for o in unit) for unit in options) / weights
    if settings.bits < least:
        raise UserError(
            f"a budget of {settings.bits:g} bits per weight cannot be kept: the smallest schemes "
            f"take {least:.3f}, scales included; raise it, or offer fewer bits or larger groups"
        )
    chosen = allocate(options, int(settings.bits * weights))
    others = (allocate(options, int(b * weights)) for b in FRONTIER if b >= least)
    return BudgetReport(
        asked=settings.bits,
        **point(chosen.size, chosen.cost),
        bound=chosen.bound,
        frontier=[point(a.size, a.cost) for a in others],
        uniform={
            scheme_name(key): point(total_size(options, c), total_cost(options, c))
            for key, c in uniform_choices(options).items()
            if isinstance(key, LayerScheme)
        },
        units=[
            _unit_choice(unit, i, linears) for unit, i in zip(units, chosen.choice, strict=True)
        ],
    )


def with_chosen_schemes(
    plan: Plan, linears: Mapping[str, MeasuredLinear], report: BudgetReport
) -> Plan:
    """The plan with each linear's scheme as the report has it."""
    planned = dict(plan.linears)
    for unit in report.units:
        for name in unit["linears"]:
            schemes = {scheme_name(scheme): scheme for scheme in linears[name].candidates}
            planned[name] = planned[name]._replace(scheme=schemes[unit["scheme"]])
    note = (
        f"bit budget {report.asked:g}: {report.bits:.3f} bits per weight, predicted KL divergence "
        f"{report.predicted_kld:.4f}"
    )
    return plan._replace(linears=planned, notes=[*plan.notes, note])


def scheme_name(scheme: LayerScheme) -> str:
    """Like "W4A16 g64": bits, asymmetric or not, and what shares a scale."""
    weights, activations = scheme.weights, scheme.input_activations
    read = 16 if activations is None else activations.num_bits
    shared = f"g{weights.granularity.size}" if isinstance(weights.granularity, Group) else "channel"
    return f"W{weights.num_bits}A{read}{'' if weights.symmetric else '_ASYM'} {shared}"


def _candidates(name: str, planned: PlannedLinear, settings: BudgetSettings) -> list[LayerScheme]:
    weights = planned.scheme.weights
    if weights.type != "int":
        raise UserError(
            f"a bit budget chooses among whole-number formats, but '{planned.taken_by.scheme}' is "
            "a float one; name a scheme like W4A16"
        )
    schemes = [planned.scheme]
    if isinstance(weights.granularity, Group) and planned.taken_by.group_size is None:
        sizes = [size for size in settings.group_sizes if planned.shape[1] % size == 0]
        if not sizes:
            raise UserError(
                f"none of the budget's group sizes {list(settings.group_sizes)} divides the "
                f"{planned.shape[1]} input columns of '{name}'; name one that does"
            )
        schemes = [with_group_size(planned.scheme, size) for size in sizes]
    return [
        replace(scheme, weights=replace(scheme.weights, num_bits=num_bits))
        for num_bits in settings.num_bits
        for scheme in schemes
    ]


def _unit_choice(unit: Unit, index: int, linears: Mapping[str, MeasuredLinear]) -> UnitChoice:
    option = unit.options[index]
    assert isinstance(option.key, LayerScheme)
    weights = sum(out * columns for out, columns in (linears[n].shape for n in unit.linears))
    return {
        "linears": list(unit.linears),
        "scheme": scheme_name(option.key),
        "bits": option.size / weights,
        "predicted_kld": option.cost,
    }
