"""A mean and its standard error.

Tokens of one window are not independent, windows nearly are; so the window is the unit. The mean is
a ratio of sums (windows may count different numbers of tokens), its standard error that of a ratio
estimate (Cochran 1977, 6.4): with window sums s_i over m_i tokens, n windows, M = sum m_i,

    mean = sum s_i / M,   stderr = sqrt(n / (n - 1) * sum (s_i - m_i * mean)^2) / M

For equal m_i this is the standard deviation of the window means over sqrt(n). Windows that overlap
(stride < ctx) share what they condition on and are correlated: the error is then a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """`stderr` is None where there is one window only."""

    mean: float
    stderr: float | None


def ratio_estimate(sums: Sequence[float], counts: Sequence[int]) -> Estimate:
    """Mean per token and its standard error, from each window's sum and number of tokens."""
    n, total = len(sums), sum(counts)
    assert n == len(counts) and total > 0, (n, total)
    mean = math.fsum(sums) / total
    if n < 2:
        return Estimate(mean, None)
    squares = math.fsum((s - m * mean) ** 2 for s, m in zip(sums, counts, strict=True))
    return Estimate(mean, math.sqrt(n / (n - 1) * squares) / total)
