"""Decode steps that are replayed: all launches of a step as one CUDA graph.

A decode step of few sequences takes less time on a GPU than Python takes to launch its kernels. A
graph launches them all at once, but only the very ones that were captured, on the same memory. So
there is a graph for each of some sizes of a batch and bounds of its longest context; a step copies
its numbers into the memory that they read, one copy, and the rows that are left over have no key,
are stored nowhere, and change no other row. Kernels that take the longest context as a number of
the host are captured with the bound: more keys than a sequence has are never read.

Sizes are 1, 2, 4, 8, then steps of 8 to 64, of 16 to 256 and of 64 to MAX_SIZE, at most as many
sequences as run at once. Bounds are 2,048 and four times as many again, up to the longest sequence
or MAX_BOUND. Larger batches, prompts and steps that verify proposals run without a graph.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..kernels.attention_ops import PagedBatch
from ..kernels.kv_store_ops import NewTokens
from ..kernels.row_tiles import row_tiles
from .models.decoder import Decoder, KVPools
from .scheduling.config import BLOCK_SIZE
from .scheduling.plan import NO_SLOT
from .step_inputs import Table, fill_table
from .transfers import Layout, Outgoing, Part

FIRST_SIZES = (1, 2, 4)
STEPS = ((64, 8), (256, 16), (512, 64))  # sizes up to the first go by the second
MAX_SIZE = STEPS[-1][0]
FIRST_BOUND, BOUND_FACTOR, MAX_BOUND = 2048, 4, 1 << 17


def decline_graphs(decoder: object, device: torch.device, watched: bool) -> str | None:
    """None, or why steps of a decoder on `device` cannot be replayed. watched: somebody looks at
    attention in every layer."""
    if device.type != "cuda":
        return f"they need a GPU, and the model is on {device}"
    if watched:
        return "kv_eviction looks at attention in every layer"
    if not isinstance(decoder, Decoder):
        return "the model runs by its own module, which may look at the numbers of a step"
    return None


class NotCapturableError(Exception):
    """Why a function cannot be replayed."""


class Recorder(Protocol):
    """What captures and replays; runtime/cuda_recorder.py has the one for CUDA."""

    @property
    def nbytes(self) -> int:
        """Of the device's memory, what all that was captured holds."""
        ...

    def capture(self, fn: Callable[[], object]) -> Callable[[], object]:
        """Run `fn`, and return what does its work on the device again, on the same memory.
        NotCapturableError, with the reason."""
        ...


class DecodeNumbers(NamedTuple):
    """A step of one token for each sequence. token_ids, positions, context_lens: of each. slots,
    tables: for each kind of layers."""

    token_ids: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[Sequence[int]]
    context_lens: Sequence[int]
    tables: Sequence[Table]


class Form(NamedTuple):
    """What a graph is for: sequences, and the most keys that one of them has."""

    size: int
    bound: int


