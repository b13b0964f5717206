"""How long a run takes: its work times the machine's rates, part by part. Nothing is measured here.

The laws: a Gram matrix costs tokens x columns^2; a factorization columns^3; GPTQ's sweep so much a
column (for all rows) and its delayed updates rows x columns^2; a search for scales so much a
weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..passes.balance import MAX_ROWS
from ..passes.settings import AWQSettings
from ..recipe_passes import DATA_FREE, Transform
from .rates import Rates, Solver, solved_by_gptq
from .work import Problem, Work, layer_passes, probing_rows

STRIPED = 0.58  # of a Gram matrix's products that a statistic computes (calib/statistics.py)
GUARD_PASSES = 2  # over an input: whether it is finite, and its conversion
RANGE_PASSES = 5  # of the statistic of ranges
REFINE_PRODUCTS = 3  # products with the Hessian in a round of refinement
TRAINED_ROWS = 3.0  # a row's way forth and back through a layer, over its way forth
TRAINED_PASSES = 30  # over the weights in a step of learned rounding
CHECKED_ROWS, CHECKS = 16, 5  # on which learned rounding measures its loss, and how often
BUDGET_ROWS = 5.0  # ways of a row through a layer for its sensitivities: forth twice, back
BUDGET_SAMPLE = 256  # rows of a weight on which a budget's candidates are tried
CHOICE_PASSES = 60  # over a weight in a search for the scales of one candidate
CLIP_PASSES = 12  # over a weight at each share of the range that clipping tries
LOADED_PASSES = 3  # over a layer's weights when they are read, checked and cast
COPIES = 2  # how often what is quantized is written: to the journal, to the output


class TimeEstimate(NamedTuple):
    """Seconds by part, in the order of a run."""

    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def estimate_time(work: Work, rates: Rates, begun: float = 0.0) -> TimeEstimate:
    """The seconds of `work`. begun: those that its beginning took (model, text, the plan)."""
    parts = {"start": begun}
    if work.streamed:
        parts["rounding"] = sum(_rounding(p, rates) for p in work.problems)
    else:
        parts |= _loop_parts(work, rates)
    parts["reading"] = work.bytes_before * rates.read
    parts["writing"] = _writing(work, rates)
    return TimeEstimate({name: seconds for name, seconds in parts.items() if seconds})


def solve_seconds(p: Problem, rate: Solver, product: float) -> float:
    """GPTQ on one problem: factorization, sweep, refinement."""
    factor = rate.factor * (p.columns / rate.factor_columns) ** 3
    updates = p.rows * product / 2  # rest of the delayed updates, for each square column
    energy = p.rows * p.columns**2 * product
    sweep = _extrapolated(rate.sweep, p.columns, rate.columns, updates)
    each = REFINE_PRODUCTS * p.rows * product
    refined = _extrapolated(rate.refine, p.columns, rate.columns, each)
    return factor + sweep + energy + p.taken_by.gptq.refine_rounds * refined


def gram_seconds(p: Problem, tokens: int, rates: Rates) -> float:
    """The second moments of one problem's input."""
    return tokens * p.share * p.columns**2 * rates.gram[p.columns]


def _extrapolated(seconds: float, columns: int, timed: int, square: float) -> float:
    """Seconds for `columns` where `timed` of them, at most as many, took `seconds`: `square` for
    each square column, the rest for each column."""
    linear = max(0.0, seconds - square * timed**2)
    return linear * columns / timed + square * columns**2


def _loop_parts(work: Work, rates: Rates) -> dict[str, float]:
    recipe = work.recipe
    parts: dict[str, float] = {"loading": LOADED_PASSES * work.layer_weights * rates.scan}
    if recipe.budget is not None and not any(work.restored.values()):
        parts["sensitivity"] = _sensitivity(work, rates)
    if work.rows:
        rows = work.rows * layer_passes(recipe) + probing_rows(recipe)
        parts["forward passes"] = rows * _row(work.kinds, rates)
        parts["finished layers"] = work.rows * _row(work.restored, rates)
        parts["quantized inputs"] = sum(
            work.tokens * p.share * p.columns * p.count * rates.rounded_input
            for p in work.problems
            if p.scheme.input_activations is not None
        )
        parts["statistics"] = sum(_statistics(p, work, rates) * p.count for p in work.problems)
    for transform in recipe.transforms:
        parts[transform.method] = _transform(transform, work, rates)
    for p in work.problems:
        method = p.taken_by.method
        parts[method] = parts.get(method, 0.0) + _quantizer(p, work, rates)
    return parts


def _row(kinds: Mapping[str, int], rates: Rates) -> float:
    """One row's way through so many layers of each kind."""
    return sum(rates.rows.get(name, 0.0) * count for name, count in kinds.items())


