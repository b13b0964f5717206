"""Time the tiles that a GPU could run a checkpoint's linears with, and keep the fastest.

For each kind of quantized linear and each number of tokens up to which one choice holds, the
shipped tiles and the few around them are timed on random operands that together exceed the L2
cache. What cannot be compiled or gives another result than the shipped tiles is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import linear_a8, linear_wna16
from ..kernels.a8_forms import BUCKETS as A8_BUCKETS
from ..kernels.a8_forms import a8_candidates
from ..kernels.linear_ops import LinearKernel, LinearProblem, choose_linear
from ..kernels.triton_ops.tiles import GemmConfig
from ..kernels.tuned import Tuned, weight_key
from ..kernels.wna16_forms import BUCKETS as WNA16_BUCKETS
from ..kernels.wna16_forms import wna16_candidates
from ..quantize.checkpoint.load import Checkpoint
from ..quantize.linear_problem import linear_problem
from ..runtime.fused import fusions
from .gpu_operands import packed_bytes, random_operands

Clock = Callable[[Sequence[Callable[[], object]]], float]
"""Median seconds of one of some calls, each on operands of its own (gpu_timer.seconds)."""
CLOSE = 0.02  # relative error of a sum of as many products, in half precision, in another order


class Tunable(NamedTuple):
    """A kernel whose tiles are chosen by the number of tokens. candidates: of a problem, tokens and
    a device, the shipped choice first; run: with one of them."""

    kernel: LinearKernel
    buckets: tuple[int, ...]
    candidates: Callable[[LinearProblem, int, torch.device], Sequence[GemmConfig | None]]
    run: Callable[..., Tensor]


TUNABLES = {
    t.kernel.name: t
    for t in (
        Tunable(
            linear_wna16.WNA16,
            WNA16_BUCKETS,
            lambda p, rows, on: wna16_candidates(rows, *linear_wna16.tile_question(p, on)),
            linear_wna16.run_wna16,
        ),
        Tunable(
            linear_a8.A8,
            A8_BUCKETS,
            lambda p, rows, on: a8_candidates(rows, *linear_a8.tile_question(p, on)),
            linear_a8.run_a8,
        ),
    )
}


class Trial(NamedTuple):
    """A choice that was found, and what was passed over on the way, with its reason."""

    tuned: Tuned
    tried: int
    passed_over: dict[str, str]


def checkpoint_problems(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> list[LinearProblem]:
    """What its linears ask, each kind once, those that are run as one product together; without
    the ones that no tunable kernel runs on `device`."""
    schemes = checkpoint.schemes

    def alike(parts: Sequence[str]) -> bool:
        return len({str(schemes[part]) for part in parts}) == 1

    found = []
    for fusion in fusions(schemes, alike):
        shapes = [checkpoint.shape(part) for part in fusion.parts]
        whole = sum(rows for rows, _ in shapes), shapes[0][1]
        problem = linear_problem(fusion.module, schemes[fusion.parts[0]], whole, dtype, device)
        if problem not in found and choose_linear(problem).candidate.name in TUNABLES:
            found.append(problem)
    return found


def candidates_to_time(problems: Iterable[LinearProblem], device: torch.device) -> int:
    """How many pairs of tokens and tiles `tune` tries."""
    return sum(
        len(tunable.candidates(problem, rows, device))
        for problem in problems
        for tunable in [TUNABLES[choose_linear(problem).candidate.name]]
        for rows in tunable.buckets
    )


def tune(
    problems: Iterable[LinearProblem],
    device: torch.device,
    clock: Clock,
    copies: Callable[[int], int],
    told: Callable[[], object] = lambda: None,
) -> Iterator[Trial]:
    """The fastest tiles for each of `problems` and number of tokens.

    copies: bytes of a weight to how many of them a clock's calls take turns on. told: called after
    each candidate.
    """
    for problem in problems:
        tunable = TUNABLES[choose_linear(problem).candidate.name]
        torch.manual_seed(0)
        weights = [
            tunable.kernel.pack(random_operands(problem, device), problem)
            for _ in range(copies(packed_bytes(problem)))
        ]
        for rows in tunable.buckets:
            yield _fastest(tunable, problem, rows, weights, clock, told)


def _fastest(
    tunable: Tunable,
    problem: LinearProblem,
    rows: int,
    weights: Sequence[tuple[Tensor, ...]],
    clock: Clock,
    told: Callable[[], object],
) -> Trial:
    device = weights[0][0].device
    x = torch.randn(rows, problem.in_features, device=device, dtype=problem.dtype)
    shipped, *others = tunable.candidates(problem, rows, device)

    def calls(config: GemmConfig | None) -> list[Callable[[], Tensor]]:
        return [lambda w=w: tunable.run(x, w, None, problem, config) for w in weights]

    expected = calls(shipped)[0]()
    shipped_seconds = clock(calls(shipped))
    told()
    best, best_seconds, passed_over = shipped, shipped_seconds, dict[str, str]()
    for config in others:
        try:
            reason = _difference(calls(config)[0](), expected)
            taken = clock(calls(config)) if reason is None else None
        except Exception as e:  # the compiler's, or shared memory that there is not
            reason, taken = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}", None
        if reason is not None:
            passed_over[str(config)] = reason
        if taken is not None and taken < best_seconds:
            best, best_seconds = config, taken
        told()
    key = weight_key(tunable.kernel.name, problem)
    tuned = Tuned(key, rows, best, best_seconds, shipped_seconds)
    return Trial(tuned, 1 + len(others), passed_over)


def _difference(found: Tensor, expected: Tensor) -> str | None:
    """How far a result is off, where that is more than another order of sums explains."""
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    return None if error <= CLOSE else f"relative error {error:.3g} beside the shipped tiles"
