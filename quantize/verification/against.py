"""A checkpoint against the original that it was made from, tensor by tensor.

Quantized weights are told by their relative error and by single weights that the scheme does not
explain (deviations.py). What error is usual follows from the scheme and the tensor's role, so an
outlier is one whose error stands far above the median of its role: beyond FACTOR times it and
SPREADS median deviations. Other tensors must be equal. What a recipe changed before it quantized is
made again or fitted (original.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...calib.shards import TensorSource
from ...kernels.errors import UserError
from .deviations import Deviation, blockwise, deviation, fitted, relative_error, rounded_apart
from .findings import Finding, finding
from .opening import Opened
from .original import Original, open_original
from .tensors import Model

FACTOR, SPREADS, DEVIATION = 3.0, 8.0, 1.4826  # a median deviation, in a normal spread's terms
HOPELESS = 0.9  # a weight whose error is nearly all of it
FEW = 4  # tensors of a role below which the median of all serves
ROUNDED = 0.01  # relative error of what is calculated again: several roundings of a bfloat16
FP8_BITS, FP8_WIDTH = 5, 128  # of FP8 weights, whose steps are as wide as those of 4-bit codes
CACHE_LEAVES = ("k_scale", "v_scale", "q_scale")


class TensorError(NamedTuple):
    """How far a quantized weight is from the original. role: the linear's last name, its width."""

    name: str
    role: str
    relative_error: float


class Comparison(NamedTuple):
    errors: tuple[TensorError, ...]
    findings: list[Finding]


def compare(folder: Path, base: Path, opened: Opened, model: Model) -> Comparison:
    """Every tensor of the checkpoint against the original's in the folder `base`.

    UserError when that cannot be read.
    """
    original = open_original(folder, base, model)
    if original.source is None:
        return Comparison((), original.findings)
    errors: list[TensorError] = []
    deviations: dict[str, Deviation] = {}
    found = list(original.findings)
    for module in sorted(opened.linears):
        name = f"{module}.weight"
        if name not in original.source:
            found.append(finding("not in the original", name, "a weight", "no such tensor"))
            continue
        told = _compare_linear(module, opened, model, original)
        if isinstance(told, Finding):
            found.append(told)
        elif told is not None:
            role = f"{module.rpartition('.')[2]} {_kind(module, opened)}"
            errors.append(TensorError(name, role, told.relative_error))
            deviations[name] = told
            found += strays(name, told)
        original.source.close()
    if not original.scaled and not original.rotated:
        found += _misplaced(deviations)
    found += outliers(errors)
    found += _plain(_leaves(opened), original, model.source)
    return Comparison(tuple(errors), found)


def _compare_linear(
    module: str, opened: Opened, model: Model, original: Original
) -> Deviation | Finding | None:
    """None where the linear cannot be read, as is said where its contents are examined."""
    assert original.source is not None
    name = f"{module}.weight"
    weight = original.source.get(name).float()
    q = None
    try:
        if opened.layout is None:
            values = model.source.get(name).float()
        else:
            spec = opened.schemes[module].weights
            q = opened.layout.decompress(module, model.source, model.source.get, spec)
            values = q.dequantize()
    except UserError:
        return None
    if values.shape != weight.shape:
        return finding("shape", name, tuple(weight.shape), tuple(values.shape))
    if original.scaled:
        weight = fitted(weight, values)
    if q is None:
        return blockwise(values, weight, FP8_BITS, FP8_WIDTH)
    return deviation(q, values, weight)


def strays(name: str, told: Deviation) -> Iterator[Finding]:
    """Weights that the scheme does not explain."""
    if not told.explained:
        found = f"{told.strays:,} of {told.weights:,} weights further off, as at {told.first}"
        yield finding("unexplained error", name, "errors that rounding and GPTQ leave", found)


def _misplaced(told: dict[str, Deviation]) -> Iterator[Finding]:
    """Codes that are not the nearest ones of a checkpoint that was rounded to nearest."""
    for name, d in rounded_apart(told).items():
        if d.explained:  # else it has been named
            found = f"{d.misplaced:,} of {d.weights:,} codes are others, as at {d.astray}"
            yield finding("unexplained error", name, "the nearest codes, as elsewhere", found)


def outliers(errors: list[TensorError]) -> Iterator[Finding]:
    """Tensors that are further from the original than others of their role."""
    by_role: dict[str, list[float]] = {}
    for e in errors:
        by_role.setdefault(e.role, []).append(e.relative_error)
    everything = [e.relative_error for e in errors]
    for name, role, error in errors:
        peers = by_role[role] if len(by_role[role]) >= FEW else everything
        usual = statistics.median(peers)
        deviation = DEVIATION * statistics.median(abs(p - usual) for p in peers)
        limit = max(FACTOR * usual, usual + SPREADS * deviation)
        if not error <= min(limit, HOPELESS):  # NaN as well
            expected = f"a relative error of about {usual:.3g}, as others of its role"
            yield finding("outlier", name, expected, f"{error:.3g}")


def _kind(module: str, opened: Opened) -> str:
    if opened.layout is None:
        return opened.name or ""
    weights = opened.schemes[module].weights
    return f"{weights.type}{weights.num_bits}"


def _leaves(opened: Opened) -> set[str]:
    """Names of the tensors that stand for quantized linears."""
    leaves = ("weight",) if opened.layout is None else opened.layout.leaves
    return {f"{module}.{leaf}" for module in opened.linears for leaf in leaves}


def _plain(done: set[str], original: Original, source: TensorSource) -> Iterator[Finding]:
    """Tensors that are stored as floats."""
    theirs = original.source
    assert theirs is not None
    for name in source.names():
        if name in done:
            continue
        if name not in theirs:
            if name.rpartition(".")[2] not in CACHE_LEAVES:
                yield finding("not in the original", name, "a tensor", "no such tensor")
            continue
        why = _difference(source.get(name), theirs.get(name), original)
        if why is not None:
            yield finding("changed tensor", name, "the original's values", why)
        theirs.close()


def _difference(ours: Tensor, theirs: Tensor, original: Original) -> str | None:
    """How two tensors differ that ought not to; None where they do not."""
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
    if torch.equal(ours, theirs.to(ours.dtype)):
        return None
    ours, theirs = ours.float(), theirs.float()
    if original.scaled:
        if ours.dim() != 2:
            return None  # a norm or a bias, rescaled by factors that nobody wrote down
        theirs = fitted(theirs, ours)
    if (original.scaled or original.rotated) and relative_error(ours, theirs) <= ROUNDED:
        return None
    return f"differences of up to {float((ours - theirs).abs().max()):.3g}"
