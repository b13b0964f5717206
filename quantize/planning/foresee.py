"""A run's time, memory and output before it begins: what `quantize run` says and checks, too."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...calib.model import LayeredModel
from ...calib.sample_call import layer_kinds
from ...calib.shards import TensorInfo
from ...kernels.errors import UserError
from ..checkpoint.journal import unfinished_identity
from ..checkpoint.layouts import Layout, layout_named
from ..linear_plan import Plan
from ..recipe import Recipe
from .machine import free_disk_bytes, keeps_files, resident_bytes
from .memory import MemoryEstimate, ModelBytes, estimate_memory
from .rates import Rates, measure
from .resume import finished_before, plan_of_rest, work_of_rest
from .sample import RowTimes, row_times
from .sizes import Sources, Totals, cache_scale_count, totals
from .timing import COPIES, TimeEstimate, estimate_time
from .work import Work, problems_of

WORTH_TIMING = 2e9  # multiply-adds, and weights times PER_WEIGHT, from which a run is timed
PER_WEIGHT = 500  # operations on each weight that is quantized, roughly
SPARE_BYTES = 1 << 24  # on the disk, for reports, tokenizer and the like


@dataclass(frozen=True)
class Outline:
    """A run that is settled but for its weights.

    model: None where weights are streamed. rows: calibration rows, 0 without any. info: the tensors
    that the output is made of. finished: layers, or streamed tensors, that an earlier run has done.
    """

    plan: Plan
    recipe: Recipe
    info: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    model: LayeredModel | None
    rows: int
    device: torch.device
    finished: frozenset[str] = frozenset()

    @property
    def layout(self) -> Layout:
        """How the output is stored."""
        return layout_named(self.recipe.format)

    @property
    def sources(self) -> Sources:
        return Sources(self.info, self.stored_name, self.layout)

    def stored_name(self, name: str) -> str:
        """What the folder calls the linear `name`."""
        if self.model is None or f"{name}.weight" in self.info:
            return name
        return self.model.tensor_name(f"{name}.weight").removesuffix(".weight")


@dataclass(frozen=True)
class Foresight:
    """time: None where it was not asked for. note: how it was found, "" where there is nothing to
    say of it. disk_bytes: that the output and its making take at most. resumed: whether a run goes
    on, so that the time is that of the rest."""

    totals: Totals
    memory: MemoryEstimate
    time: TimeEstimate | None
    note: str
    disk_bytes: int
    resumed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and dicts."""
        time = self.time
        return {
            "size": self.totals._asdict(),
            "memory": self.memory._asdict(),
            "disk_bytes": self.disk_bytes,
            "time": None if time is None else {"seconds": time.seconds, "parts": time.parts},
        }

    def sentence(self) -> str:
        """One line for the user."""
        parts = [f"output {_size(self.totals.tensor_bytes)}"]
        if self.totals.quantized_bits_per_weight is not None:
            parts.append(f"{self.totals.quantized_bits_per_weight:.3f} bits per quantized weight")
        parts.append(f"peak memory about {_size(self.memory.host)}")
        if self.memory.device:
            parts.append(f"{_size(self.memory.device)} of the device's")
        if self.time is not None:
            left = " for what is left" if self.resumed else ""
            parts.insert(0, f"about {duration(self.time.seconds)}{left} on this machine")
        return ", ".join(parts)


def foresee(
    outline: Outline,
    place: Path | None,
    begun: float,
    timed: bool = True,
    must_fit: bool = True,
) -> Foresight:
    """What the run will take.

    place: the folder that the output will lie in, None where it is not known. begun: seconds that
    the run has taken so far. timed: whether the machine is measured. must_fit: UserError where the
    disk has too little room.
    """
    start = time.perf_counter()
    held = resident_bytes()
    weights = totals(outline.plan, outline.sources, _cache_scales(outline))
    work = work_of(outline, weights)
    memory = estimate_memory(
        work, model_bytes(outline), held, on_device=outline.device.type != "cpu"
    )
    disk = weights.tensor_bytes + SPARE_BYTES
    disk += 0 if work.streamed else work.quantized_bytes * (COPIES - 1)
    if must_fit and place is not None:
        check_room(disk, place)
    if not timed:
        return Foresight(weights, memory, None, "", disk)
    if outline.finished:
        kinds = {} if outline.model is None else layer_kinds(outline.model)
        work = work_of_rest(
            work, outline.plan, outline.config, outline.info, kinds, outline.finished
        )
    times = _row_times(outline, work)
    rates = _rates(outline, work, times, place or Path(tempfile.gettempdir()))
    begun += time.perf_counter() - start
    time_left = estimate_time(work, rates, begun)
    resumed = bool(outline.finished)
    return Foresight(weights, memory, time_left, times.note, disk, resumed)


