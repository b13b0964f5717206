"""How far a model has moved from its base: KL divergence, the likeliest tokens, probabilities.

KL(base || model) = sum over the vocabulary of p_base * (log p_base - log p_model), in nats. One
number a position is kept of it, so that quantiles and maximum are exact, and of all else the sums
of each window. Logits live one window long and are written nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.errors import UserError
from .estimate import Estimate, ratio_estimate
from .kld_bins import KLD_EDGES
from .perplexity import CHUNK, Scorer, log_probabilities, negative_log_likelihood
from .windows import Window

TOP = 5  # tokens of the overlap
CONFIDENCE = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)  # of the base: edges of the buckets
QUANTILES = {
    "kld_median": 0.5, "kld_p90": 0.9, "kld_p95": 0.95, "kld_p99": 0.99, "kld_p999": 0.999,
}  # fmt: skip


class ConfidenceBucket(NamedTuple):
    """The positions where the base's highest probability is from `low` to below `high` (1 is in the
    last): how many, the mean divergence in nats and the top-1 agreement there, None of none."""

    low: float
    high: float
    positions: int
    kld_mean: float | None
    top1: float | None


class Divergence(NamedTuple):
    """From the base model, over `positions`. KL divergences in nats, quantiles interpolated.

    `top1`: share of positions where both models rank the same token first. `nll_difference`: the
    model's mean negative log-likelihood less the base's, paired by window, so its standard error
    is far below those of the two. (exp of it: the ratio of the perplexities.) `top5_overlap`: share
    of the base's five likeliest tokens that are among the model's. `probability_rms`: root mean
    square, over the scored tokens, of the model's probability of the text's token less the base's;
    `probability_mean`: the mean of that. `confidence`: by how sure the base is. `histogram`: how
    many positions are below the first of KLD_EDGES, between each two, and from the last on.
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
    kld_p90: float
    kld_p95: float
    kld_p999: float
    top5_overlap: float
    top5_overlap_stderr: float | None
    probability_rms: float
    probability_rms_stderr: float | None
    probability_mean: float
    probability_mean_stderr: float | None
    confidence: tuple[ConfidenceBucket, ...]
    histogram: tuple[int, ...] | None = None


class PositionStats(NamedTuple):
    """Of each of n positions: `kld` float64, `same_top` bool, `top_overlap` float64 (0 .. 1) and
    the base's highest probability `confidence` float32."""

    kld: Tensor
    same_top: Tensor
    top_overlap: Tensor
    confidence: Tensor


class DivergenceTally:
    """Adds up the divergence of one model from its base, window by window."""

    def __init__(self) -> None:
        self._kld: list[Tensor] = []
        self._counts: list[int] = []
        self._scored: list[int] = []
        self._sums: dict[str, list[float]] = {
            name: [] for name in ("kld", "same", "overlap", "nll", "change", "square")
        }
        self._buckets = torch.zeros(len(CONFIDENCE) - 1, 3, dtype=torch.float64)

    def add(self, base: Tensor, model: Tensor, window: Window) -> None:
        """Log-probabilities float32 [ctx, V] of both models on `window`."""
        if base.shape != model.shape:
            raise UserError(
                f"the base model has a vocabulary of {base.shape[1]} and the model one of "
                f"{model.shape[1]}; divergence needs the same: name the model it was made from"
            )
        compared = window.compared
        stats = compare_positions(base[compared], model[compared])
        base_nll = negative_log_likelihood(base, window)
        model_nll = negative_log_likelihood(model, window)
        change = (-model_nll).exp() - (-base_nll).exp()
        self._kld.append(stats.kld.cpu())
        self._counts.append(stats.kld.numel())
        self._scored.append(change.numel())
        self._buckets += bucket_sums(stats).cpu()
        found = {
            "kld": stats.kld, "same": stats.same_top, "overlap": stats.top_overlap,
            "nll": model_nll - base_nll, "change": change, "square": change.square(),
        }  # fmt: skip
        for name, values in found.items():
            self._sums[name].append(values.sum().item())

    def result(self) -> Divergence:
        kld = torch.cat(self._kld).sort().values
        sums, counts, scored = self._sums, self._counts, self._scored
        mean, top1, overlap = (ratio_estimate(sums[n], counts) for n in ("kld", "same", "overlap"))
        nll, change, square = (ratio_estimate(sums[n], scored) for n in ("nll", "change", "square"))
        rms = root(square)
        return Divergence(
            kld_mean=mean.mean,
            kld_mean_stderr=mean.stderr,
            **{name: quantile(kld, q) for name, q in QUANTILES.items()},
            kld_max=kld[-1].item(),
            top1=top1.mean,
            top1_stderr=top1.stderr,
            nll_difference=nll.mean,
            nll_difference_stderr=nll.stderr,
            positions=kld.numel(),
            top5_overlap=overlap.mean,
            top5_overlap_stderr=overlap.stderr,
            probability_rms=rms.mean,
            probability_rms_stderr=rms.stderr,
            probability_mean=change.mean,
            probability_mean_stderr=change.stderr,
            confidence=buckets(self._buckets),
            histogram=histogram(kld),
        )


