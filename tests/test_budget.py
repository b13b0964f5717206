"""The bit budget's claims: no choice within the limit costs less, and a uniform one never does."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.errors import UserError
from lowbit.quantize.passes import budget
from lowbit.quantize.passes.budget import (
    Option,
    allocate,
    total_cost,
    total_size,
    uniform_choices,
)

UNITS = st.lists(
    st.lists(
        st.tuples(st.integers(1, 40), st.floats(0, 10, allow_nan=False)), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=5,
)


@given(UNITS, st.integers(0, 160))
@settings(max_examples=300, deadline=None)
def test_no_choice_within_the_limit_costs_less(drawn: list[list[tuple[int, float]]], limit: int):
    units = [[Option(i, *option) for i, option in enumerate(unit)] for unit in drawn]
    every = itertools.product(*(range(len(unit)) for unit in units))
    costs = [total_cost(units, c) for c in every if total_size(units, c) <= limit]
    if not costs:
        with pytest.raises(UserError, match=f"limit of {limit}"):
            allocate(units, limit)
        return
    found = allocate(units, limit)
    assert found.size == total_size(units, found.choice) <= limit
    assert found.cost == total_cost(units, found.choice) == pytest.approx(min(costs), abs=1e-6)
    assert found.bound <= found.cost + 1e-6


def like_a_model(layers: int, seed: int) -> list[list[Option]]:
    """Four units a layer in the proportions of a Llama; costs fall fourfold with each bit."""
    draw = random.Random(seed)
    units = []
    for weights in (960 * 576, 576 * 576, 3072 * 576, 1536 * 576) * layers:
        sensitivity = draw.lognormvariate(0, 1.5) * weights
        units.append([
            Option((bits, group), weights * bits + weights * 16 // group,
                   sensitivity * draw.uniform(0.8, 1.2) * 4.0**-bits * group**0.3)
            for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64)
        ])  # fmt: skip
    return units


@pytest.mark.parametrize("bits", [2.6, 3.25, 3.5, 4.5, 6.1, 9])
def test_a_deep_model_is_allocated_near_the_bound_and_below_every_uniform_choice(bits: float):
    units = like_a_model(layers=32, seed=0)
    weights = sum(unit[0].size * 2 // 5 for unit in units)
    limit = int(bits * weights)
    found = allocate(units, limit)
    assert found.size <= limit
    assert found.cost <= found.bound * 1.001
    for choice in uniform_choices(units).values():
        if total_size(units, choice) <= limit:
            assert found.cost <= total_cost(units, choice)


def test_a_crowded_search_stays_within_the_limit_and_below_uniform(monkeypatch):
    monkeypatch.setattr(budget, "MAX_STATES", 4)
    for seed in range(20):
        units = like_a_model(layers=3, seed=seed)
        uniform = uniform_choices(units)[3, 64]
        found = allocate(units, total_size(units, uniform))
        assert found.size <= total_size(units, uniform)
        assert found.cost < 0.9 * total_cost(units, uniform)
