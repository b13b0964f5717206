"""What one step of the engine is to the model: the numbers of a plan as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.attention_ops import PagedBatch
from ..kernels.kv_store_ops import NewTokens
from .scheduling.config import BLOCK_SIZE


class StepInputs(NamedTuple):
    """token_ids: int64 [tokens], of one sequence after another. batches, new: one for each kind of
    layers."""

    token_ids: Tensor
    batches: list[PagedBatch]
    new: list[NewTokens]


def step_inputs(
    token_ids: Sequence[int],
    positions: Sequence[int],
    slots: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    tables: Iterable[Sequence[Sequence[int]]],
    device: torch.device,
    evicted: Sequence[Sequence[int]] = (),
    batch_invariant: bool = False,
) -> StepInputs:
    """The tensors of a step. query_lens, context_lens: tokens of each sequence that run, and those
    with them that it has by then. slots, tables: for each kind of layers, where each token goes,
    and the blocks of each sequence. evicted: for each kind, blocks of each sequence that it has let
    go of, which are 0 in its table; () where there are none. batch_invariant: see PagedBatch.

    Arrays and lists alike. Each is copied to the device once, nothing waits for it.
    """

    def moved(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    lengths = moved(context_lens, torch.int32)
    starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(query_lens).cumsum(0)
    starts = starts.to(device, non_blocking=True)
    longest, most = max(query_lens), max(context_lens)
    at = moved(positions)
    batches = []
    for kind, rows in enumerate(tables):
        lens = lengths
        if evicted and any(evicted[kind]):
            rows = [
                [b for b in r if b] if gone else r
                for r, gone in zip(rows, evicted[kind], strict=True)
            ]
            gone = moved(evicted[kind], torch.int32)
            lens = lengths - gone * BLOCK_SIZE
        table = _table(rows).to(device, non_blocking=True)
        batches.append(
            PagedBatch(table, lens, starts, longest, most, batch_invariant=batch_invariant)
        )
    return StepInputs(moved(token_ids), batches, [NewTokens(at, moved(s)) for s in slots])


def _table(rows: Sequence[Sequence[int]]) -> Tensor:
    """int32 [sequences, most blocks], filled up with block 0."""
    table = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
    for out, row in zip(table, rows, strict=True):
        out[: len(row)] = torch.tensor(row, dtype=torch.int32)
    return table
