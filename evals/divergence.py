"""How far a model has moved from its base: KL divergence at every position, top-token agreement.

KL(base || model) = sum over the vocabulary of p_base * (log p_base - log p_model), in nats. One
number a position is kept, so that median, 99% quantile and maximum are exact; logits live one
window long and are written nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.errors import UserError
from .estimate import ratio_estimate
from .perplexity import CHUNK, Scorer, log_probabilities, negative_log_likelihood
from .windows import Window


class Divergence(NamedTuple):
    """From the base model, over `positions`. KL divergences in nats, quantiles interpolated.

    `top1`: share of positions where both models rank the same token first. `nll_difference`: the
    model's mean negative log-likelihood less the base's, paired by window, so its standard error
    is far below those of the two. (exp of it: the ratio of the perplexities.)
    """

    kld_mean: float
    kld_mean_stderr: float | None
    kld_median: float
    kld_p99: float
    kld_max: float
    top1: float
    top1_stderr: float | None
    nll_difference: float
    nll_difference_stderr: float | None
    positions: int


class DivergenceTally:
    """Adds up the divergence of one model from its base, window by window."""

    def __init__(self) -> None:
        self._kld: list[Tensor] = []
        self._same: list[float] = []
        self._nll: list[float] = []
        self._scored: list[int] = []

    def add(self, base: Tensor, model: Tensor, window: Window) -> None:
        """Log-probabilities float32 [ctx, V] of both models on `window`."""
        if base.shape != model.shape:
            raise UserError(
                f"the base model has a vocabulary of {base.shape[1]} and the model one of "
                f"{model.shape[1]}; divergence needs the same: name the model it was made from"
            )
        fresh = slice(window.fresh, None)
        kld, same = kl_divergence(base[fresh], model[fresh])
        self._kld.append(kld.cpu())
        self._same.append(same.sum().item())
        difference = negative_log_likelihood(model, window) - negative_log_likelihood(base, window)
        self._nll.append(difference.sum().item())
        self._scored.append(difference.numel())

    def result(self) -> Divergence:
        counts = [k.numel() for k in self._kld]
        kld = torch.cat(self._kld).sort().values
        return Divergence(
            *ratio_estimate([k.sum().item() for k in self._kld], counts),
            quantile(kld, 0.5),
            quantile(kld, 0.99),
            kld[-1].item(),
            *ratio_estimate(self._same, counts),
            *ratio_estimate(self._nll, self._scored),
            kld.numel(),
        )


def divergence(base: Scorer, model: Scorer, windows: Iterable[Window]) -> Divergence:
    """The divergence of `model` from `base` on `windows` of a text; both run window by window."""
    tally = DivergenceTally()
    for window in windows:
        base_log_probs = log_probabilities(base, window)
        tally.add(base_log_probs, log_probabilities(model, window), window)
    return tally.result()


def kl_divergence(base: Tensor, model: Tensor) -> tuple[Tensor, Tensor]:
    """KL(base || model) float64 [n] and same top token bool [n], of log-probabilities [n, V]."""
    kld, same = [], []
    for p, q in zip(base.split(CHUNK), model.split(CHUNK), strict=True):
        kld.append((p.exp() * (p - q)).sum(-1).double())
        same.append(p.argmax(-1) == q.argmax(-1))
    return torch.cat(kld), torch.cat(same)


def quantile(ordered: Tensor, q: float) -> float:
    """The q-quantile of a sorted tensor [n], linear between neighbours (numpy's default)."""
    place = q * (ordered.numel() - 1)
    low = int(place)
    high = min(low + 1, ordered.numel() - 1)
    return torch.lerp(ordered[low], ordered[high], place - low).item()
