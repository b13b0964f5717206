"""What each scheme would cost each unit of linears: the predicted KL divergence from the model.

Rounding a weight W to W - D changes the linear's output by D x. With the Fisher information F_t of
that output (calib/fisher.py) the divergence is, to second order, 1/2 mean_t x_t^T D^T F_t D x_t.
Rounding errors of different outputs are independent, so of F_t its diagonal is enough; it is taken
as the product of a token's and an output's share. That leaves 1/2 sum_o f_o d_o G d_o^T with d_o
the rows of D, f the outputs' shares and G the Hessian of inputs weighted by their token's share.

D is that of rounding to nearest with searched scales. A quantizer that feeds errors forward leaves
less of it: sum_o d_o diag(U)^-2 d_o^T where rounding alone leaves sum_o d_o H d_o^T, with U the
Cholesky factor that it works with (passes/gptq.py). U_jj^-2 is what column j's input cannot be
predicted from the k columns after it; found on the very n tokens that it is fitted to, it is too
small by the factor 1 - k/n, which is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..calib.fisher import LayerFisher, OutputFisher, run_backward
from ..calib.model import LayeredModel
from ..calib.statistics import Hessian
from ..kernels.errors import UserError
from ..kernels.packing import packed_words
from .checkpoint.ct_config import format_of
from .passes.budget import Option
from .passes.gptq import Factor, factor_hessian
from .passes.rtn import round_to_nearest
from .passes.settings import GPTQSettings
from .ranges import choose_qparams
from .spec import LayerScheme, QuantSpec

SAMPLED_ROWS = 256  # rows of a weight that are rounded to estimate its error
LEAST_FREEDOM = 0.125  # of 1 - k/n: with too few tokens the prediction is a guess
SHAPE_BITS = 2 * 64  # a packed weight is stored with its shape


class MeasuredLinear(NamedTuple):
    """A linear that takes part in a budget. `candidates`: the schemes that would fit it.
    `feedback`: whether its quantizer feeds errors forward."""

    shape: tuple[int, int]
    candidates: Sequence[LayerScheme]
    feedback: bool


class Unit(NamedTuple):
    """Linears that share a scheme, and the schemes that they could take: `Option.key` is the
    LayerScheme, `cost` the predicted KL divergence in nats a token."""

    linears: tuple[str, ...]
    options: list[Option]


def measure_sensitivity(
    model: LayeredModel,
    rows: Tensor,
    linears: Mapping[str, MeasuredLinear],
    batch_size: int = 4,
    seed: int = 0,
    progress: Callable[[str], object] = lambda name: None,
) -> list[Unit]:
    """The units of `linears`, in model order, with the cost of every candidate.

    rows: token ids int64 [rows, seq]. progress: called with each measured layer's name. UserError
    for a linear outside the decoder layers, or one that no token reaches.
    """
    outside = [n for n in linears if not n.startswith(tuple(f"{layer}." for layer in model.layers))]
    if outside:
        raise UserError(f"'{outside[0]}' is in no decoder layer: a budget cannot weigh it")
    by_layer: dict[str, list[Unit]] = {}

    def visit(layer: LayerFisher) -> None:
        members = {n: m for n, m in linears.items() if n.startswith(f"{layer.name}.")}
        by_layer[layer.name] = list(_layer_units(model, layer, members))
        progress(layer.name)

    run_backward(model, rows, linears.__contains__, visit, batch_size, seed)
    return [unit for name in model.layers for unit in by_layer[name]]


def stored_bits(scheme: LayerScheme, shape: tuple[int, int], scale_dtype: torch.dtype) -> int:
    """What a weight [out, in] takes in a checkpoint: codes, scales, zero-points, shape.

    scheme: whole numbers, by group or channel (checkpoint/compress.py). scale_dtype: the model's.
    """
    spec, (rows, columns) = scheme.weights, shape
    groups = spec.groups(columns)
    bits = rows * groups * 8 * scale_dtype.itemsize
    if format_of(scheme) == "int-quantized":
        return bits + 8 * rows * (columns + (0 if spec.symmetric else groups))
    zero_words = 0 if spec.symmetric else packed_words(rows, spec.num_bits) * groups
    return bits + 32 * (rows * packed_words(columns, spec.num_bits) + zero_words) + SHAPE_BITS


def rounding_costs(
    w: Tensor,
    specs: Sequence[QuantSpec],
    hessian: Hessian,
    factor: Factor,
    fisher: OutputFisher,
    scale_dtype: torch.dtype,
    feedback: bool,
) -> list[float]:
    """The predicted KL divergence, in nats a token, of quantizing w [out, in] to each of `specs`.

    hessian, factor: of its input. Estimated from SAMPLED_ROWS rows of w.
    """
    rows = sampled_rows(len(w)).to(w.device)
    sample = w[rows].float()

    def error(spec: QuantSpec) -> Tensor:
        params = choose_qparams(sample, spec, scale_dtype, factor.diagonal)
        return sample - round_to_nearest(sample, spec, params).dequantize()

    errors = (error(spec) for spec in specs)
    return error_costs(errors, rows, len(w), hessian, factor, fisher, feedback)


def sampled_rows(count: int) -> Tensor:
    """At most SAMPLED_ROWS of a weight's rows, evenly spaced, int64."""
    return torch.arange(0, count, max(1, -(-count // SAMPLED_ROWS)))


def error_costs(
    errors: Iterable[Tensor],
    rows: Tensor,
    count: int,
    hessian: Hessian,
    factor: Factor,
    fisher: OutputFisher,
    feedback: bool,
) -> list[float]:
    """The predicted KL divergence, in nats a token, of each of `errors`, float32 [rows, in], which
    a weight's `rows` of `count` suffer; the others as much. hessian, factor: of its input."""
    weight = fisher.output_weight()[rows, None] * (count / len(rows))
    guided, plain = fisher.guided.mean(), hessian.mean()
    remaining = _unpredicted(factor, hessian.tokens)
    costs = []
    for error in errors:
        cost = 0.5 * float(((error @ guided) * error * weight).sum())
        if feedback:
            rounded = float(((error @ plain) * error).sum())
            cost *= min(1.0, float((error.square() * remaining).sum()) / max(rounded, 1e-30))
        costs.append(max(cost, 0.0))
    return costs


def _unpredicted(factor: Factor, tokens: int) -> Tensor:
    """float32 [in]: the mean square of each input that the later ones do not tell."""
    later = torch.arange(len(factor.order) - 1, -1, -1, device=factor.order.device)
    freedom = (1 - later / max(tokens, 1)).clamp(min=LEAST_FREEDOM)
    unpredicted = torch.empty_like(factor.diagonal)
    unpredicted[factor.order] = (factor.u.diagonal().square() * freedom).reciprocal()
    return unpredicted


def _layer_units(
    model: LayeredModel, layer: LayerFisher, linears: Mapping[str, MeasuredLinear]
) -> Sequence[Unit]:
    costs: dict[str, list[float]] = {}
    for shared in layer.inputs:
        factor = factor_hessian(shared.hessian.mean(), GPTQSettings())
        for name in shared.readers:
            measured = linears[name]
            specs = [scheme.weights for scheme in measured.candidates]
            weight = model.shards.get(model.tensor_name(f"{name}.weight"), model.device)
            costs[name] = rounding_costs(
                weight, specs, shared.hessian, factor, layer.fisher[name], weight.dtype,
                measured.feedback,
            )  # fmt: skip
    units = [tuple(shared.readers) for shared in layer.inputs]
    return [_unit(model, names, linears, costs) for names in _with_experts_joined(units, linears)]


def _with_experts_joined(
    inputs: list[tuple[str, ...]], linears: Mapping[str, MeasuredLinear]
) -> list[tuple[str, ...]]:
    """The layer's units: linears that read one input; all experts, which engines run as one op.

    UserError for a linear outside the experts that no token reached.
    """
    experts = tuple(n for n in linears if ".experts." in n)
    plain = [names for names in inputs if names[0] not in experts]
    missed = set(linears) - set(experts) - {n for names in plain for n in names}
    if missed:
        raise UserError(f"'{min(missed)}' saw no calibration token; add it to --ignore")
    return [*plain, experts] if experts else plain


def _unit(
    model: LayeredModel,
    names: tuple[str, ...],
    linears: Mapping[str, MeasuredLinear],
    costs: Mapping[str, list[float]],
) -> Unit:
    """The unit of `names` with the candidates that fit each of them. An expert that no token
    reached costs nothing."""
    options = []
    for scheme in linears[names[0]].candidates:
        if not all(scheme in linears[n].candidates for n in names):
            continue
        cost = size = 0
        for name in names:
            shape, candidates, _ = linears[name]
            stored = model.shards.info[model.tensor_name(f"{name}.weight")].dtype
            size += stored_bits(scheme, shape, stored)
            cost += costs[name][list(candidates).index(scheme)] if name in costs else 0.0
        options.append(Option(scheme, size, cost))
    return Unit(names, options)