def foresee_run(outline: Outline, out: Path, begun: float, restart: bool) -> Foresight:
    """What a run into `out` will take, timed where that is worth it.

    UserError where the disk has too little room for it (an unfinished run, which goes on unless
    `restart`, has taken some of it already).
    """
    anew = restart or unfinished_identity(out) is None
    if not anew:
        finished = finished_before(out, streamed=outline.model is None)
        outline = replace(outline, finished=finished)
    return foresee(outline, out.absolute().parent, begun, worth_timing(outline), must_fit=anew)


def worth_timing(outline: Outline) -> bool:
    """Whether a run is long enough to measure the machine before: about a second and more."""
    rest = plan_of_rest(outline.plan, outline.finished, outline.model is None)
    weights = sum(math.prod(p.shape) for p in rest.linears.values())
    tokens = outline.rows * outline.recipe.calibration.seq_len
    return weights * (tokens + PER_WEIGHT) > WORTH_TIMING


def check_room(needed: int, place: Path) -> None:
    """UserError where one cannot write in `place`, or the disk that it lies on has fewer free bytes
    than are needed."""
    if not keeps_files(place):
        raise UserError(f"{place} is no place to write files to; choose another output")
    free = free_disk_bytes(place)
    if free < needed:
        raise UserError(
            f"{place} has {_size(free)} free, but the run needs {_size(needed)}; free some or "
            "choose another output"
        )


def work_of(outline: Outline, weights: Totals) -> Work:
    """The run's work."""
    model, recipe = outline.model, outline.recipe
    text = outline.config.get("text_config") or outline.config
    planned = {f"{outline.stored_name(name)}.weight" for name in outline.plan.linears}
    kept = sum(info.nbytes for name, info in outline.info.items() if name not in planned)
    layers = () if model is None else model.layers.values()
    return Work(
        problems=problems_of(outline.plan, outline.config, recipe.calibration.all_experts),
        recipe=recipe,
        rows=outline.rows,
        seq_len=recipe.calibration.seq_len,
        kinds={} if model is None else {k: len(v) for k, v in layer_kinds(model).items()},
        layer_weights=sum(_count(layer) for layer in layers),
        hidden=int(text.get("hidden_size") or 0),
        vocabulary=int(text.get("vocab_size") or 0),
        bytes_before=weights.tensor_bytes_before,
        bytes_after=weights.tensor_bytes,
        quantized_bytes=weights.tensor_bytes - kept,
        streamed=model is None,
    )


def model_bytes(outline: Outline) -> ModelBytes:
    """What parts of the model take in memory."""
    model = outline.model
    if model is None:
        return ModelBytes(0, 0, 0, 4)
    item = model.dtype.itemsize
    largest = max(_count(layer) for layer in model.layers.values())
    inside = sum(_count(layer) for layer in model.layers.values())
    outside = _count(model.model.base_model) - inside
    planned = outline.plan.linears.get(model.head or "")
    head = 0 if planned is None else 4 * math.prod(planned.shape)
    return ModelBytes(largest * item, outside * item, head, item)


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 100:
        return f"{seconds:.0f} seconds" if seconds >= 10 else f"{seconds:.1f} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def _cache_scales(outline: Outline) -> int:
    cache, model = outline.recipe.kv_cache, outline.model
    if cache is None or model is None:
        return 0
    return cache_scale_count(cache.kv_cache.spec, model.config)


def _row_times(outline: Outline, work: Work) -> RowTimes:
    if outline.model is None or not work.rows:
        return RowTimes({})
    batch = min(work.rows, work.recipe.execution.batch_size)
    return row_times(outline.model, batch, work.seq_len)


def _rates(outline: Outline, work: Work, times: RowTimes, place: Path) -> Rates:
    widest = max(outline.info.values(), key=lambda info: info.nbytes)
    dtype = torch.float32 if outline.model is None else outline.model.dtype
    return measure(
        work.problems, work.recipe, times.seconds, dtype, widest.dtype, outline.layout,
        outline.device, place, min(work.bytes_after, free_disk_bytes(place) // 2),
    )  # fmt: skip


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
