"""A checkpoint against the original that it was made from, tensor by tensor.

Quantized weights are told by their relative error, the norm of the difference over the original's
norm. What is usual follows from the scheme and the tensor's role, so an outlier is one whose error
stands far above the median of its role: beyond FACTOR times it and SPREADS median deviations. Other
tensors must be equal. A recipe that smooths or folds scales into weights changes them by design:
then each weight is compared up to one factor a row and one a column, other tensors are not, and
nothing is of a rotated model.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...calib.safe_files import read_json_object
from ...calib.shards import TensorSource
from ...kernels.errors import UserError
from ..checkpoint.layouts import Layout
from ..checkpoint.side_files import REPORT
from ..fp8_source import open_source
from ..spec import LayerScheme
from .findings import Finding, finding
from .tensors import Model

FACTOR, SPREADS, DEVIATION = 3.0, 8.0, 1.4826  # a median deviation, in a normal spread's terms
HOPELESS = 0.9  # a weight whose error is nearly all of it
FEW = 4  # tensors of a role below which the median of all serves
FITS = 4  # rounds of fitting factors of rows and columns
SCALING, ROTATING = ("smoothquant", "awq"), "rotate"


class TensorError(NamedTuple):
    """How far a quantized weight is from the original. role: the linear's last name, its width."""

    name: str
    role: str
    relative_error: float


class Comparison(NamedTuple):
    errors: tuple[TensorError, ...]
    findings: list[Finding]


def compare(
    folder: Path,
    base: Path,
    layout: Layout | None,
    schemes: Mapping[str, LayerScheme],
    model: Model,
) -> Comparison:
    """Every tensor of the checkpoint against the original's in the folder `base`.

    UserError when that cannot be read.
    """
    transforms = _transforms(folder)
    original = _split(open_source(base), model)
    found: list[Finding] = []
    if transforms:
        told = ", ".join(transforms)
        found.append(finding("transformed", REPORT, "a recipe that changes no weight", told))
    if ROTATING in transforms:
        return Comparison((), found)
    errors: list[TensorError] = []
    done: set[str] = set()
    for module, scheme in schemes.items():
        assert layout is not None
        done.update(f"{module}.{leaf}" for leaf in layout.leaves)
        name = f"{module}.weight"
        if name not in original:
            found.append(finding("not in the original", name, "a weight", "no such tensor"))
            continue
        try:
            q = layout.decompress(module, model.source, model.source.get, scheme.weights)
        except UserError:
            continue  # said where its contents are examined
        values = q.dequantize()
        weight = original.get(name).float()
        if values.shape != weight.shape:
            found.append(finding("shape", name, tuple(weight.shape), tuple(values.shape)))
            continue
        kind = f"{scheme.weights.type}{scheme.weights.num_bits}"
        role = f"{module.rpartition('.')[2]} {kind}"
        errors.append(TensorError(name, role, _error(values, weight, bool(transforms))))
        original.close()
    found += _outliers(errors)
    if not transforms:
        found += _plain(done, original, model.source)
    return Comparison(tuple(errors), found)


def _split(original: TensorSource, model: Model) -> TensorSource:
    """The original's tensors, experts apart where the model's are."""
    if model.module is None:
        return original
    from ...calib.expert_shards import by_expert

    return by_expert(model.module, original)


def _transforms(folder: Path) -> list[str]:
    """Methods of the recipe that change weights before they are quantized, as lowbit's report of
    the run names them."""
    if not os.path.lexists(folder / REPORT):
        return []
    try:
        recipe = read_json_object(folder / REPORT).get("recipe")
    except UserError:
        return []
    passes = recipe.get("passes") if isinstance(recipe, dict) else None
    methods = [p.get("method") for p in passes or () if isinstance(p, dict)]
    return [m for m in methods if m in (*SCALING, ROTATING)]


def _error(values: Tensor, weight: Tensor, scaled: bool) -> float:
    """The relative error; scaled: after the original's rows and columns have been scaled to fit."""
    if scaled:
        for _ in range(FITS):
            for axis in (0, 1):
                energy = weight.square().sum(axis, keepdim=True).clamp_min(1e-30)
                weight = weight * ((values * weight).sum(axis, keepdim=True) / energy)
    size = weight.norm().item()
    return (values - weight).norm().item() / size if size else float(bool(values.any()))


def _outliers(errors: list[TensorError]) -> Iterator[Finding]:
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


def _plain(done: set[str], original: TensorSource, source: TensorSource) -> Iterator[Finding]:
    for name in source.names():
        if name in done:
            continue
        if name not in original:
            if name.rpartition(".")[2] not in ("k_scale", "v_scale", "q_scale"):
                yield finding("not in the original", name, "a tensor", "no such tensor")
            continue
        ours, theirs = source.get(name), original.get(name)
        if ours.shape != theirs.shape or not torch.equal(ours, theirs.to(ours.dtype)):
            yield finding(
                "changed tensor", name, "the original's values", _difference(ours, theirs)
            )
        original.close()


def _difference(ours: Tensor, theirs: Tensor) -> str:
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
    largest = (ours.double() - theirs.double()).abs().max().item()
    return f"differences of up to {largest:.3g}"
