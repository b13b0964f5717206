"""The plan: which linear gets which scheme, from names and shapes, before any weight is read.

Everything that can be refused is refused here: a target that matches nothing, two quantizers for
one layer, a group size that divides nothing, a model that is already quantized.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from ..calib.experts import routers
from ..calib.model import LayeredModel
from ..kernels.errors import UserError
from .fp8_source import READABLE
from .layout_check import check_linears
from .recipe import Calibration, Pass, Recipe, Transform, WeightPass
from .spec import Channel, Group, LayerScheme, with_group_size

GROUP_SIZES = (128, 64, 32, 16)


class PlannedLinear(NamedTuple):
    """What happens to one linear: the pass that takes it and the scheme, group size settled."""

    taken_by: WeightPass
    scheme: LayerScheme
    shape: tuple[int, int]


class Plan(NamedTuple):
    """linears: module name -> PlannedLinear. untouched: linears left as they are, by name.
    notes: decisions that the user should know of, one sentence each."""

    linears: dict[str, PlannedLinear]
    untouched: list[str]
    notes: list[str]


def make_plan(model: LayeredModel, recipe: Recipe) -> Plan:
    """Settle every linear of `model`; UserError names what does not fit and what would."""
    if "quantization_config" in model.config.to_dict():
        raise UserError(
            f"{model.folder} is already quantized; give the original model (quantizing twice only "
            f"adds error) or one of the kinds that are dequantized as they are read: {READABLE}"
        )
    steering = routers(model.model)
    layers = tuple(f"{name}." for name in model.layers)
    inner = {
        name: module
        for name, module in model.model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(layers) and name not in steering
    }
    outer = {
        name: module
        for name, module in model.model.named_modules()
        if isinstance(module, nn.Linear) and name not in inner
    }
    plan = plan_linears(recipe, inner, outer, model.head)
    stored = [model.tensor_name(f"{name}.weight").removesuffix(".weight") for name in steering]
    return plan._replace(untouched=list(dict.fromkeys([*plan.untouched, *steering, *stored])))


def plan_linears(
    recipe: Recipe,
    inner: Mapping[str, nn.Linear],
    outer: Mapping[str, nn.Linear],
    head: str | None,
) -> Plan:
    """The plan for linears by name, which may be on meta: see `match_linears`."""
    linears: dict[str, PlannedLinear] = {}
    notes: list[str] = []
    named = recipe.calibration.source
    if not recipe.reads_text and named != Calibration().source:
        methods = "+".join(p.method for p in recipe.passes)
        notes.append(f"{methods} needs no data: the calibration text '{named}' is not read")
    for taken_by in recipe.weight_passes:
        names = match_linears(taken_by, inner, outer, head)
        twice = [n for n in names if n in linears]
        if twice:
            raise UserError(
                f"two passes target '{twice[0]}'; a linear takes at most one weight quantizer: "
                "narrow the targets or ignore it in one of them"
            )
        shapes = {n: _shape({**inner, **outer}[n]) for n in names}
        scheme, note = settle_group_size(taken_by, shapes)
        notes += [note] if note and recipe.budget is None else []
        linears |= {n: PlannedLinear(taken_by, scheme, shapes[n]) for n in names}
    check_linears(recipe.format, {n: (p.scheme, p.shape) for n, p in linears.items()})
    untouched = [n for n in {**inner, **outer} if n not in linears]
    return Plan(linears, untouched, notes)


def match_linears(
    taken_by: WeightPass | Transform,
    inner: Mapping[str, nn.Linear],
    outer: Mapping[str, nn.Linear],
    head: str | None,
) -> list[str]:
    """Names of the linears that the pass takes, in model order.

    inner: linears of the decoder layers; outer: the rest (lm_head, routers of experts), which only
    a name or a pattern reaches. head: the output linear where it can be quantized.
    """
    known = {**inner, **outer}
    wanted: set[str] = set()
    for target in taken_by.targets:
        found = [n for n in known if matches(target, n, known[n], by_class=n in inner)]
        if not found:
            raise UserError(_no_match("target", target, list(known)))
        wanted |= set(found)
    for pattern in taken_by.ignore:
        found = [n for n in known if matches(pattern, n, known[n], by_class=True)]
        if not found:
            raise UserError(_no_match("ignore rule", pattern, list(known)))
        wanted -= set(found)
    if not wanted:
        raise UserError("the ignore rules leave nothing to quantize")
    out = [n for n in wanted if n in outer and n != head]
    if out:
        raise UserError(
            f"'{out[0]}' shares its weight with the embedding or is not the model's output; it "
            "cannot be quantized: leave it out of the targets"
        )
    return [n for n in known if n in wanted]


def matches(rule: str, name: str, module: nn.Module, by_class: bool) -> bool:
    """Whether a target or ignore rule names this module: exactly, by "re:" pattern, or by the name
    of its class or of one that it is derived from (as compressed-tensors' readers match)."""
    if rule.startswith("re:"):
        try:
            return re.match(rule[3:], name) is not None
        except re.error as e:
            raise UserError(f"'{rule}' is not a valid regular expression: {e}") from e
    classes = type(module).__mro__ if by_class else ()
    return rule == name or any(rule == c.__name__ for c in classes)


def settle_group_size(
    taken_by: WeightPass, shapes: Mapping[str, tuple[int, int]]
) -> tuple[LayerScheme, str | None]:
    """The scheme with a group size that divides every target's in_features, and why."""
    scheme = taken_by.layer_scheme
    granularity = scheme.weights.granularity
    if not isinstance(granularity, Group):
        return scheme, None
    size = granularity.size
    misfits = [n for n, (_, columns) in shapes.items() if columns % size]
    if not misfits:
        return scheme, None
    fitting = [g for g in GROUP_SIZES if all(c % g == 0 for _, c in shapes.values())]
    fixed = scheme.weights.scale_dtype != "model"  # the format's own size
    example = f"{shapes[misfits[0]][1]} input columns of '{misfits[0]}'"
    if taken_by.group_size is not None:
        raise UserError(
            f"group size {size} does not divide the {example} ({len(misfits)} of {len(shapes)} "
            f"linears); sizes that would do: {', '.join(map(str, fitting)) or 'none'}"
            f"{', ' if fitting else '; use '}-1 (one scale a channel)"
        )
    if fixed:
        raise UserError(
            f"{taken_by.scheme} has groups of {size} columns, which does not divide the {example} "
            f"({len(misfits)} of {len(shapes)} linears); ignore those, or use FP8_DYNAMIC or W4A16"
        )
    if not fitting:
        name = next(n for n in misfits if shapes[n][1] % GROUP_SIZES[-1])
        raise UserError(
            f"none of the group sizes {GROUP_SIZES} divides the {shapes[name][1]} input columns of "
            f"'{name}'; use --group-size -1 (one scale a channel) or ignore that layer"
        )
    note = f"group size {fitting[0]}: {size} does not divide the {example}"
    return with_group_size(scheme, fitting[0]), note


def settled_recipe(recipe: Recipe, plan: Plan) -> Recipe:
    """`recipe` with each pass's group size as the plan settled it; under a budget there is none."""
    if recipe.budget is not None:
        return recipe
    passes: list[Pass] = []
    for taken_by in recipe.passes:
        if not isinstance(taken_by, WeightPass):
            passes.append(taken_by)
            continue
        scheme = next(p.scheme for p in plan.linears.values() if p.taken_by is taken_by)
        match scheme.weights.granularity:
            case Group(size):
                taken_by = replace(taken_by, group_size=size)
            case Channel():
                taken_by = replace(taken_by, group_size=-1)
        passes.append(taken_by)
    return replace(recipe, passes=tuple(passes))


def _shape(linear: nn.Linear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


def _no_match(kind: str, rule: str, known: list[str]) -> str:
    return (
        f"{kind} '{rule}' matches no linear of the model; linears are named like "
        f"'{known[0]}' ({len(known)} in all)"
    )
