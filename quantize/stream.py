"""Quantize without data by streaming: tensor by tensor from the shards, no model is built.

For methods that look at weights alone. The output's shards are laid out before the first weight is
read, since names, shapes and dtypes decide their sizes; every tensor then goes to its place in
chunks of rows. So memory is that of a chunk, whatever the size of the model, of its shards or of a
single tensor, and any architecture will do whose tensors have the usual names. A run that was
killed goes on after the last tensors that are known to be on disk.

The bytes are those that the layer loop gives: chunks are cut where the search for scales cuts, and
what the whole weight must tell (its peak, for one scale a tensor) is found in a pass before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..calib.shards import DTYPES, Shards
from ..kernels.device import resolve_device
from ..kernels.errors import UserError
from .checkpoint.compress import compress
from .checkpoint.journal import Journal, source_identity
from .checkpoint.load import read_config
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
from .checkpoint.save import check_output, complete_checkpoint
from .checkpoint.stream_output import StreamOutput
from .fp8_source import READABLE, FP8Source, open_source
from .linear_names import LinearNames, find_linears, fused_peers
from .passes.rtn import round_to_nearest, rtn_quantize
from .passes.settings import RTNSettings
from .plan import Plan, PlannedLinear, plan_linears, settled_recipe
from .quantized import Quantized, elements
from .ranges import CHUNK_ELEMENTS as SEARCHED_TOGETHER
from .ranges import QParams, ScaleStore, choose_qparams, scale_store
from .recipe import Recipe, WeightPass
from .run_result import RunResult
from .spec import LayerScheme, QuantSpec, TensorWise

CHUNK_ELEMENTS = 1 << 24  # weights in memory at once: 64 MB as float32, and as much for temporaries
ROWS_A_WORD = 32  # packed zero-points of so many rows fill whole words
METHODS = ("rtn",)
Say = Callable[[str], None]


def can_stream(recipe: Recipe) -> bool:
    """Whether every pass looks at weights alone and static scales of activations are not needed."""
    return all(
        isinstance(p, WeightPass) and p.method in METHODS and not _wants_inputs(p.layer_scheme)
        for p in recipe.passes
    )


def stream_quantize(
    folder: Path,
    out: Path,
    recipe: Recipe,
    device: str = "auto",
    overwrite: bool = False,
    restart: bool = False,
    say: Say = lambda line: None,
) -> RunResult:
    """Quantize the model in `folder` into the checkpoint `out`, see `runner.quantize_model`.

    Raises UserError before any weight is read for what cannot be done, and for a weight that holds
    NaN or infinite values.
    """
    assert can_stream(recipe), "a recipe that needs calibration"
    start = time.perf_counter()
    check_output(folder, out, overwrite)
    where = resolve_device(device)
    config = read_config(folder)
    source = open_source(folder)
    names = _linears(source, config)
    plan = plan_linears(recipe, names.inner, names.outer, names.head)
    recipe = settled_recipe(recipe, plan)
    jobs = _jobs(source, plan)
    shards = split_shards(s for job in jobs for s in job.slots)
    journal = Journal(out, _identity(source, config, recipe, where), restart)
    output = StreamOutput(journal.folder, shards)
    notes = [*plan.notes, *_notes(source, names)]
    if output.finished:
        notes.append(f"resuming after {len(output.finished)} of {len(jobs)} tensors")
    for note in notes:
        say(note)
    _convert(jobs, _Converter(source, plan, where), output)
    write_index(output.folder, shards)
    complete_checkpoint(
        folder, output.folder, out,
        schemes={name: p.scheme for name, p in plan.linears.items()},
        ignore=plan.untouched,
        report={"recipe": recipe.to_dict(), "dtype": "float32", "notes": plan.notes,
                "dropped_rows": 0, "calibration": None,
                "linears": {n: {"method": p.taken_by.method} for n, p in plan.linears.items()}},
        version=version("lowbit"),
    )  # fmt: skip
    journal.remove()
    return RunResult(
        out, recipe, notes, None, "float32", len(output.finished), 0, {},
        time.perf_counter() - start,
    )  # fmt: skip


class Job(NamedTuple):
    """One tensor of the source. slots: where what becomes of it goes. raw: its bytes, where they
    are copied as they are."""

    name: str
    slots: list[Slot]
    raw: RawTensor | None


def _wants_inputs(scheme: LayerScheme) -> bool:
    """Whether a scale of the inputs is stored, which only calibration can tell."""
    inputs = scheme.input_activations
    return inputs is not None and (not inputs.dynamic or inputs.scale_dtype == "e4m3")


def _linears(source: Shards | FP8Source, config: dict[str, Any]) -> LinearNames:
    if isinstance(source, Shards) and "quantization_config" in config:
        raise UserError(
            f"{source.folder} is already quantized; give the original model (quantizing twice only "
            f"adds error) or one of the kinds that are dequantized as they are read: {READABLE}"
        )
    if config.get("is_encoder_decoder"):
        raise UserError(f"{source.folder} is an encoder-decoder model; lowbit takes causal LMs")
    return find_linears(source.info, config)


def _notes(source: Shards | FP8Source, names: LinearNames) -> list[str]:
    notes = []
    if isinstance(source, FP8Source):
        notes.append("the model is stored in FP8: dequantized as it is read")
    if names.stacked:
        notes.append(
            f"{len(names.stacked)} tensors of stacked experts stay as they are, first "
            f"'{names.stacked[0]}'"
        )
    return notes


def _identity(
    source: Shards | FP8Source, config: dict[str, Any], recipe: Recipe, device: torch.device
) -> dict[str, Any]:
    """Everything that the output's bytes depend on."""
    return {
        "way": "streamed",
        "model": source_identity(source),
        "config": config,
        "recipe": recipe.to_dict(),
        "device": device.type,
        "versions": {name: version(name) for name in ("lowbit", "torch")},
    }


