"""Convert a quantized checkpoint to another layout: the same numbers, stored otherwise.

Codes, zero-points and scales move as they are; nothing is computed but the packing. One linear is
in memory at a time. Where the target cannot hold the same numbers the conversion is refused, or,
with `requantize`, made with a loss that is measured for each linear. "plain" is no layout: it is
the model with its weights dequantized, rounded once to the model's dtype.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..calib.model import FLOATS
from ..kernels.errors import UserError, did_you_mean
from .checkpoint.kv_config import kv_spec_from_config
from .checkpoint.layouts import LAYOUTS, Layout
from .checkpoint.layouts.base import empty_quantized
from .checkpoint.load import Checkpoint
from .checkpoint.raw import (
    RawTensor,
    Slot,
    raw_tensors,
    read_raw,
    slot,
    split_shards,
    tensor_bytes,
    write_index,
)
from .checkpoint.save import LinearStorage, check_output, complete_checkpoint
from .checkpoint.stream_output import StreamOutput
from .checkpoint.workspace import workspace
from .conversion_plan import Conversion, ConversionPlan, plan_conversion
from .fp8_source import model_dtype
from .passes.rtn import rtn_quantize
from .passes.settings import RTNSettings
from .quantized import Quantized
from .sizes import MAX_SHARD_SIZE, parse_size
from .spec import QuantSpec

PLAIN = "plain"
Say = Callable[[str], None]


@dataclass(frozen=True)
class ConvertResult:
    """What a conversion did.

    source_format, target_format: names of layouts. linears: how many were quantized. exact: whether
    every number is what it was. relative_error: module -> norm of the weight's change over its own,
    of those that changed. losses: module -> why it changed. warnings: what is odd about the source
    and was understood all the same.
    """

    out: Path
    source_format: str
    target_format: str
    linears: int
    exact: bool
    relative_error: dict[str, float]
    losses: dict[str, str]
    seconds: float
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def worst(self) -> tuple[str, float] | None:
        """The linear whose weight changed most, None where none did."""
        return max(self.relative_error.items(), key=lambda item: item[1], default=None)


def convert(
    folder: str | Path,
    out: str | Path,
    to: str,
    *,
    requantize: bool = False,
    overwrite: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    say: Say = lambda line: None,
) -> ConvertResult:
    """Write the quantized checkpoint `folder` as `out` in the layout `to` (a key of
    checkpoint.layouts.LAYOUTS, or "plain").

    requantize: accept a loss where the target cannot hold the same numbers. max_shard_size: of a
    weight file. `say` is handed what the user should know before the work begins. Raises UserError
    for what is not read, and for what the target cannot hold.
    """
    start = time.perf_counter()
    folder, out = Path(folder), Path(out)
    max_shard_bytes = parse_size(max_shard_size, "the largest size of a shard")
    target = _target(to)
    check_output(folder, out, overwrite)
    checkpoint = Checkpoint(folder)
    if checkpoint.layout is None or not checkpoint.schemes:
        raise UserError(
            f"{folder} has no quantized linears that could be converted; `quantize run` makes them"
        )
    dtype = model_dtype(checkpoint.config)
    plan = None
    if target is not None:
        plan = plan_conversion(checkpoint, target, dtype, requantize)
    for line in [*checkpoint.warnings, *(plan.notes if plan else ())]:
        say(line)
    mover = _Mover(checkpoint, target, plan, dtype)
    with workspace(out) as made:
        jobs = list(_jobs(checkpoint, mover))
        shards = split_shards((s for job in jobs for s in job.slots), max_shard_bytes)
        output = StreamOutput(made, shards)
        _fill(jobs, mover, output)
        index = write_index(output.folder, shards)
        storage = LinearStorage({}, [])
        if plan is not None and target is not None:
            schemes = {m: c.scheme for m, c in plan.linears.items()}
            storage = LinearStorage(schemes, plan.ignore, target, plan.act_order)
        losses = {} if plan is None else {m: c.loss for m, c in plan.linears.items() if c.loss}
        complete_checkpoint(
            folder, output.folder, out, storage,
            _report(checkpoint, to, mover.errors, losses),
            version("lowbit"),
            cache=kv_spec_from_config(checkpoint.config),
            written=index,
        )  # fmt: skip
    return ConvertResult(
        out, checkpoint.layout.name, to, len(checkpoint.schemes),
        exact=not losses and not mover.errors,
        relative_error=mover.errors,
        losses=losses,
        seconds=time.perf_counter() - start,
        notes=plan.notes if plan else [],
        warnings=checkpoint.warnings,
    )  # fmt: skip


class _Job(NamedTuple):
    """A tensor that is copied (`raw`), or a quantized linear by its name. slots: where it goes."""

    module: str
    raw: RawTensor | None
    slots: list[Slot]


class _Mover:
    """Makes the target's tensors of one linear after the other.

    `errors`: module -> relative error, of those that are not what they were.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Layout | None,
        plan: ConversionPlan | None,
        dtype: torch.dtype,
    ) -> None:
        self._checkpoint, self._target, self._plan, self._dtype = checkpoint, target, plan, dtype
        self.errors: dict[str, float] = {}

    def slots(self, module: str) -> list[Slot]:
        """Names, dtypes and shapes of what is stored for the linear, before it is read."""
        if self._plan is None or self._target is None:
            shape = self._checkpoint.shape(module)
            empty = torch.empty(shape, dtype=self._dtype, device="meta")
            return [slot(f"{module}.weight", empty)]
        conversion = self._plan.linears[module]
        scale_dtype = conversion.scale_dtype or self._stored_scale(module)
        empty = empty_quantized(conversion.scheme.weights, conversion.shape, scale_dtype)
        stored = self._target.compress(module, empty, conversion.scheme)
        stored |= self._input_scale(module, conversion)
        return [slot(name, stored[name]) for name in sorted(stored)]

    def tensors(self, module: str) -> dict[str, Tensor]:
        """What is stored for the linear."""
        q = self._checkpoint.quantized(module)
        if self._plan is None or self._target is None:
            values = q.dequantize(self._dtype)
            if not torch.isfinite(values).all():
                raise UserError(
                    f"'{module}' has values beyond {self._dtype}, config.json's dtype; set another"
                )
            return {f"{module}.weight": values}
        conversion = self._plan.linears[module]
        moved = _moved(q, conversion)
        if conversion.loss is not None:
            before = q.dequantize()
            change = (moved.dequantize() - before).norm() / before.norm().clamp_(min=1e-30)
            if change > 0:
                self.errors[module] = float(change)
        stored = self._target.compress(module, moved, conversion.scheme)
        return stored | self._input_scale(module, conversion)

    def _stored_scale(self, module: str) -> torch.dtype:
        assert self._checkpoint.layout is not None
        leaf = self._checkpoint.layout.scale_leaf
        dtype = self._checkpoint.shards.info[f"{module}.{leaf}"].dtype
        return dtype if dtype in FLOATS else torch.float32

    def _input_scale(self, module: str, conversion: Conversion) -> dict[str, Tensor]:
        spec, scale = conversion.scheme.input_activations, self._checkpoint.input_scale(module)
        if spec is None or scale is None or self._target is None:
            return {}
        return self._target.compress_input_scale(module, spec, scale)


