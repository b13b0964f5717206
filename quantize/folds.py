"""Exact folds: per-channel scales moved from what a group of linears reads into what feeds it.

A linear computes (x / s) (W diag(s))^T for any positive s [in]. The division costs nothing at run
time where the module that makes x can take it: a norm (its weight and bias are divided), or a
linear whose output channels reach x channel by channel (v_proj -> o_proj, up_proj -> down_proj in a
gated MLP, fc1 -> ReLU -> fc2). quantize/fold_search.py finds out which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Weights(Protocol):
    """The weights that a fold reads and changes, by full parameter name."""

    def get(self, name: str) -> Tensor:
        """The float32 master."""
        ...

    def set(self, name: str, value: Tensor) -> None: ...

    def stored_dtype(self, name: str) -> torch.dtype:
        """What the checkpoint stores it in where it is not quantized."""
        ...


class Fold(NamedTuple):
    """Where the scales of a group's input go.

    readers: full names of all linears of the layer that read the input, quantized or not.
    feeder: full name of the norm or linear that makes it.
    added: what the norm adds to its weight to get its gain (0, Gemma: 1); None for a linear.
    biased: whether the feeder has a bias, which is divided like its weight.
    rows: int64 [scales], the output channels of the feeder that are divided by the scales.
    columns: int64 [in], the scale that each input column of the readers is multiplied with.
    """

    readers: tuple[str, ...]
    feeder: str
    added: float | None
    biased: bool
    rows: Tensor
    columns: Tensor


class NoFold(NamedTuple):
    """A group that must stay as it is, and why."""

    readers: tuple[str, ...]
    reason: str


def apply_fold(
    fold: Fold, scales: Tensor, weights: Weights, quantized: Callable[[str], bool]
) -> Tensor:
    """Divide the feeder's channels by `scales` and multiply the readers' columns with them.

    scales: float32 [scales], positive. quantized: whether a linear (full name) will be quantized
    from its float32 weight. Returns the scales as they were applied. A norm's weight is stored in
    the model's dtype: it is rounded, and its true ratio is what the readers are multiplied with, so
    the product stays exact to float32. (A bias, which nothing can make up for, is rounded.) A
    linear that stays in the model's dtype would be rounded weight by weight: where one takes part,
    all scales are rounded to powers of two, which only move exponents.
    """
    assert scales.shape == fold.rows.shape and bool((scales > 0).all())
    linears = fold.readers if fold.added is not None else (*fold.readers, fold.feeder)
    if not all(quantized(name) for name in linears):
        scales = powers_of_two(scales)
    if fold.added is not None:
        scales = _divide_norm(fold, scales, weights)
    else:
        _divide_rows(f"{fold.feeder}.weight", fold.rows, scales.unsqueeze(1), weights)
    if fold.biased:
        _divide_rows(f"{fold.feeder}.bias", fold.rows, scales, weights)
    by_column = scales[fold.columns]
    for name in fold.readers:
        weights.set(f"{name}.weight", weights.get(f"{name}.weight") * by_column)
    return scales


def powers_of_two(scales: Tensor) -> Tensor:
    """Each scale's nearest power of two (by ratio)."""
    return torch.exp2(torch.log2(scales).round())


def _divide_norm(fold: Fold, scales: Tensor, weights: Weights) -> Tensor:
    """Divide a norm's gain and bias; the ratio by which each channel really became smaller."""
    assert fold.added is not None
    name = f"{fold.feeder}.weight"
    old = weights.get(name)
    stored = (((old + fold.added) / scales) - fold.added).to(weights.stored_dtype(name)).float()
    gain = old + fold.added
    ratio = gain / (stored + fold.added)
    usable = torch.isfinite(ratio) & (ratio > 0)  # not where the gain is, or becomes, zero
    ratio = torch.where(usable, ratio, 1.0)
    weights.set(name, torch.where(usable, stored, old))
    return ratio


def _divide_rows(name: str, rows: Tensor, divisors: Tensor, weights: Weights) -> None:
    value = weights.get(name).clone()
    value[rows] /= divisors
    weights.set(name, value)