def _jobs(source: Shards | FP8Source, plan: Plan) -> list[Job]:
    """What becomes of every tensor, in the source's order."""
    jobs = []
    for file in dict.fromkeys(info.file for info in source.info.values()):
        for raw in raw_tensors(source.folder / file):
            info = source.info.get(raw.name)
            if info is None:
                continue
            module, _, leaf = raw.name.rpartition(".")
            if leaf == "weight" and module in plan.linears:
                empty = _empty(plan.linears[module], info.dtype)
                stored = compress(module, empty, plan.linears[module].scheme)
                slots = [slot(name, stored[name]) for name in sorted(stored)]
                jobs.append(Job(raw.name, slots, None))
            elif DTYPES[raw.dtype] == info.dtype:
                jobs.append(Job(raw.name, [Slot(raw.name, raw.nbytes, raw.dtype, raw.shape)], raw))
            else:
                made = torch.empty(info.shape, dtype=info.dtype, device="meta")
                jobs.append(Job(raw.name, [slot(raw.name, made)], None))
    return jobs


def _empty(planned: PlannedLinear, model_dtype: torch.dtype) -> Quantized:
    """A quantized weight on meta: what is stored has its shapes and dtypes."""
    spec, shape = planned.scheme.weights, planned.shape
    probe = scale_store(torch.ones(1, 1), spec, model_dtype)

    def meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return Quantized(
        meta(shape, elements(spec).dtype),
        meta(spec.scale_shape(*shape), probe.dtype),
        None if spec.symmetric else meta(spec.scale_shape(*shape), torch.int8),
        spec,
        None if probe.global_scale is None else meta((1,), torch.float32),
    )


def _convert(jobs: list[Job], converter: _Converter, output: StreamOutput) -> None:
    total = sum(s.nbytes for job in jobs for s in job.slots)
    with tqdm(total=total, desc="quantizing", unit="B", unit_scale=True, disable=None) as bar:
        for job in jobs:
            if job.name not in output.finished:
                for name, data in converter.pieces(job):
                    output.append(name, data)
                output.finish(job.name)
            bar.update(sum(s.nbytes for s in job.slots))
    output.close()