def _statistics(p: Problem, work: Work, rates: Rates) -> float:
    needs, numbers = work.recipe.needs, work.tokens * p.share * p.columns
    seconds = GUARD_PASSES * numbers * rates.scan
    observed = [t.needs for t in work.recipe.transforms if t.method != "rotate"]
    for wanted in [p.taken_by.needs, *observed]:
        seconds += gram_seconds(p, work.tokens, rates) if "hessian" in wanted else 0.0
        seconds += RANGE_PASSES * numbers * rates.scan if "channel_range" in wanted else 0.0
    if "input_shift" in needs:
        seconds += gram_seconds(p, work.tokens, rates) / STRIPED
    return seconds


def _quantizer(p: Problem, work: Work, rates: Rates) -> float:
    """All problems alike `p` by the pass that takes them."""
    if not solved_by_gptq(p):
        seconds = _rounding(p, rates)
    else:
        rate = rates.solvers[p.kind]
        seconds = p.count * solve_seconds(p, rate, rates.product)
        if p.taken_by.gptq.input_correction:
            seconds += p.count * 3 * p.rows * p.columns**2 * rates.product
    if p.taken_by.method == "signround":
        seconds += _learned(p, work, rates)
    return seconds


def _rounding(p: Problem, rates: Rates) -> float:
    return p.count * p.weights * rates.rounding[p.kind]


def _learned(p: Problem, work: Work, rates: Rates) -> float:
    """Learned rounding of a problem: its share of the steps that its layers take."""
    settings = p.taken_by.signround
    whole = sum(q.weights * q.count for q in work.problems) or 1
    rows = settings.iterations * settings.batch_size * TRAINED_ROWS
    rows += CHECKS * min(CHECKED_ROWS, work.rows)
    share = p.weights * p.count / whole
    touched = settings.iterations * TRAINED_PASSES * p.weights * p.count * rates.scan
    return rows * _row(work.kinds, rates) * share + touched


def _transform(transform: Transform, work: Work, rates: Rates) -> float:
    if transform.method == "rotate":
        return work.layer_weights * work.hidden * rates.product
    seconds = 0.0
    for p in work.problems:
        operands = 1 + (p.scheme.input_activations is not None)
        used = min(p.rows, MAX_ROWS) * p.columns
        convex = operands * used * rates.balance
        each = convex
        if transform.method == "awq":
            each = _awq(p, transform.awq, convex, rates)
        elif transform.smoothquant.alpha is not None:
            each = 0.0
        seconds += p.count * (each + CHOICE_PASSES * p.weights * rates.scan)
    return seconds


def _awq(p: Problem, settings: AWQSettings, convex: float, rates: Rates) -> float:
    if settings.search == "convex":
        seconds = convex
        solver = rates.solvers.get(p.kind)
        if solver is not None and p.taken_by.method == "gptq":  # the energy under GPTQ
            seconds += solver.factor * (p.columns / solver.factor_columns) ** 3
    else:
        tried = settings.n_grid * (2 if settings.duo_scaling == "auto" else 1)
        product = p.rows * p.columns**2 * rates.product
        seconds = tried * (product + CLIP_PASSES * p.weights * rates.scan)
    searched = solved_by_gptq(p) or p.taken_by.rtn.scale_search == "mse"
    if settings.clip and not searched and p.taken_by.method in DATA_FREE:
        seconds += settings.n_grid * CLIP_PASSES * p.weights * rates.scan
    return seconds


def _sensitivity(work: Work, rates: Rates) -> float:
    """What a budget measures before anything is quantized."""
    budget = work.recipe.budget
    assert budget is not None
    rows = min(budget.samples, work.rows)
    tokens = rows * work.seq_len
    seconds = BUDGET_ROWS * rows * _row(work.kinds, rates)
    seconds += 3 * tokens * work.vocabulary * work.hidden * rates.product
    candidates = len(budget.num_bits) * len(budget.group_sizes)
    for p in work.problems:
        sampled = min(BUDGET_SAMPLE, p.rows)
        search = CHOICE_PASSES * sampled * p.columns * rates.scan
        tried = search + 2 * sampled * p.columns**2 * rates.product
        grams = 3 * gram_seconds(p, tokens, rates)
        seconds += p.count * (candidates * tried + grams)
    return seconds


def _writing(work: Work, rates: Rates) -> float:
    copies = 1 if work.streamed else COPIES
    written = work.bytes_after + (copies - 1) * work.quantized_bytes
    return written * rates.write + work.bytes_after * rates.digest


def largest(parts: Mapping[str, float], count: int = 3) -> list[str]:
    """The names of the parts that take longest, those of a second and more."""
    ordered = sorted(parts, key=parts.__getitem__, reverse=True)
    return [name for name in ordered[:count] if parts[name] >= 1]
