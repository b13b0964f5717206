"""The bit budget: one scheme for each unit so that the sum of costs is least within a size.

A unit is a set of linears that must share a scheme. Given what each scheme would cost a unit (say,
in KL divergence) and how many bits it takes, the choice is a multiple-choice knapsack. It is solved
in two steps. A price for bits, from the lower convex hulls of the units' options (Everett 1963),
gives a good choice and a bound below every choice. Then an exact search, unit by unit: a partial
choice is dropped when another takes no more bits and costs no more, or when what it has lost
against the price already exceeds the distance between the good choice and the bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.errors import UserError

MAX_STATES = 1 << 14  # partial choices kept; beyond it the search is near-exact
SLACK = 1e-9  # of the bound: what rounding may hide


class Option(NamedTuple):
    """A scheme for one unit: `size`, the bits that the unit then takes, and `cost` >= 0.

    `key` says which scheme it is, the same key in every unit.
    """

    key: Hashable
    size: int
    cost: float


class Allocation(NamedTuple):
    """`choice`: for each unit the index of its option. `bound`: no choice within the limit can
    cost less than this."""

    choice: list[int]
    size: int
    cost: float
    bound: float


class _Step(NamedTuple):
    """From one option of a unit's convex hull to the next larger one."""

    unit: int
    option: int
    size: int
    gain: float

    @property
    def slope(self) -> float:
        return self.gain / self.size


def allocate(units: Sequence[Sequence[Option]], limit: int) -> Allocation:
    """One option for each unit, of least total cost among those of total size <= `limit` bits.

    Exact while a search step keeps at most MAX_STATES partial choices; past that never worse than
    the greedy choice along the hulls and the best choice of one key for all units. UserError when
    even the smallest options exceed the limit.
    """
    least = sum(min(o.size for o in options) for options in units)
    if least > limit:
        raise UserError(f"the smallest schemes take {least} bits, more than the limit of {limit}")
    price, greedy = _along_hulls(units, limit)
    known = [greedy, *(c for c in uniform_choices(units).values() if total_size(units, c) <= limit)]
    best = min(known, key=lambda choice: total_cost(units, choice))
    bound = sum(min(o.cost + price * o.size for o in options) for options in units)
    bound -= price * limit
    found = _search(units, limit, price, total_cost(units, best) - bound)
    if found is not None and total_cost(units, found) < total_cost(units, best):
        best = found
    return Allocation(best, total_size(units, best), total_cost(units, best), bound)


def uniform_choices(units: Sequence[Sequence[Option]]) -> dict[Hashable, list[int]]:
    """The choices that give every unit the option of one key, by that key."""
    indices = [{option.key: i for i, option in enumerate(options)} for options in units]
    shared = [key for key in indices[0] if all(key in index for index in indices)]
    return {key: [index[key] for index in indices] for key in shared}


def total_size(units: Sequence[Sequence[Option]], choice: Sequence[int]) -> int:
    """Bits of a choice."""
    return sum(options[i].size for options, i in zip(units, choice, strict=True))


def total_cost(units: Sequence[Sequence[Option]], choice: Sequence[int]) -> float:
    """Cost of a choice."""
    return sum(options[i].cost for options, i in zip(units, choice, strict=True))


def _along_hulls(units: Sequence[Sequence[Option]], limit: int) -> tuple[float, list[int]]:
    """The price of a bit at which the relaxed problem is solved, and the greedy choice: steps along
    the hulls, steepest first, each taken where it fits."""
    hulls = [_hull(options) for options in units]
    choice = [hull[0] for hull in hulls]
    left = limit - total_size(units, choice)
    steps = [
        _Step(u, to, o[to].size - o[at].size, o[at].cost - o[to].cost)
        for u, (hull, o) in enumerate(zip(hulls, units, strict=True))
        for at, to in zip(hull, hull[1:], strict=False)
    ]
    price = 0.0
    stopped: set[int] = set()
    for step in sorted(steps, key=lambda s: -s.slope):
        if step.unit in stopped:
            continue
        if step.size > left:
            price = price or step.slope
            stopped.add(step.unit)
            continue
        choice[step.unit] = step.option
        left -= step.size
    return price, choice


