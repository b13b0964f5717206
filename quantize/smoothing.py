"""AWQ and SmoothQuant as transforms of a layer: what the layer loop calls before linears are
quantized.

Both choose scales for the channels of each shared input and fold them into what makes the input
(quantize/folds.py); how they choose is all that differs. A group that no fold can serve stays as it
is, and the report says why.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..calib.layer_worker import InputGroup, LayerTransform
from ..calib.model import LayerCall, LayeredModel
from ..calib.stops import first_row
from .activations import fake_quantize_input, input_scale_of_peak
from .block_loss import BlockLoss
from .fold_search import find_folds
from .folds import Fold, NoFold, apply_fold
from .linear_plan import Plan, PlannedLinear, match_linears
from .passes.awq import clip_weight, fake_quantize, grid_scales, hessian_loss
from .passes.balance import Rounding, balanced_scales, of_each_scale, rounding_of
from .passes.gptq import factor_hessian
from .passes.smoothquant import best_alpha, smooth_scales
from .ranges import grouped
from .recipe_passes import Transform
from .spec import Channel, Group, QuantSpec, TensorWise

if TYPE_CHECKING:
    from .worker import PassWorker

LEAST_ENERGY = 0.01  # share of the mean energy that every column is given
QUERY_OR_KEY = re.compile(r"(q|k|qk|qkv|W?qkv|query|key)(_|$)")  # AWQ leaves their ranges alone


def make_transform(
    transform: Transform, plan: Plan, worker: PassWorker, model: LayeredModel
) -> LayerTransform:
    """What `transform` does to each layer of `model`; it changes the weights of `worker.store` and
    notes there what it did. UserError when its targets match nothing that is planned."""
    linears = {name: model.model.get_submodule(name) for name in plan.linears}
    targets = frozenset(match_linears(transform, linears, {}, None))
    kind = {"awq": AWQ, "smoothquant": SmoothQuant}[transform.method]
    return kind(transform, targets, plan, worker)


class Problem(NamedTuple):
    """The linears that share an input and will be quantized, and what is known of the input.

    weights: full name -> float32 [out, in]. scheme, scale_dtype: of the first; they share it.
    """

    fold: Fold
    group: InputGroup
    weights: dict[str, Tensor]
    planned: PlannedLinear
    scale_dtype: torch.dtype
    layer: nn.Module
    calls: list[LayerCall]

    @property
    def spec(self) -> QuantSpec:
        return self.planned.scheme.weights

    def hessian(self) -> Tensor:
        return self.group.statistics["hessian"].mean()

    def energy(self) -> Tensor:
        """Mean square of the input, float32 [in]; never zero."""
        square = self.group.statistics["channel_range"].mean_square
        return square + LEAST_ENERGY * square.mean()

    def fake_quantize(self, w: Tensor) -> Tensor:
        return fake_quantize(w, self.spec, self.scale_dtype)


class _Smoothing(LayerTransform):
    """Smooths every input of a layer that a fold can serve."""

    def __init__(
        self, transform: Transform, targets: frozenset[str], plan: Plan, worker: PassWorker
    ) -> None:
        self._transform, self._targets = transform, targets
        self._plan, self._worker = plan, worker

    @property
    def needs(self) -> frozenset[str]:
        return self._transform.needs

    def wants(self, name: str) -> bool:
        return name in self._targets

    def apply(
        self,
        layer_name: str,
        layer: nn.Module,
        groups: list[InputGroup],
        calls: list[LayerCall],
    ) -> None:
        with self._worker.timed(self._transform.method):
            names = [list(group.linears) for group in groups]
            folds = find_folds(layer_name, layer, names, first_row(calls[0]))
            notes: dict[str, Any] = {}
            for group, fold in zip(groups, folds, strict=True):
                key = " ".join(n.removeprefix(f"{layer_name}.") for n in group.linears)
                reason = self._refusal(group, fold)
                if reason is not None or isinstance(fold, NoFold):
                    notes[key] = {"left_alone": reason}
                else:
                    notes[key] = self._smooth(self._problem(fold, group, layer, calls))
            self._worker.store.transform_report[self._transform.method] = notes

    def _refusal(self, group: InputGroup, fold: Fold | NoFold) -> str | None:
        """Why a group stays as it is; None: it does not."""
        if isinstance(fold, NoFold):
            return fold.reason
        if group.statistics["channel_range"].tokens == 0:
            return "no calibration token reached it"
        feeder = self._plan.linears.get(fold.feeder)
        if feeder and not isinstance(feeder.scheme.weights.granularity, Channel | Group):
            return f"scales of {fold.feeder} span rows: it would round worse"
        return None

    def _problem(
        self, fold: Fold, group: InputGroup, layer: nn.Module, calls: list[LayerCall]
    ) -> Problem:
        held, names = self._worker.store.weights, list(group.linears)
        weights = {n: held.get(f"{n}.weight") for n in names}
        stored = held.stored_dtype(f"{names[0]}.weight")
        return Problem(fold, group, weights, self._plan.linears[names[0]], stored, layer, calls)

    def _smooth(self, problem: Problem) -> dict[str, Any]:
        """Choose scales and fold them; what is reported of it."""
        scales, report = self._choose(problem)
        applied = apply_fold(
            problem.fold, scales, self._worker.store.weights, self._plan.linears.__contains__
        )
        report["feeder"] = problem.fold.feeder
        report["scales"] = [float(applied.min()), float(applied.max())]
        return report | self._finish(problem, applied[problem.fold.columns])

    def _choose(self, problem: Problem) -> tuple[Tensor, dict[str, Any]]:
        """Scales for the fold, and what is reported of them."""
        raise NotImplementedError

    def _finish(self, problem: Problem, by_column: Tensor) -> dict[str, Any]:
        """What remains to be done when the scales [in] are folded; what is reported of it."""
        return {}


class AWQ(_Smoothing):
    """See quantize/passes/awq.py."""

    def _choose(self, problem: Problem) -> tuple[Tensor, dict[str, Any]]:
        settings = self._transform.awq
        if settings.search == "convex":
            by_gptq = problem.planned.taken_by.method == "gptq"
            energy = energy_under_gptq(problem) if by_gptq else problem.energy()
            rounding = weight_rounding(problem, energy)
            return balanced_scales([rounding], problem.fold.columns), {}
        weights = list(problem.weights.values())
        if settings.loss == "output":
            loss = BlockLoss(problem.layer, problem.group, problem.calls, problem.fold, settings)
        else:
            loss = hessian_loss(weights, problem.hessian())
        choice = grid_scales(
            weights, problem.group.statistics["channel_range"].mean_abs, problem.fold.columns,
            problem.spec, settings, problem.fake_quantize, loss,
        )  # fmt: skip
        return choice.scales, {
            "ratio": choice.ratio,
            "duo_scaling": choice.duo,
            "loss_ratio": choice.loss / max(choice.plain_loss, 1e-30),
        }

    def _finish(self, problem: Problem, by_column: Tensor) -> dict[str, Any]:
        settings, spec, held = self._transform.awq, problem.spec, self._worker.store.weights
        by_rows = isinstance(spec.granularity, Channel | Group)
        if not settings.clip or not by_rows or searches_ranges(problem.planned):
            return {}
        hessian = problem.hessian() / (by_column * by_column.unsqueeze(1))
        clipped = [n for n in problem.weights if not QUERY_OR_KEY.match(n.rpartition(".")[2])]
        for name in clipped:
            weight = held.get(f"{name}.weight")
            value = clip_weight(weight, hessian, spec, problem.scale_dtype, settings)
            held.set(f"{name}.weight", value)
        return {"clipped": [n.rpartition(".")[2] for n in clipped]}


class SmoothQuant(_Smoothing):
    """See quantize/passes/smoothquant.py."""

    def _refusal(self, group: InputGroup, fold: Fold | NoFold) -> str | None:
        settings = self._transform.smoothquant
        if isinstance(fold, Fold) and fold.added is None and not settings.through_linears:
            return "a linear feeds it, and through_linears is off"
        return super()._refusal(group, fold)

    def _choose(self, problem: Problem) -> tuple[Tensor, dict[str, Any]]:
        settings, columns = self._transform.smoothquant, problem.fold.columns
        stacked = torch.cat(list(problem.weights.values()))
        peak = problem.group.statistics["channel_range"].peak
        if settings.alpha is not None:
            w_peak = stacked.abs().amax(0)
            x, w = (of_each_scale(p, columns).amax(1) for p in (peak, w_peak))
            return smooth_scales(x, w, settings.alpha), {"alpha": settings.alpha}
        if settings.search == "convex":
            inputs = input_rounding(problem, stacked)
            rounding = weight_rounding(problem, problem.energy())
            return balanced_scales([rounding, *inputs], columns), {}
        activations = problem.planned.scheme.input_activations

        def round_input(x: Tensor) -> Tensor:
            if activations is None:
                return x
            scale = input_scale_of_peak(x.abs().amax(), activations)
            return fake_quantize_input(x, activations, scale)

        choice = best_alpha(
            stacked, peak, problem.group.statistics["token_sample"].tokens(), columns,
            problem.fake_quantize, round_input,
        )  # fmt: skip
        ratio = choice.loss / max(choice.plain_loss, 1e-30)
        return choice.scales, {"alpha": choice.alpha, "loss_ratio": ratio}


def energy_under_gptq(problem: Problem) -> Tensor:
    """The energy, float32 [in], that an error in a column meets if GPTQ rounds.

    GPTQ lets later columns make up for an error, so of an input only what later ones do not
    tell is left, the conditional variance 1 / U_jj^2. But its scales are chosen for errors that
    nothing makes up for: the geometric mean of both energies gave the least error.
    """
    factor = factor_hessian(problem.hessian(), problem.planned.taken_by.gptq)
    conditional = torch.empty_like(factor.diagonal)
    conditional[factor.order] = factor.u.diagonal().square().reciprocal()
    return (conditional * factor.diagonal).sqrt()


def weight_rounding(problem: Problem, energy: Tensor) -> Rounding:
    """What rounding the weights costs, under the energy of their inputs."""
    values = torch.cat([_groups(w, problem.spec) for w in problem.weights.values()])
    return rounding_of(values, energy, levels(problem.spec))


def input_rounding(problem: Problem, stacked: Tensor) -> list[Rounding]:
    """What rounding the inputs costs; nothing where they stay floats."""
    spec = problem.planned.scheme.input_activations
    if spec is None:
        return []
    energy = stacked.square().sum(0)
    if isinstance(spec.granularity, TensorWise):  # one range for all tokens
        peak = problem.group.statistics["channel_range"].peak.view(1, 1, -1)
        return [rounding_of(peak, energy, levels(spec), divided=True)]
    sample = problem.group.statistics["token_sample"].tokens()
    return [rounding_of(_groups(sample, spec), energy / len(sample), levels(spec), divided=True)]


def levels(spec: QuantSpec) -> float:
    """Steps from zero to the largest magnitude of a group; small floats count as their bits do."""
    return 2.0 ** (spec.num_bits - 1) - 0.5


def searches_ranges(planned: PlannedLinear) -> bool:
    """Whether the quantizer chooses ranges by search, which makes a clip search before it idle."""
    taken_by = planned.taken_by
    return {
        "rtn": taken_by.rtn.scale_search != "minmax",
        "gptq": taken_by.gptq.scale_search != "minmax",
    }.get(taken_by.method, True)


def _groups(values: Tensor, spec: QuantSpec) -> Tensor:
    """values [rows, in] as [rows, groups, size]: what shares a scale along a row."""
    return grouped(values, spec) if isinstance(spec.granularity, Group) else values.unsqueeze(1)
