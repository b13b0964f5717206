"""How fast this machine is at what a run does: short timings of the very functions, a few seconds.

Every function is timed on the model's own shapes, cut where a whole one would take long; what is
left out is extrapolated by the law that it follows (timing.py). Threads, dtypes and device are
those of the run.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...calib.statistics import ChannelRange, Hessian
from ..activations import fake_quantize_input, input_scale_of_peak
from ..checkpoint.layouts import Layout
from ..passes.balance import balanced_scales, rounding_of
from ..passes.gptq import factor_hessian, gptq_quantize
from ..passes.hqq import hqq_quantize
from ..passes.refine import refine
from ..passes.rtn import rtn_quantize
from ..quantized import Quantized
from ..recipe import Recipe
from ..spec import Block, Group
from .work import Problem

GRAM_COLUMNS, GRAM_TOKENS = 2048, 1024  # of a timed Gram matrix, at most
FACTOR_COLUMNS = 1536  # of a timed factorization, at most
SWEEP_COLUMNS, SWEEP_WEIGHTS = 768, 1 << 22  # of a timed solve, at most
ROUNDED_WEIGHTS = 1 << 20  # rounded for a timing, at most
BALANCED_WEIGHTS = 1 << 18
DISK_BYTES = 1 << 25  # written and read back for a timing, at most
PIECE = 1 << 20  # bytes that are written at once
CPU = torch.device("cpu")
ANY_COLUMNS = 64  # columns of a solve that has no groups come in so many
PRODUCT = 512  # rows, columns and inner size of a timed product


class Solver(NamedTuple):
    """GPTQ on one problem. columns: of the timed solve; sweep, refine: its seconds (all rows, that
    many columns; refine: one round). factor_columns, factor: a factorization's and its seconds.
    """

    columns: int
    sweep: float
    refine: float
    factor_columns: int
    factor: float


class Rates(NamedTuple):
    """Seconds of what is timed.

    rows: a layer of each kind -> one calibration row's way through it. gram: columns of an input ->
    seconds of its Gram matrix, for each token and square column. solvers, rounding: by
    `Problem.kind`; rounding: for each weight that a data-free method rounds and packs.
    scan: of one number of an input in a pass over it. product: of a float32 multiply-add; balance:
    of a weight in a search for channel scales. rounded_input: of a number of a quantized input.
    read, write, digest: of a byte.
    """

    rows: dict[str, float]
    gram: dict[int, float]
    solvers: dict[Problem, Solver]
    rounding: dict[Problem, float]
    scan: float
    product: float
    balance: float
    rounded_input: float
    read: float
    write: float
    digest: float


def measure(
    problems: Iterable[Problem],
    recipe: Recipe,
    rows: dict[str, float],
    dtype: torch.dtype,
    model_dtype: torch.dtype,
    layout: Layout,
    device: torch.device,
    folder: Path,
    nbytes: int,
) -> Rates:
    """Time what `recipe` does on `problems`.

    rows: see Rates, timed before (sample.py). dtype: of forward passes; model_dtype: of the stored
    weights. folder: where output is to be written; nbytes: how much.
    """
    problems = list(problems)
    observed = "hessian" in recipe.needs or recipe.budget is not None
    widths = sorted({p.columns for p in problems}) if observed else []
    kinds = list(dict.fromkeys(p.kind for p in problems))
    solved = [p for p in kinds if solved_by_gptq(p)]
    rounded = [p for p in kinds if not solved_by_gptq(p)]
    smoothed = any(t.method != "rotate" for t in recipe.transforms)
    inputs = next((p for p in problems if p.scheme.input_activations is not None), None)
    read, write, digest = disk_rates(folder, nbytes)
    return Rates(
        rows,
        gram={columns: gram_rate(columns, dtype, device) for columns in widths},
        solvers={p: time_solver(p, model_dtype, layout, device) for p in solved},
        rounding={p: rounding_rate(p, model_dtype, layout, device) for p in rounded},
        scan=scan_rate(dtype, device), product=product_rate(device),
        balance=balance_rate(problems, device) if smoothed else 0.0,
        rounded_input=0.0 if inputs is None else input_rate(inputs, dtype, device),
        read=read, write=write, digest=digest,
    )  # fmt: skip


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that leave the process's own generators as they are."""
    draw = torch.Generator(device).manual_seed(0)
    return torch.randn(*shape, generator=draw, device=device).to(dtype)


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """The median of a few timings of `run`, which is called once before."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[(repeats - 1) // 2]


def solved_by_gptq(p: Problem) -> bool:
    """Whether the problem is handed to GPTQ (learned rounding starts from its solution)."""
    taken_by = p.taken_by
    return taken_by.method == "gptq" or (
        taken_by.method == "signround" and taken_by.signround.start == "gptq"
    )


def gram_rate(columns: int, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds for each token and square column."""
    columns = min(columns, GRAM_COLUMNS)
    statistic = Hessian(columns, device)
    x = random(GRAM_TOKENS, columns, dtype=dtype, device=device)
    return seconds_of(lambda: statistic.add(x), device) / (GRAM_TOKENS * columns**2)