def _hull(options: Sequence[Option]) -> list[int]:
    """Indices of the lower convex hull by rising size, from the smallest to the cheapest option."""
    hull: list[int] = []
    for i in sorted(range(len(options)), key=lambda i: (options[i].size, options[i].cost)):
        new = options[i]
        if hull and new.cost >= options[hull[-1]].cost:
            continue
        while len(hull) > 1:
            a, b = options[hull[-2]], options[hull[-1]]
            if (a.cost - b.cost) * (new.size - b.size) > (b.cost - new.cost) * (b.size - a.size):
                break
            hull.pop()
        hull.append(i)
    return hull


class _States(NamedTuple):
    """Partial choices, sizes rising and costs falling: int64, float64 and float64 [n]. `regret`:
    what their options cost at the price beyond the best ones at it."""

    size: Tensor
    cost: Tensor
    regret: Tensor


def _search(
    units: Sequence[Sequence[Option]], limit: int, price: float, gap: float
) -> list[int] | None:
    """The choice of least cost among those with a regret of at most `gap`; None: there is none.

    A choice costs bound + regret + price * (limit - size), so a better one than the known, which
    costs bound + gap, has no more regret than `gap`.
    """
    allowed = gap + SLACK * (1 + abs(gap))
    room = limit - sum(min(o.size for o in options) for options in units)
    zero = torch.zeros(1, dtype=torch.float64)
    states = _States(torch.zeros(1, dtype=torch.int64), zero, zero.clone())
    trail: list[tuple[Tensor, Tensor]] = []  # each state's parent and option, unit by unit
    for options in units:
        states, parent, option = _extend(states, options, price, allowed, room)
        if not len(parent):
            return None
        trail.append((parent, option))
    at = len(states.cost) - 1  # costs fall
    choice: list[int] = []
    for parent, option in reversed(trail):
        choice.append(int(option[at]))
        at = int(parent[at])
    return choice[::-1]


def _extend(
    states: _States, options: Sequence[Option], price: float, allowed: float, room: int
) -> tuple[_States, Tensor, Tensor]:
    """Every state with every option of the next unit, less what cannot become the best.

    Sizes count from the units' smallest options, so that `room` limits every partial choice.
    """
    smallest = min(o.size for o in options)
    size = torch.tensor([o.size - smallest for o in options])
    cost = torch.tensor([o.cost for o in options], dtype=torch.float64)
    priced = torch.tensor([o.cost + price * o.size for o in options], dtype=torch.float64)
    sizes = (states.size[:, None] + size).flatten()
    costs = (states.cost[:, None] + cost).flatten()
    regrets = (states.regret[:, None] + (priced - priced.min())).flatten()
    kept = ((sizes <= room) & (regrets <= allowed)).nonzero()[:, 0]
    kept = kept[costs[kept].argsort(stable=True)]
    kept = kept[sizes[kept].argsort(stable=True)]
    kept = kept[_falling(costs[kept])]
    if len(kept) > MAX_STATES:
        kept = _thinned(kept, sizes[kept], room)
    parent = kept.div(len(options), rounding_mode="floor")
    return _States(sizes[kept], costs[kept], regrets[kept]), parent, kept % len(options)


def _falling(costs: Tensor) -> Tensor:
    """Indices of the entries that are lower than all before them."""
    if not len(costs):
        return torch.zeros(0, dtype=torch.int64)
    before = torch.cat([costs.new_full((1,), torch.inf), costs.cummin(0).values[:-1]])
    return (costs < before).nonzero()[:, 0]


def _thinned(kept: Tensor, sizes: Tensor, room: int) -> Tensor:
    """At most MAX_STATES of the states `kept`: of each stretch of sizes the cheapest, its last."""
    stretch = sizes * MAX_STATES // (room + 1)
    last = torch.ones_like(stretch, dtype=torch.bool)
    last[:-1] = stretch[1:] != stretch[:-1]
    return kept[last]