class DecodeGraphs:
    """The graphs of one decoder over `pools`. max_num_seqs: that run at once. max_model_len: keys
    that a sequence has at most. declined: why there are no more graphs, None where nothing failed.
    """

    def __init__(
        self,
        decoder: Decoder,
        pools: Sequence[KVPools],
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        recorder: Recorder,
        batch_invariant: bool = False,
    ) -> None:
        self._decoder, self._pools, self._device = decoder, pools, device
        self._recorder, self._batch_invariant = recorder, batch_invariant
        self.sizes, self.bounds = sizes(max_num_seqs), bounds(max_model_len)
        self.declined: str | None = None
        self.seconds = 0.0
        self._replays: dict[Form, Callable[[], object]] = {}
        largest = self._layout(Form(self.sizes[-1], self.bounds[-1]))
        self._memory = torch.zeros(largest.nbytes, dtype=torch.uint8, device=device)
        self._starts = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=device)
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def capture(self, use_tqdm: bool = True) -> None:
        """Capture all graphs, from the largest down, so that those to come fit into the memory that
        the ones before have left. Where one cannot be, no further one is."""
        started = time.perf_counter()
        forms = [Form(n, b) for b, n in itertools.product(self.bounds[::-1], self.sizes[::-1])]
        for form in tqdm(forms, desc="CUDA graphs", delay=2, disable=not use_tqdm):
            self._outgoing(form, DecodeNumbers((), (), [()] * self._kinds, (), [()] * self._kinds))
            try:
                if self._logits is None:
                    self._logits = torch.empty_like(self._compute(form))
                self._replays[form] = self._recorder.capture(lambda form=form: self._run(form))
            except NotCapturableError as e:
                self.declined = str(e)
                break
        self.seconds = time.perf_counter() - started

    def form(self, seqs: int, longest: int) -> Form | None:
        """The graph for so many sequences, the longest of which has so many keys; None: there is
        none."""
        size = next((n for n in self.sizes if n >= seqs), None)
        bound = next((b for b in self.bounds if b >= longest), None)
        if size is None or bound is None or Form(size, bound) not in self._replays:
            return None
        return Form(size, bound)

    def logits(
        self, form: Form, numbers: DecodeNumbers, change: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """[sequences, vocabulary] after the tokens of a step, good until the next one. change: of
        token ids int64 [size] on the device, what they are to be in their place."""
        assert self._logits is not None
        ids = self._outgoing(form, numbers)
        if change is not None:
            ids.copy_(change(ids))
        self._replays[form]()
        return self._logits[: len(numbers.context_lens)]

    def describe(self) -> str:
        """What was captured, and what it takes, in words."""
        if not self._replays:
            return f"no CUDA graphs: {self.declined}"
        largest = max(self._replays)
        held = self._recorder.nbytes + self.nbytes
        told = (
            f"{len(self._replays)} CUDA graphs of up to {largest.size} sequences of up to "
            f"{self.bounds[-1]:,} keys, {held / 1e6:.0f} MB, in {self.seconds:.1f} s"
        )
        return told if self.declined is None else f"{told}; no more: {self.declined}"

    @property
    def nbytes(self) -> int:
        """Of the memory that graphs read and write, without what is theirs alone."""
        kept = [self._memory, self._starts] + ([] if self._logits is None else [self._logits])
        return sum(tensor.nbytes for tensor in kept)

    @property
    def _kinds(self) -> int:
        return len(self._decoder.windows)

    def _layout(self, form: Form) -> Layout:
        """Token ids, positions, and of each kind slots; context lengths; of each kind tables."""
        size, bound = form
        return Layout([
            *[Part((size,), torch.int64)] * (2 + self._kinds),
            Part((size,), torch.int32),
            *[Part((size, -(-bound // BLOCK_SIZE)), torch.int32)] * self._kinds,
        ])  # fmt: skip

    def _outgoing(self, form: Form, numbers: DecodeNumbers) -> Tensor:
        """Put a step's numbers where the graph reads them; the token ids there."""
        out = Outgoing(self._layout(form), self._device)
        count = len(numbers.context_lens)
        arrays = iter(out.arrays)
        for values in (numbers.token_ids, numbers.positions):
            _fill(next(arrays), values, count, 0)
        for values in numbers.slots:
            _fill(next(arrays), values, count, NO_SLOT)
        _fill(next(arrays), numbers.context_lens, count, 0)
        for rows in numbers.tables:
            fill_table(next(arrays), rows)
        return out.send(self._memory)[0]

    def _run(self, form: Form) -> None:
        assert self._logits is not None
        self._logits[: form.size] = self._compute(form)

    def _compute(self, form: Form) -> Tensor:
        """Logits [size, vocabulary] of what lies in the memory."""
        ids, positions, *others = self._layout(form).views(self._memory)
        slots, lens, tables = (
            others[: self._kinds], others[self._kinds], others[self._kinds + 1 :],
        )  # fmt: skip
        starts = self._starts[: form.size + 1]
        batches = [
            PagedBatch(table, lens, starts, 1, form.bound, batch_invariant=self._batch_invariant)
            for table in tables
        ]
        with row_tiles(self._batch_invariant):
            new = [NewTokens(positions, of) for of in slots]
            hidden = self._decoder(ids, self._pools, batches, new)
            return self._decoder.logits(hidden)


def _fill(out: np.ndarray, values: Sequence[int], count: int, rest: int) -> None:
    """`count` values, then `rest` to the end."""
    out[:count] = values
    out[count:] = rest


def sizes(most: int) -> list[int]:
    """Of batches of up to `most` sequences, rising; the largest is that, or MAX_SIZE."""
    most = min(most, MAX_SIZE)
    listed, size = [n for n in FIRST_SIZES if n < most], 0
    for end, step in STEPS:
        while size < end:
            size += step
            if size < most:
                listed.append(size)
    return [*listed, most]


def bounds(most: int) -> list[int]:
    """Of contexts of up to `most` keys, rising; the largest is that, or MAX_BOUND."""
    most, listed, bound = min(most, MAX_BOUND), list[int](), FIRST_BOUND
    while bound < most:
        listed.append(bound)
        bound *= BOUND_FACTOR
    return [*listed, most]
