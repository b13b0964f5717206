"""Perplexity: the exponential of the mean negative log-likelihood of a text's tokens, in nats.

Everything is measured on log-probabilities in float32, made in place of the logits a chunk of
positions at a time, so that a window needs no second tensor of their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.errors import UserError
from .estimate import ratio_estimate
from .windows import Window

Scorer = Callable[[Tensor], Tensor]
"""Token ids int64 [1, T] to logits [T, V]; a fresh tensor, which the caller may overwrite."""

CHUNK = 64  # positions; of a large vocabulary, what malloc still keeps for the next chunk
MAX_EXPONENT = 700.0  # nats; exp of more is beyond float64


class Perplexity(NamedTuple):
    """`nll` in nats per token; `tokens`: how many were scored. Standard errors: see estimate.py."""

    perplexity: float
    perplexity_stderr: float | None
    nll: float
    nll_stderr: float | None
    tokens: int
    windows: int


class NllTally:
    """Adds up a model's negative log-likelihoods, window by window."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.counts: list[int] = []

    def add(self, log_probs: Tensor, window: Window) -> None:
        """`log_probs` float32 [ctx, V] of `window`."""
        nll = negative_log_likelihood(log_probs, window)
        self.sums.append(nll.sum().item())
        self.counts.append(nll.numel())

    def result(self) -> Perplexity:
        nll, stderr = ratio_estimate(self.sums, self.counts)
        perplexity = math.exp(nll) if nll < MAX_EXPONENT else math.inf
        return Perplexity(
            perplexity,
            None if stderr is None else perplexity * stderr,
            nll,
            stderr,
            sum(self.counts),
            len(self.sums),
        )


def perplexity(scorer: Scorer, windows: Iterable[Window]) -> Perplexity:
    """The perplexity of a model on `windows` of a text."""
    tally = NllTally()
    for window in windows:
        tally.add(log_probabilities(scorer, window), window)
    return tally.result()


def negative_log_likelihood(log_probs: Tensor, window: Window) -> Tensor:
    """float64 [scored]: of each scored token of `window`, from log_probs float32 [ctx, V]."""
    first = window.first_scored
    targets = window.ids[first:, None].to(log_probs.device)
    return -log_probs[first - 1 : -1].gather(1, targets)[:, 0].double()


@torch.no_grad()
def log_probabilities(scorer: Scorer, window: Window) -> Tensor:
    """float32 [ctx, V]: the model's log-probabilities at each position of `window`.

    Raises UserError when the model's vocabulary is too small or its logits are not finite.
    """
    logits = scorer(window.ids[None])
    assert logits.shape[0] == len(window.ids), (logits.shape, len(window.ids))
    out = logits if logits.dtype == torch.float32 else torch.empty_like(logits, dtype=torch.float32)
    for i in range(0, len(logits), CHUNK):
        chunk = logits[i : i + CHUNK].float()
        if not chunk.isfinite().all():
            raise UserError(
                "the model's logits are not finite: its weights are damaged or overflow in this "
                "dtype; try --dtype float32"
            )
        out[i : i + CHUNK] = chunk.log_softmax(-1)
    return out