class _Converter:
    """Turns tensors of the source into the bytes that are stored, piece by piece."""

    def __init__(self, source: Shards | FP8Source, plan: Plan, device: torch.device) -> None:
        self._source, self._plan, self._device = source, plan, device
        self._peers = {n: peers for peers in fused_peers(list(plan.linears)) for n in peers}
        self._peaks: dict[str, tuple[float, float]] = {}

    def pieces(self, job: Job) -> Iterator[tuple[str, bytes]]:
        """(tensor name, its next bytes) of what is stored for the source's tensor."""
        module = job.name.removesuffix(".weight")
        if job.raw is not None:
            yield from ((job.name, data) for data in read_raw(job.raw))
        elif module in self._plan.linears:
            yield from self._quantized(job, module)
        else:
            columns = math.prod(self._source.info[job.name].shape[1:])
            for part in self._parts(job.name, max(1, CHUNK_ELEMENTS // columns)):
                yield job.name, tensor_bytes(part)

    def _quantized(self, job: Job, module: str) -> Iterator[tuple[str, bytes]]:
        planned = self._plan.linears[module]
        heights = {s.name: s.shape[0] for s in job.slots}
        shape_name = f"{module}.weight_shape"
        given = self._given(module)
        for number, part in enumerate(self._parts(job.name, _chunk_rows(planned))):
            if not torch.isfinite(part).all():
                raise UserError(
                    f"'{job.name}' holds NaN or infinite values; download the model again"
                )
            q = _quantize(part, planned, self._source.info[job.name].dtype, given)
            stored = compress(module, q, planned.scheme)
            if shape_name in stored:
                stored[shape_name] = torch.tensor(planned.shape, dtype=torch.int64)
            for name, tensor in stored.items():
                grows = tensor.shape[0] < heights[name]  # with the rows
                if grows or number == 0:
                    yield name, tensor_bytes(tensor)

    def _given(self, module: str) -> ScaleStore | QParams | None:
        """What the whole weight decides for each of its chunks."""
        planned, dtype = self._plan.linears[module], self._source.info[f"{module}.weight"].dtype
        spec = planned.scheme.weights
        if spec.scale_dtype == "e4m3":  # one global scale for what engines run as one linear
            ends = [self._range(peer) for peer in self._peers[module]]
            return scale_store(torch.tensor(ends), spec, dtype)
        if _whole_range(planned):
            return choose_qparams(torch.tensor([self._range(module)]), spec, dtype)
        return None

    def _range(self, module: str) -> tuple[float, float]:
        """Smallest and largest weight."""
        if module not in self._peaks:
            ends = [
                torch.stack(part.aminmax()).tolist()
                for part in self._parts(f"{module}.weight", _chunk_rows(self._plan.linears[module]))
            ]
            self._peaks[module] = min(e[0] for e in ends), max(e[1] for e in ends)
        return self._peaks[module]

    def _parts(self, name: str, rows: int) -> Iterator[Tensor]:
        """The tensor in chunks of `rows`; the file maps are dropped after each."""
        height = self._source.info[name].shape[0]
        for start in range(0, height, rows):
            yield self._source.get_rows(name, start, min(start + rows, height)).to(self._device)
            self._source.close()


def _quantize(
    w: Tensor, planned: PlannedLinear, dtype: torch.dtype, given: ScaleStore | QParams | None
) -> Quantized:
    """Rows of a weight; dtype: the model's."""
    spec = planned.scheme.weights
    if isinstance(given, QParams):
        return round_to_nearest(w.float(), spec, given)
    return rtn_quantize(w.float(), spec, dtype, _rtn_settings(planned), given)


def _rtn_settings(planned: PlannedLinear) -> RTNSettings:
    return getattr(planned.taken_by, "rtn", RTNSettings())


def _whole_range(planned: PlannedLinear) -> bool:
    """Whether the range of the whole weight gives its one scale."""
    one_scale = isinstance(planned.scheme.weights.granularity, TensorWise)
    return one_scale and _rtn_settings(planned).scale_search == "minmax"


def _chunk_rows(planned: PlannedLinear) -> int:
    """Rows of a chunk: about CHUNK_ELEMENTS, whole blocks and words, cut where the search for
    scales cuts too (its sums then have the same terms). One searched scale takes the whole weight.
    """
    rows, columns = planned.shape
    spec: QuantSpec = planned.scheme.weights
    if isinstance(spec.granularity, TensorWise) and not _whole_range(planned):
        return rows
    tall, wide = spec.block or (1, 1)
    together = tall * max(1, SEARCHED_TOGETHER // (tall * -(-columns // wide) * wide))
    unit = math.lcm(together, ROWS_A_WORD)
    return unit * max(1, CHUNK_ELEMENTS // (unit * columns))
