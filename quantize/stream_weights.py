"""Weights of a streamed run: from rows of the source to the bytes that are stored.

What is stored has to be the same whether a weight is quantized whole or by rows. Chunks are cut
where the search for scales cuts (its sums then have the same terms), at whole blocks, and at whole
words of packed zero-points; what the whole weight must tell, its range, is found in a pass before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..calib.shards import Shards, TensorSource
from ..kernels.errors import UserError
from ..kernels.finite import all_finite
from .checkpoint.layouts import NATIVE, Layout
from .checkpoint.raw import RawTensor, Slot, read_raw, tensor_bytes
from .fp8_source import FP8Source
from .linear_names import fused_peers
from .linear_plan import Plan, PlannedLinear
from .passes.hqq import hqq_quantize
from .passes.rtn import round_to_nearest, rtn_quantize
from .quantized import Quantized
from .ranges import CHUNK_ELEMENTS as SEARCHED_TOGETHER
from .ranges import QParams, ScaleStore, choose_qparams, scale_store
from .spec import TensorWise

CHUNK_ELEMENTS = 1 << 20  # of a chunk on a CPU: its temporaries stay below malloc's mmap threshold
GPU_CHUNK_ELEMENTS = 1 << 24
ROWS_A_WORD = 32  # packed zero-points of so many rows fill whole words


class Job(NamedTuple):
    """One tensor of the source. slots: where what becomes of it goes. raw: its bytes, where they
    are copied as they are."""

    name: str
    slots: list[Slot]
    raw: RawTensor | None


class Converter:
    """Turns tensors of the source into the bytes that are stored, piece by piece."""

    def __init__(
        self,
        source: TensorSource,
        plan: Plan,
        device: torch.device,
        layout: Layout = NATIVE,
    ) -> None:
        self._source, self._plan, self._device, self._layout = source, plan, device, layout
        self._peers = {n: peers for peers in fused_peers(list(plan.linears)) for n in peers}
        self._peaks: dict[str, tuple[float, float]] = {}
        self._chunk = CHUNK_ELEMENTS if device.type == "cpu" else GPU_CHUNK_ELEMENTS

    def pieces(self, job: Job) -> Iterator[tuple[str, bytes]]:
        """(tensor name, its next bytes) of what is stored for the source's tensor."""
        module = job.name.removesuffix(".weight")
        if job.raw is not None:
            yield from ((job.name, data) for data in read_raw(job.raw))
        elif module in self._plan.linears:
            yield from self._quantized(job, module)
        else:
            columns = math.prod(self._source.info[job.name].shape[1:])
            for part in self._parts(job.name, max(1, self._chunk // columns)):
                yield job.name, tensor_bytes(part)

    def _quantized(self, job: Job, module: str) -> Iterator[tuple[str, bytes]]:
        planned = self._plan.linears[module]
        if not self._layout.by_rows:
            whole = _joined(list(self._quantized_parts(job, module)))
            for name, tensor in self._layout.compress(module, whole, planned.scheme).items():
                yield name, tensor_bytes(tensor)
            return
        heights = {s.name: s.shape[0] for s in job.slots}
        shape_name = f"{module}.weight_shape"
        for number, q in enumerate(self._quantized_parts(job, module)):
            stored = self._layout.compress(module, q, planned.scheme)
            if shape_name in stored:
                stored[shape_name] = torch.tensor(planned.shape, dtype=torch.int64)
            for name, tensor in stored.items():
                grows = tensor.shape[0] < heights[name]  # with the rows
                if grows or number == 0:
                    yield name, tensor_bytes(tensor)

    def _quantized_parts(self, job: Job, module: str) -> Iterator[Quantized]:
        """The quantized weight in chunks of rows."""
        planned, given = self._plan.linears[module], self._given(module)
        dtype = self._layout.scale_dtype(self._source.info[job.name].dtype)
        for part in self._parts(job.name, _chunk_rows(planned, self._chunk)):
            if not all_finite(part):
                raise UserError(
                    f"'{job.name}' holds NaN or infinite values; download the model again"
                )
            yield _quantize(part, planned, dtype, given)

    def _given(self, module: str) -> ScaleStore | QParams | None:
        """What the whole weight decides for each of its chunks."""
        planned = self._plan.linears[module]
        dtype = self._layout.scale_dtype(self._source.info[f"{module}.weight"].dtype)
        spec = planned.scheme.weights
        if spec.scale_dtype == "e4m3":  # one global scale for what engines run as one linear
            peers = self._peers[module]
            alike = [p for p in peers if self._plan.linears[p].scheme == planned.scheme]
            return scale_store(self._ranges(alike), spec, dtype)
        if _range_decides(planned):
            return choose_qparams(self._ranges([module]), spec, dtype)
        return None

    def _ranges(self, modules: list[str]) -> Tensor:
        """float32 [modules, 2]: a matrix of the same range as those of the modules together."""
        return torch.tensor([self._range(module) for module in modules], device=self._device)

    def _range(self, module: str) -> tuple[float, float]:
        """Smallest and largest weight."""
        if module not in self._peaks:
            planned = self._plan.linears[module]
            ends = [
                torch.stack(part.aminmax()).tolist()
                for part in self._parts(f"{module}.weight", _chunk_rows(planned, self._chunk))
            ]
            self._peaks[module] = min(e[0] for e in ends), max(e[1] for e in ends)
        return self._peaks[module]

    def _parts(self, name: str, rows: int) -> Iterator[Tensor]:
        """The tensor in chunks of `rows`."""
        height = self._source.info[name].shape[0]
        for start in range(0, height, rows):
            part = _rows(self._source, name, start, min(start + rows, height))
            yield part.to(self._device)


def _rows(source: TensorSource, name: str, start: int, stop: int) -> Tensor:
    if isinstance(source, Shards | FP8Source):
        return source.get_rows(name, start, stop)
    return source.get(name)[start:stop]  # one of a stack of experts


def _joined(parts: list[Quantized]) -> Quantized:
    """Chunks of rows as the weight that they are of; each row has scales of its own."""
    zeros = [q.zero_point for q in parts if q.zero_point is not None]
    return parts[0]._replace(
        codes=torch.cat([q.codes for q in parts]),
        scale=torch.cat([q.scale for q in parts]),
        zero_point=torch.cat(zeros) if zeros else None,
    )


def _quantize(
    w: Tensor, planned: PlannedLinear, dtype: torch.dtype, given: ScaleStore | QParams | None
) -> Quantized:
    """Rows of a weight by the method of its pass; dtype: the model's."""
    taken_by, spec = planned.taken_by, planned.scheme.weights
    if taken_by.method == "hqq":
        return hqq_quantize(w.float(), spec, dtype, taken_by.hqq)
    if isinstance(given, QParams):
        return round_to_nearest(w.float(), spec, given)
    return rtn_quantize(w.float(), spec, dtype, taken_by.rtn, given)


def _range_decides(planned: PlannedLinear) -> bool:
    """Whether the range of the whole weight gives its one scale."""
    one_scale = isinstance(planned.scheme.weights.granularity, TensorWise)
    return one_scale and planned.taken_by.rtn.scale_search == "minmax"


def _chunk_rows(planned: PlannedLinear, elements: int) -> int:
    """Rows of a chunk of about `elements`. One searched scale takes the whole weight."""
    rows, columns = planned.shape
    spec = planned.scheme.weights
    if isinstance(spec.granularity, TensorWise) and not _range_decides(planned):
        return rows
    tall, wide = spec.block or (1, 1)
    together = SEARCHED_TOGETHER // (tall * -(-columns // wide) * wide)
    unit = math.lcm(tall * max(1, together), 1 if spec.symmetric else ROWS_A_WORD)
    return unit * max(1, elements // (unit * columns))
