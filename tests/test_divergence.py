"""Divergence statistics against closed forms and against statistics computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lowbit.evals.divergence import (
    CONFIDENCE,
    Divergence,
    DivergenceTally,
    bucket_sums,
    buckets,
    compare_positions,
    histogram,
)
from lowbit.evals.kld_bins import KLD_EDGES
from lowbit.evals.windows import Window
from torch import Tensor

CTX, VOCABULARY = 50, 37


def log_probs(seed: int, spread: float = 2.0, n: int = CTX) -> Tensor:
    made = torch.randn(n, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return (made * spread).log_softmax(-1)


def windows(count: int, fresh: int = 0) -> list[Window]:
    made = torch.Generator().manual_seed(9)
    ids = torch.randint(VOCABULARY, (count, CTX), generator=made)
    return [Window(row, fresh) for row in ids]


def measured(pairs: list[tuple[Tensor, Tensor]], fresh: int = 0) -> Divergence:
    tally = DivergenceTally()
    for (base, model), window in zip(pairs, windows(len(pairs), fresh), strict=True):
        tally.add(base, model, window)
    return tally.result()


def moved(base: Tensor, token: int, delta: float) -> Tensor:
    """`base` with the logit of one token raised by `delta`."""
    logits = base.clone()
    logits[:, token] += delta
    return logits.log_softmax(-1)


def test_a_model_is_at_no_distance_from_itself() -> None:
    found = measured([(log_probs(i), log_probs(i)) for i in range(3)])
    zero = {"nll_difference", "probability_rms", "probability_mean", *(
        n for n in Divergence._fields if n.startswith("kld"))}  # fmt: skip
    for name in zero:
        assert getattr(found, name) == 0, name
    assert found.top1 == found.top5_overlap == 1
    assert found.probability_rms_stderr == 0
    assert all(b.kld_mean in (0, None) and b.top1 in (1, None) for b in found.confidence)


@pytest.mark.parametrize("delta", [-3.0, -0.01, 0.5, 4.0])
def test_a_raised_logit_diverges_by_the_closed_form(delta: float) -> None:
    """With p the token's probability: KL = log(1 - p + p e^d) - p d, and its new probability is
    p e^d / (1 - p + p e^d)."""
    base = log_probs(0).double().log_softmax(-1)
    p = base[:, 3].exp()
    grown = 1 - p + p * math.exp(delta)
    want = grown.log() - p * delta
    got = compare_positions(base, moved(base, 3, delta))
    assert torch.allclose(got.kld, want, rtol=1e-9, atol=1e-15)
    single = compare_positions(base.float(), moved(base.float(), 3, delta))
    assert torch.allclose(single.kld, want, rtol=1e-4, atol=5e-7)
    ids = torch.full((CTX,), 3)
    tally = DivergenceTally()
    tally.add(base, moved(base, 3, delta), Window(ids, 0))
    change = (p * math.exp(delta) / grown - p)[:-1]
    found = tally.result()
    assert found.probability_rms == pytest.approx(change.square().mean().sqrt().item(), rel=1e-4)
    assert found.probability_mean == pytest.approx(change.mean().item(), rel=1e-4)
    assert found.nll_difference == pytest.approx((grown.log() - delta)[:-1].mean().item(), rel=1e-4)


def test_quantiles_over_all_windows_are_numpys() -> None:
    pairs = [(log_probs(i), log_probs(i + 100, 1.0 + i)) for i in range(4)]
    kld = np.concatenate([((p.exp() * (p - q)).sum(-1)).double().numpy() for p, q in pairs])
    found = measured(pairs)
    for name, q in (("kld_median", 0.5), ("kld_p90", 0.9), ("kld_p95", 0.95), ("kld_p99", 0.99),
                    ("kld_p999", 0.999), ("kld_max", 1.0)):  # fmt: skip
        assert getattr(found, name) == pytest.approx(np.quantile(kld, q), rel=1e-6), name
    assert found.kld_p90 < found.kld_p95 < found.kld_p99 < found.kld_p999 < found.kld_max


def test_the_histogram_counts_each_position_once() -> None:
    values = [0.0, 9e-7, 1e-6, 2e-6, 0.1, 0.31, 0.32, 5.0, 40.0]
    found = histogram(torch.tensor(values, dtype=torch.float64))
    assert len(found) == len(KLD_EDGES) + 1 and sum(found) == len(values)
    assert found[0] == 2, "below the first edge"
    assert found[1] == 2 and found[-1] == 1, "an edge belongs to the bin above it"
    edges = [-math.inf, *KLD_EDGES, math.inf]
    for count, low, high in zip(found, edges, edges[1:], strict=False):
        assert count == sum(low <= v < high for v in values), (low, high)


def test_top_five_are_counted_as_sets() -> None:
    base = torch.arange(10.0).flip(0)[None].log_softmax(-1)  # likeliest: 0 1 2 3 4
    shuffled = torch.zeros(10)
    shuffled[torch.tensor([4, 9, 1, 8, 0])] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0])
    got = compare_positions(base, shuffled[None].log_softmax(-1))
    assert got.top_overlap.tolist() == [3 / 5] and got.same_top.tolist() == [False]
    narrow = torch.zeros(1, 3).log_softmax(-1)
    assert compare_positions(narrow, narrow).top_overlap.tolist() == [1.0]


def test_buckets_part_the_positions_by_the_bases_confidence() -> None:
    pairs = [(log_probs(i, 1.0 + 4 * i), log_probs(i + 50)) for i in range(3)]
    found = measured(pairs, fresh=10)
    base = torch.cat([p[10:] for p, _ in pairs])
    model = torch.cat([q[10:] for _, q in pairs])
    sure = base.amax(-1).exp()
    kld = (base.exp() * (base - model)).sum(-1).double()
    same = (base.argmax(-1) == model.argmax(-1)).double()
    assert sum(b.positions for b in found.confidence) == found.positions == 3 * (CTX - 10)
    for i, b in enumerate(found.confidence):
        inside = (sure >= b.low) & ((sure < b.high) | (i == len(found.confidence) - 1))
        assert b.positions == int(inside.sum()) > 0
        assert b.kld_mean == pytest.approx(kld[inside].mean().item(), rel=1e-6)
        assert b.top1 == pytest.approx(same[inside].mean().item())
    certain = torch.tensor([[0.0, -1e9], [0.0, -1e9]])
    last = buckets(bucket_sums(compare_positions(certain, certain)))
    assert [b.positions for b in last] == [0] * (len(CONFIDENCE) - 2) + [2]
    assert last[0].kld_mean is None


def test_standard_errors_of_shares_and_of_the_root_are_those_of_windows() -> None:
    pairs = [(log_probs(i), log_probs(i + 100)) for i in range(6)]
    found, squares = measured(pairs), []
    for (p, q), w in zip(pairs, windows(6), strict=True):
        token = w.ids[1:, None]
        change = q[:-1].exp().gather(1, token) - p[:-1].exp().gather(1, token)
        squares.append(change.double().square().mean().item())
    mean, error = np.mean(squares), np.std(squares, ddof=1) / math.sqrt(6)
    assert found.probability_rms == pytest.approx(math.sqrt(mean), rel=1e-5)
    assert found.probability_rms_stderr == pytest.approx(error / (2 * math.sqrt(mean)), rel=1e-4)
    alone = measured(pairs[:1])
    assert alone.top5_overlap_stderr is None and alone.probability_rms_stderr is None


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    base, model = log_probs(1), log_probs(2)
    whole = compare_positions(base, model)
    monkeypatch.setattr("lowbit.evals.divergence.CHUNK", 7)
    for a, b in zip(whole, compare_positions(base, model), strict=True):
        assert torch.equal(a, b)
