"""What becomes of each linear when a checkpoint is converted, settled before anything is written.

A conversion is exact where the target holds the same codes, zero-points, groups and scales, perhaps
in wider codes or with scales repeated for smaller groups. What decides that beside the schemes are
the scales (float16 has a narrower range than bfloat16, and finer steps) and the order of columns
(g_idx): both are small and are read here. Where it is not exact, `requantize` takes the scheme
nearest to the one there is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from ..calib.model import FLOATS
from ..kernels.errors import UserError, counted
from .checkpoint.checks import read_g_idx
from .checkpoint.layouts import Layout
from .checkpoint.load import Checkpoint
from .linear_names import EMBEDDING, HEADS
from .spec import PRESETS, Channel, Granularity, Group, LayerScheme, QuantSpec, TensorWise

GROUP_SIZES = (128, 64, 32, 16)
Shape = tuple[int, int]


class Conversion(NamedTuple):
    """How one linear is stored afterwards.

    loss: why its weight is not what it was, None where it is. scale_dtype: that scales are stored
    in; None where the scheme settles it. rounds: whether codes are made anew.
    """

    scheme: LayerScheme
    shape: Shape
    scale_dtype: torch.dtype | None
    loss: str | None = None
    rounds: bool = False


class ConversionPlan(NamedTuple):
    """linears: by name. ignore: linears that are not quantized. act_order: whether some columns
    lie in no order of groups. notes: what the user should know, one sentence each."""

    linears: dict[str, Conversion]
    ignore: list[str]
    act_order: bool
    notes: list[str]


def plan_conversion(
    checkpoint: Checkpoint, target: Layout, model_dtype: torch.dtype, requantize: bool
) -> ConversionPlan:
    """Settle every quantized linear of `checkpoint` for the layout `target`.

    UserError where one cannot be stored as it is and `requantize` is off, or not at all.
    """
    linears = {}
    for module, scheme in checkpoint.schemes.items():
        shape = checkpoint.shape(module)
        why = target.refusal(scheme, shape)
        if why is None:
            linears[module] = Conversion(scheme, shape, None)
        elif (wider := _holding(scheme, shape, target)) is not None:
            linears[module] = Conversion(wider, shape, None)
        elif requantize:
            linears[module] = _nearest(module, scheme, shape, target, why)
        else:
            raise _inexact(module, why)
    linears = _alike(linears, target, requantize)
    ordered = _columns_out_of_order(checkpoint)
    if ordered and not target.writes_g_idx:
        why = f"{target.name} does not store in which group each column is (g_idx)"
        if not requantize:
            raise _inexact(ordered[0], why)
        still = [m for m in ordered if not linears[m].rounds]
        linears |= {m: linears[m]._replace(loss=why, rounds=True) for m in still}
    linears = _with_scale_dtypes(checkpoint, linears, target, model_dtype, requantize)
    kept = target.writes_g_idx and any(not linears[m].rounds for m in ordered)
    notes = _wider(checkpoint, linears)
    unquantized = [m for m, c in linears.items() if _drops_inputs(checkpoint.schemes[m], c.scheme)]
    if unquantized:
        notes.append(f"inputs are no longer quantized by {counted(len(unquantized), 'linear')}")
    return ConversionPlan(linears, untouched_linears(checkpoint), kept, notes)


def untouched_linears(checkpoint: Checkpoint) -> list[str]:
    """Modules with a matrix that is not quantized, embeddings left out, and the output linear even
    where it shares the embedding's."""
    found = []
    for name, info in checkpoint.shards.info.items():
        module, _, leaf = name.rpartition(".")
        last = module.rpartition(".")[2]
        if leaf != "weight" or len(info.shape) != 2 or info.dtype not in FLOATS:
            continue
        if module not in checkpoint.schemes and (last in HEADS or not EMBEDDING.search(last)):
            found.append(module)
    heads = [m for m in (*found, *checkpoint.schemes) if m.rpartition(".")[2] in HEADS]
    return sorted(found if heads else [*found, HEADS[0]])


def _inexact(module: str, why: str) -> UserError:
    return UserError(
        f"'{module}' cannot be converted as it is: {why}; --requantize accepts a loss, measured"
    )


def _holding(scheme: LayerScheme, shape: Shape, target: Layout) -> LayerScheme | None:
    """A scheme of the target whose codes and scales hold all that those of `scheme` can be: wider
    codes, a scale for each row in place of one for all. None where there is none."""
    spec = scheme.weights
    if spec.type != "int":
        return None
    granularity = Channel() if isinstance(spec.granularity, TensorWise) else spec.granularity
    wider = (replace(spec, num_bits=b, granularity=granularity) for b in range(spec.num_bits, 9))
    held = (replace(scheme, weights=w) for w in wider)
    return next((s for s in held if target.refusal(s, shape) is None), None)


def _wider(checkpoint: Checkpoint, linears: Mapping[str, Conversion]) -> list[str]:
    """A sentence on linears whose codes take more bits than before."""
    widths = Counter(
        (checkpoint.schemes[m].weights.num_bits, c.scheme.weights.num_bits)
        for m, c in linears.items()
        if not c.rounds and c.scheme.weights.num_bits != checkpoint.schemes[m].weights.num_bits
    )
    return [f"{n} linears of {old} bits are held in {new}" for (old, new), n in widths.items()]