def time_solver(
    p: Problem, model_dtype: torch.dtype, layout: Layout, device: torch.device
) -> Solver:
    """GPTQ as the worker runs it, on random weights of the problem's rows."""
    spec, settings = p.scheme.weights, p.taken_by.gptq
    scale_dtype = layout.scale_dtype(model_dtype)
    columns = _cut_columns(p, min(SWEEP_COLUMNS, SWEEP_WEIGHTS // p.rows))
    w = random(p.rows, columns, device=device)
    factor = factor_hessian(_hessian(columns, device), settings)
    plain = replace(settings, refine_rounds=0)

    def solve() -> Quantized:
        result = gptq_quantize(w, factor, spec, scale_dtype, plain).quantized
        layout.compress("it", result, p.scheme)
        result.dequantize()
        return result

    sweep = seconds_of(solve, device, 1)
    solved = solve() if settings.refine_rounds else None
    refining = 0.0
    if solved is not None:
        refining = seconds_of(lambda: refine(w, factor.damped(), solved, 1), device, 1)
    width = min(p.columns, FACTOR_COLUMNS)
    hessian = _hessian(width, device)
    factoring = seconds_of(lambda: factor_hessian(hessian, settings), device, 1)
    return Solver(columns, sweep, refining, width, factoring)


def rounding_rate(
    p: Problem, model_dtype: torch.dtype, layout: Layout, device: torch.device
) -> float:
    """Seconds for each weight that a data-free method rounds and that is packed."""
    rows = max(1, min(p.rows, ROUNDED_WEIGHTS // p.columns))
    block = p.scheme.weights.block
    if block is not None:
        rows = max(rows, min(block[0], p.rows))
    w = random(rows, p.columns, device=device, dtype=model_dtype)
    taken_by, spec = p.taken_by, p.scheme.weights
    scale_dtype = layout.scale_dtype(model_dtype)

    def run() -> None:
        if taken_by.method == "hqq":
            q = hqq_quantize(w.float(), spec, scale_dtype, taken_by.hqq)
        else:
            q = rtn_quantize(w.float(), spec, scale_dtype, taken_by.rtn)
        layout.compress("it", q, p.scheme)

    return seconds_of(run, device, 2) / w.numel()


def balance_rate(problems: list[Problem], device: torch.device) -> float:
    """Seconds for each weight that takes part in a search for channel scales."""
    if not problems:
        return 0.0
    columns = max(problems, key=lambda p: p.weights * p.count).columns
    values = random(max(16, BALANCED_WEIGHTS // columns), 1, columns, device=device)
    energy = torch.ones(columns, device=device)
    each = torch.arange(columns, device=device)
    run = lambda: balanced_scales([rounding_of(values, energy, 7.5)], each)  # noqa: E731
    return seconds_of(run, device, 1) / values.numel()


def scan_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Seconds for each number of an input in one pass over it."""
    x = random(PRODUCT, 1024, dtype=dtype, device=device)
    statistic = ChannelRange(1024, device)
    passes = 5  # of the statistic over its input
    return seconds_of(lambda: statistic.add(x), device) / (passes * x.numel())


def product_rate(device: torch.device) -> float:
    """Seconds for each multiply-add of a float32 product."""
    a = random(PRODUCT, PRODUCT, device=device)
    return seconds_of(lambda: a @ a, device) / PRODUCT**3


def input_rate(p: Problem, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds for each number of an input that is rounded as the scheme says."""
    spec = p.scheme.input_activations
    assert spec is not None
    x = random(256, p.columns, dtype=dtype, device=device)
    scale = input_scale_of_peak(x.float().abs().amax(), spec)
    return seconds_of(lambda: fake_quantize_input(x, spec, scale), device) / x.numel()


def disk_rates(folder: Path, nbytes: int) -> tuple[float, float, float]:
    """Seconds for each byte that is read, written (and synced) and hashed in `folder`, where
    `nbytes` may be written; reading and writing cost nothing where it is none."""
    size = min(nbytes, DISK_BYTES)
    data = os.urandom(PIECE)
    digest = seconds_of(lambda: hashlib.sha256(data).digest(), CPU, 1) / len(data)
    if size <= 0:
        return 0.0, 0.0, digest
    data = data[:size]
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(size // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        total = file.tell()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(PIECE):
            pass
        read = time.perf_counter() - start
    return read / total, written / total, digest


def _cut_columns(p: Problem, most: int) -> int:
    """At most `most` of the problem's columns, in whole groups."""
    match p.scheme.weights.granularity:
        case Group(size) | Block(_, size):
            whole = size
        case _:
            whole = ANY_COLUMNS
    return min(p.columns, max(whole, most // whole * whole))


def _hessian(columns: int, device: torch.device) -> Tensor:
    """A positive definite matrix whose diagonal varies."""
    x = random(64, columns, device=device)
    return x.T @ x / 64 + torch.eye(columns, device=device)
