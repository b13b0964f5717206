"""Engines that tell their likeliest tokens alone: what they say, made a whole distribution.

A server has logits and gives away log-probabilities of a few tokens; of all others only the sum is
known. Spread over them as the base's own probabilities are, that sum adds to the divergence what it
adds where all others count as one token: the least that any distribution with these numbers has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .perplexity import CHUNK, Scorer, log_probabilities
from .windows import Window

RESOLVED = 2e-4  # of probability; engines sum float32 over a vocabulary, and their rest is no finer
LOWEST = math.log(2.0**-149)  # of float32's least probability, in place of what stands for none


class Told(NamedTuple):
    """Of each of n positions up to k tokens: `ids` int64 [n, k], -1 where fewer are known, and
    their `log_probs` float64 [n, k] in nats."""

    ids: Tensor
    log_probs: Tensor


@runtime_checkable
class Teller(Protocol):
    """An engine that tells of positions what comes next. vocabulary: how many tokens there are."""

    vocabulary: int

    def told(self, window: Window, base: Tensor | None) -> Told:
        """Of every position of `window` that counts the next token and, beside the base's
        log-probabilities float32 [ctx, V], the likeliest ones; of other positions nothing has to be
        known. UserError where it fails."""
        ...


def predicted(scorer: Scorer | Teller, window: Window, base: Tensor | None = None) -> Tensor:
    """float32 [ctx, V]: log-probabilities at each position of `window`; of a teller at those that
    count, beside `base`, of which it shares what it does not tell (None: equal shares)."""
    if not isinstance(scorer, Teller):
        return log_probabilities(scorer, window)
    told = scorer.told(window, base)
    if base is None:
        base = torch.full((len(window.ids), scorer.vocabulary), -math.log(scorer.vocabulary))
    return filled(told, base)


def asked_positions(window: Window, top: bool) -> range:
    """The positions of `window` that a teller is asked of."""
    first, last = window.first_scored - 1, len(window.ids) - 1
    if not top:
        return range(first, last)
    return range(min(first, window.compared.start), max(last, window.compared.stop))


def told_of(known: Sequence[dict[int, float]]) -> Told:
    """Of each position's log-probabilities by token id."""
    width = max((len(at) for at in known), default=0)
    ids = torch.full((len(known), width), -1, dtype=torch.long)
    log_probs = torch.zeros(len(known), width, dtype=torch.float64)
    for row, at in enumerate(known):
        ids[row, : len(at)] = torch.tensor(list(at), dtype=torch.long)
        log_probs[row, : len(at)] = torch.tensor(list(at.values()), dtype=torch.float64)
    return Told(ids, log_probs.clamp(min=LOWEST))


def filled(told: Told, base: Tensor) -> Tensor:
    """float32 [n, V]: what is told, and the rest in proportion to the base's own.

    base: its log-probabilities float32 [n, V]. The rest is no less than the base's where that is
    below what engines resolve.
    """
    parts = zip(told.ids.split(CHUNK), told.log_probs.split(CHUNK), base.split(CHUNK), strict=True)
    return torch.cat([_filled(ids, log_probs, b) for ids, log_probs, b in parts])


def _filled(ids: Tensor, log_probs: Tensor, base: Tensor) -> Tensor:
    known = (ids >= 0) & (ids < base.shape[1])
    rows = known.nonzero()[:, 0].to(base.device)
    columns, values = ids[known].to(base.device), log_probs[known].to(base.device)
    out = base.double()
    out[rows, columns] = -torch.inf
    base_rest = out.logsumexp(-1).exp()
    rest = 1 - (log_probs.exp() * known).sum(-1).to(base.device)
    rest = torch.maximum(rest, base_rest.clamp(max=RESOLVED))
    out += (rest / base_rest).log().nan_to_num(0.0, 0.0, 0.0)[:, None]  # no rest: nothing is shared
    out[rows, columns] = values
    return out.float()