def _moved(q: Quantized, conversion: Conversion) -> Quantized:
    """The weight as the conversion stores it."""
    spec, dtype = conversion.scheme.weights, conversion.scale_dtype
    if conversion.rounds:
        settings = RTNSettings(scale_search="mse")
        return rtn_quantize(q.dequantize(), spec, dtype or q.scale.dtype, settings)
    scale = q.scale if dtype is None else _within(q.scale, dtype)
    if spec.granularity != q.spec.granularity:
        q = q._replace(zero_point=None if q.zero_point is None else _split(q.zero_point, q, spec))
        scale = _split(scale, q, spec)
    return q._replace(scale=scale, spec=spec)


def _split(qparam: Tensor, q: Quantized, spec: QuantSpec) -> Tensor:
    """A qparam of `q` for the smaller groups of `spec`, [out, groups], in each its own number."""
    rows, columns = q.codes.shape
    whole = qparam.expand(rows, -1)
    return whole.repeat_interleave(spec.groups(columns) // whole.shape[1], dim=1)


def _within(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales rounded to `dtype`; those beyond its range become its ends."""
    info = torch.finfo(dtype)
    return scale.float().clamp(info.min, info.max).to(dtype)


def _jobs(checkpoint: Checkpoint, mover: _Mover) -> Iterator[_Job]:
    """Everything in the natural order of names, a layer's tensors together."""
    shards = checkpoint.shards
    files = dict.fromkeys(info.file for info in shards.info.values())
    raw = {t.name: t for file in files for t in raw_tensors(shards.folder / file)}
    of_linears = {n for m in checkpoint.schemes for n in checkpoint.stored_names(m)}
    kept = {name: t for name, t in raw.items() if name not in of_linears}
    for name in sorted([*kept, *(f"{m}.weight" for m in checkpoint.schemes)], key=_natural):
        if name in kept:
            t = kept[name]
            yield _Job("", t, [Slot(name, t.nbytes, t.dtype, t.shape)])
        else:
            module = name.removesuffix(".weight")
            yield _Job(module, None, mover.slots(module))


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in a name are compared as numbers."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name)]


def _fill(jobs: list[_Job], mover: _Mover, output: StreamOutput) -> None:
    total = sum(s.nbytes for job in jobs for s in job.slots)
    with tqdm(total=total, desc="converting", unit="B", unit_scale=True, disable=None) as bar:
        for job in jobs:
            if job.raw is not None:
                for data in read_raw(job.raw):
                    output.append(job.raw.name, data)
            else:
                for name, tensor in mover.tensors(job.module).items():
                    output.append(name, tensor_bytes(tensor))
            output.finish(job.slots[0].name)
            bar.update(sum(s.nbytes for s in job.slots))
    output.close()


def _report(
    checkpoint: Checkpoint, to: str, errors: dict[str, float], losses: dict[str, str]
) -> dict[str, Any]:
    """What is kept beside the weights."""
    assert checkpoint.layout is not None
    return {
        "converted": {"from": checkpoint.layout.name, "to": to, "exact": not (errors or losses)},
        "source": checkpoint.config["quantization_config"],
        "relative_error": errors,
        "losses": losses,
    }


def _target(to: str) -> Layout | None:
    """The layout called `to`, None for plain tensors."""
    known = [*LAYOUTS, PLAIN]
    if to == PLAIN:
        return None
    if to not in LAYOUTS:
        hint = "; `quantize export` writes GGUF" if to == "gguf" else did_you_mean(to, known)
        raise UserError(f"unknown format '{to}'{hint} (known: {', '.join(known)})")
    return LAYOUTS[to]
