"""What one step of the engine is to the model: lists of the scheduler's plan as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.attention_ops import PagedBatch
from ..kernels.kv_store_ops import NewTokens


class Chunk(NamedTuple):
    """Tokens of one sequence that a step computes: `token_ids` follow `start` tokens whose keys and
    values are in the blocks of `block_table` already, where there is room for theirs, too."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]


class StepInputs(NamedTuple):
    """token_ids: int64 [tokens], chunk after chunk. last_rows: int64 [chunks], of each its last."""

    token_ids: Tensor
    batch: PagedBatch
    new: NewTokens
    last_rows: Tensor


def step_inputs(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> StepInputs:
    """The tensors of `chunks`, none of them empty.

    Made on the host and handed over at once: one copy to the device for each, no synchronization.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends, lengths = [0], []
    width = max(len(c.block_table) for c in chunks)
    tables = torch.zeros(len(chunks), width, dtype=torch.int32)
    for row, chunk in enumerate(chunks):
        assert chunk.token_ids, "a chunk has tokens"
        end = chunk.start + len(chunk.token_ids)
        assert end <= len(chunk.block_table) * block_size, "a chunk's tokens have slots"
        token_ids += chunk.token_ids
        positions += range(chunk.start, end)
        slots += (
            chunk.block_table[at // block_size] * block_size + at % block_size
            for at in range(chunk.start, end)
        )
        ends.append(len(token_ids))
        lengths.append(end)
        tables[row, : len(chunk.block_table)] = torch.tensor(chunk.block_table, dtype=torch.int32)

    def moved(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    batch = PagedBatch(
        tables.to(device, non_blocking=True),
        moved(lengths, torch.int32),
        moved(ends, torch.int32),
        max(len(c.token_ids) for c in chunks),
        max(lengths),
    )
    new = NewTokens(moved(positions), moved(slots))
    return StepInputs(moved(token_ids), batch, new, moved([end - 1 for end in ends[1:]]))
