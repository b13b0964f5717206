"""How much memory a run holds at its peak, counted from shapes. Nothing is measured here.

A run holds one decoder layer, its statistics and the hidden states of all calibration rows; beside
them what a solver makes, or one batch on its way through the layer. In sequence, every batch also
waits half-way, with what it has computed so far. Each moment is added up; the peak is the largest.

Tensors up to calib/memory.py's HEAP_BYTES come from the heap, and what a batch frees from one stop
to the next is of other sizes than what it takes: the heap grows to about the sum of all stops
(measured: 17 KB a token where the sum is 16). Larger ones are handed back at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...calib.memory import HEAP_BYTES
from ...calib.shards import MAPPED_BYTES
from ..recipe import Recipe
from .rates import solved_by_gptq
from .work import Problem, Work

FLOAT = 4  # bytes of a float32
MOMENTS = 1.3  # square matrices of an input's width beside its second moments: factored in place
SOLVED_BYTES = 10  # of each weight that is solved: master, transposed copy, codes
REFINED_BYTES = 16  # more of each that is refined: codes, gap, its product with the Hessian
LEAN_BYTES = 10  # of each weight that is rounded: master, codes, value
LIBRARY_BYTES = 150 << 20  # code and buffers of torch's kernels, resident once they have run
HEAD_COPIES = 5  # of a head in float32 while it is quantized
TEMPORARIES = 4  # copies of a batch's widest activations while a layer runs
STREAMED_BYTES = 80 << 20  # chunks and file buffers of a streamed run
CUDA_HOST_BYTES = 2 << 30  # what CUDA's libraries take of the host's memory


class ModelBytes(NamedTuple):
    """Bytes in the dtype of forward passes. layer: of the largest decoder layer; outside: of all
    parameters outside the decoder layers but the head; head: of an output head that is quantized,
    in float32, 0 without one; itemsize: of a number."""

    layer: int
    outside: int
    head: int
    itemsize: int


class MemoryEstimate(NamedTuple):
    """Bytes at the peak. host, device: peak; a CPU run holds all on the host, device is 0. parts:
    of what is counted (without what the process held before), at the worst moment."""

    host: int
    device: int
    parts: dict[str, int]


def estimate_memory(work: Work, model: ModelBytes, held: int, on_device: bool) -> MemoryEstimate:
    """held: what the process holds before the run begins. on_device: the run is not on the CPU."""
    on_host = {"mapped files": min(work.bytes_before, MAPPED_BYTES)}
    if work.streamed:
        moments = [{"chunks and buffers": STREAMED_BYTES}]
    else:
        moments = list(_moments(work, model))
        on_host["libraries"] = LIBRARY_BYTES
    worst = max(moments, key=lambda parts: sum(parts.values()))
    host, counted = held + sum(on_host.values()), sum(worst.values())
    if not on_device:
        return MemoryEstimate(host + counted, 0, {**on_host, **worst})
    host += CUDA_HOST_BYTES + max(model.layer, model.outside)
    return MemoryEstimate(host, counted, worst)


def _moments(work: Work, model: ModelBytes) -> Iterable[dict[str, int]]:
    """What is held while the embedding is at work, in each stop of a layer, and at the head."""
    states = work.tokens * work.hidden * model.itemsize
    followed = 1 + _follows_float_model(work.recipe)
    yield {"embeddings": model.outside, "hidden states": states}
    layer = {
        "layer": model.layer,
        "hidden states": 2 * states * followed,
        "waiting batches": _waiting(work, model) * followed,
    }
    yield layer
    batch = {"a batch at work": _batch(work, model)}
    for p in work.problems:
        observed = {**layer, "statistics": _statistics(p, work)}
        yield {**observed, "solver": _solver(p)}
        yield {**observed, **batch}
    if model.head:
        yield {"head": HEAD_COPIES * model.head, "hidden states": states}


def _follows_float_model(recipe: Recipe) -> bool:
    whole = any(p.method == "signround" for p in recipe.weight_passes)
    return whole or "input_shift" in recipe.needs


def _waiting(work: Work, model: ModelBytes) -> int:
    """Batches half-way through a layer: at each stop what the linears read, the residual stream
    and its norm."""
    if work.recipe.execution.order != "sequential":
        return 0
    layers = max(1, work.layers)
    plain = [p for p in work.problems if p.share == 1]
    stops = [p.columns + 2 * work.hidden for p in plain for _ in range(-(-p.count // layers))]
    if len(plain) < len(work.problems):  # experts stop twice for all of them
        stops += 2 * [3 * work.hidden]
    on_heap = _batch_tokens(work) * work.hidden * model.itemsize <= HEAP_BYTES
    numbers = sum(stops) if on_heap else max(stops, default=0)
    return work.tokens * numbers * model.itemsize


def _batch_tokens(work: Work) -> int:
    return min(work.recipe.execution.batch_size, work.rows) * work.seq_len


def _statistics(p: Problem, work: Work) -> int:
    """Second moments: of the problem, or of a whole layer where transforms look at all at once."""
    if "hessian" not in work.recipe.needs:
        return 0
    own = FLOAT * p.columns**2 * (2 if "input_shift" in work.recipe.needs else 1)
    if all("hessian" not in t.needs for t in work.recipe.transforms):
        return own
    layers = max(1, work.layers)
    return sum(FLOAT * q.columns**2 * -(-q.count // layers) for q in work.problems)


def _solver(p: Problem) -> int:
    if not solved_by_gptq(p):
        return LEAN_BYTES * p.weights
    settings = p.taken_by.gptq
    squares = MOMENTS + (settings.refine_rounds > 0)
    each = SOLVED_BYTES + (REFINED_BYTES if settings.refine_rounds else 0)
    return int(FLOAT * squares * p.columns**2) + each * p.weights


def _batch(work: Work, model: ModelBytes) -> int:
    """The widest activations of one batch on its way."""
    widest = max((p.columns for p in work.problems), default=work.hidden)
    return TEMPORARIES * _batch_tokens(work) * widest * model.itemsize