def _nearest(
    module: str, scheme: LayerScheme, shape: Shape, target: Layout, why: str
) -> Conversion:
    """The first scheme of those near to `scheme` that the target holds."""
    for candidate in _candidates(scheme):
        if target.refusal(candidate, shape) is None and target.risk(candidate) is None:
            same_weights = candidate.weights == scheme.weights
            return Conversion(candidate, shape, None, why, rounds=not same_weights)
    raise UserError(
        f"'{module}' ({shape[0]} x {shape[1]}) cannot be stored as {target.name} at all: {why}; "
        "choose another format"
    )


def _candidates(scheme: LayerScheme) -> Iterator[LayerScheme]:
    """Schemes near to `scheme`, the nearest first: inputs as they were computed, then more bits
    rather than fewer, then other groups; 8-bit floats at the end."""
    yield replace(scheme, input_activations=None)
    spec = scheme.weights
    widths = sorted(range(2, 9), key=lambda bits: (bits < spec.num_bits, abs(bits - spec.num_bits)))
    for bits in widths:
        same = spec.type == "int" and bits == spec.num_bits
        own = [spec.granularity] if isinstance(spec.granularity, Channel | Group) else []
        granularities: list[Granularity] = [*own, *map(Group, GROUP_SIZES), Channel()]
        for granularity in granularities:
            for symmetric in (spec.symmetric, not spec.symmetric) if same else (False, True):
                yield LayerScheme(QuantSpec(bits, "int", granularity, symmetric))
    yield PRESETS["FP8_BLOCK"]


def _alike(
    linears: dict[str, Conversion], target: Layout, requantize: bool
) -> dict[str, Conversion]:
    """All in one scheme where the target holds but one: scales are repeated for groups that divide
    all of them, or some are rounded anew."""
    why = target.refusal_together({m: c.scheme for m, c in linears.items()})
    if why is None:
        return linears
    finest = _finest(linears, target)
    if finest is not None:
        return finest
    by_count = [s for s, _ in Counter(c.scheme for c in linears.values()).most_common()]
    if not requantize:
        raise _inexact(next(m for m, c in linears.items() if c.scheme != by_count[0]), why)
    shapes = {c.shape for c in linears.values()}
    fits_all = (s for s in by_count if all(target.refusal(s, shape) is None for shape in shapes))
    common = next(fits_all, None)
    if common is None:
        raise UserError(f"{why}, and none of them fits every linear; choose another format")
    changed = [m for m, c in linears.items() if c.scheme != common]
    alike = {m: linears[m]._replace(scheme=common, loss=why, rounds=True) for m in changed}
    return linears | alike


def _finest(linears: dict[str, Conversion], target: Layout) -> dict[str, Conversion] | None:
    """Every linear of whole numbers in groups as large as divide the groups of all."""
    sizes = []
    for conversion in linears.values():
        match conversion.scheme.weights:
            case QuantSpec(type="int", granularity=Group(size)):
                sizes.append(size)
            case QuantSpec(type="int", granularity=Channel()):
                sizes.append(conversion.shape[1])
            case _:
                return None
    finer = Group(math.gcd(*sizes))
    split = {}
    for module, conversion in linears.items():
        weights = replace(conversion.scheme.weights, granularity=finer)
        split[module] = conversion._replace(scheme=replace(conversion.scheme, weights=weights))
    held = all(target.refusal(c.scheme, c.shape) is None for c in split.values())
    together = target.refusal_together({m: c.scheme for m, c in split.items()}) is None
    return split if held and together else None


def _columns_out_of_order(checkpoint: Checkpoint) -> list[str]:
    """Linears whose columns lie in no order of groups."""
    assert checkpoint.layout is not None
    leaf, shards, found = checkpoint.layout.g_idx_leaf, checkpoint.shards, []
    for module, scheme in checkpoint.schemes.items():
        name = f"{module}.{leaf}"
        if leaf is not None and name in shards:
            columns = checkpoint.shape(module)[1]
            if read_g_idx(shards.get, name, columns, scheme.weights) is not None:
                found.append(module)
    return found


def _with_scale_dtypes(
    checkpoint: Checkpoint,
    linears: Mapping[str, Conversion],
    target: Layout,
    model_dtype: torch.dtype,
    requantize: bool,
) -> dict[str, Conversion]:
    """What each linear's scales are stored in, all alike.

    The dtype that the target asks for, where every scale survives it. A target that takes any float
    keeps them as they are otherwise; another cannot hold them.
    """
    assert checkpoint.layout is not None
    wanted = target.scale_dtype(model_dtype)
    lossy = []
    for module, conversion in linears.items():
        if conversion.scheme.weights.scale_dtype != "model" or conversion.rounds:
            continue
        scale = checkpoint.shards.get(f"{module}.{checkpoint.layout.scale_leaf}")
        if not torch.equal(scale.to(wanted).float(), scale.float()):
            lossy.append(module)
    if lossy and target.any_scale_dtype:
        return {m: c._replace(scale_dtype=None) for m, c in linears.items()}
    kept = {
        m: c._replace(scale_dtype=wanted if c.scheme.weights.scale_dtype == "model" else None)
        for m, c in linears.items()
    }
    if not lossy:
        return kept
    why = f"its scales do not survive {str(wanted).removeprefix('torch.')}"
    if not requantize:
        raise _inexact(lossy[0], why)
    return kept | {m: kept[m]._replace(loss=why) for m in lossy}


def _drops_inputs(before: LayerScheme, after: LayerScheme) -> bool:
    return before.input_activations is not None and after.input_activations is None