def divergence(base: Scorer, model: Scorer, windows: Iterable[Window]) -> Divergence:
    """The divergence of `model` from `base` on `windows` of a text; both run window by window."""
    tally = DivergenceTally()
    for window in windows:
        base_log_probs = log_probabilities(base, window)
        tally.add(base_log_probs, log_probabilities(model, window), window)
    return tally.result()


def compare_positions(base: Tensor, model: Tensor) -> PositionStats:
    """What log-probabilities float32 [n, V] of two models say of each position."""
    top = min(TOP, base.shape[1])
    found: list[PositionStats] = []
    for p, q in zip(base.split(CHUNK), model.split(CHUNK), strict=True):
        likeliest = p.topk(top).indices
        shared = (likeliest[:, :, None] == q.topk(top).indices[:, None, :]).sum((1, 2))
        found.append(
            PositionStats(
                (p.exp() * (p - q)).sum(-1).double(),
                p.argmax(-1) == q.argmax(-1),
                shared.double() / top,
                p.amax(-1).exp(),
            )
        )
    return PositionStats(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def bucket_sums(stats: PositionStats) -> Tensor:
    """float64 [buckets, 3]: positions, their KL divergences and their equal top tokens, each summed
    over every bucket of CONFIDENCE."""
    edges = torch.tensor(CONFIDENCE[1:-1], device=stats.confidence.device)
    place = torch.bucketize(stats.confidence, edges, right=True)
    sums = torch.zeros(len(CONFIDENCE) - 1, 3, dtype=torch.float64, device=place.device)
    columns = torch.stack([torch.ones_like(stats.kld), stats.kld, stats.same_top.double()], 1)
    return sums.index_add_(0, place, columns)


def buckets(sums: Tensor) -> tuple[ConfidenceBucket, ...]:
    """The means of each bucket, from `bucket_sums`."""
    edges = zip(CONFIDENCE, CONFIDENCE[1:], strict=False)
    return tuple(
        ConfidenceBucket(low, high, int(n), kld / n if n else None, same / n if n else None)
        for (low, high), (n, kld, same) in zip(edges, sums.tolist(), strict=True)
    )


def histogram(kld: Tensor) -> tuple[int, ...]:
    """How many of divergences float64 [n], in nats, lie in each bin of kld_bins.py."""
    edges = torch.tensor(KLD_EDGES, dtype=kld.dtype)
    places = torch.bucketize(kld, edges, right=True)
    return tuple(torch.bincount(places, minlength=len(KLD_EDGES) + 1).tolist())


def root(square: Estimate) -> Estimate:
    """The square root of a mean square; its standard error by the derivative."""
    value = math.sqrt(square.mean)
    if square.stderr is None:
        return Estimate(value, None)
    return Estimate(value, square.stderr / (2 * value) if value else 0.0)


def quantile(ordered: Tensor, q: float) -> float:
    """The q-quantile of a sorted tensor [n], linear between neighbours (numpy's default)."""
    place = q * (ordered.numel() - 1)
    low = int(place)
    high = min(low + 1, ordered.numel() - 1)
    return torch.lerp(ordered[low], ordered[high], place - low).item()
