"""What one step of the engine is to the model: the numbers of a plan as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.attention_ops import PagedBatch
from ..kernels.kv_store_ops import NewTokens
from .scheduling.config import BLOCK_SIZE
from .transfers import Layout, Outgoing, Part

Table = Sequence[Sequence[int]]


class StepInputs(NamedTuple):
    """token_ids: int64 [tokens], of one sequence after another. batches, new: one for each kind of
    layers. rows: int64, as they were given."""

    token_ids: Tensor
    batches: list[PagedBatch]
    new: list[NewTokens]
    rows: Tensor | None = None


def step_inputs(
    token_ids: Sequence[int],
    positions: Sequence[int],
    slots: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    tables: Iterable[Table],
    device: torch.device,
    evicted: Sequence[Sequence[int]] = (),
    batch_invariant: bool = False,
    rows: Sequence[int] | None = None,
) -> StepInputs:
    """The tensors of a step. query_lens, context_lens: tokens of each sequence that run, and those
    with them that it has by then. slots, tables: for each kind of layers, where each token goes,
    and the blocks of each sequence. evicted: for each kind, blocks of each sequence that it has let
    go of, which are 0 in its table; () where there are none. batch_invariant: see PagedBatch. rows:
    tokens whose hidden states are wanted, where that is not all of them.

    Arrays and lists alike. All are copied to the device at once, and nothing waits for it.
    """
    tokens, seqs = len(token_ids), len(query_lens)
    held, lengths = _held(list(tables), context_lens, evicted)
    parts = [Part((tokens,), torch.int64)] * (2 + len(slots))
    if rows is not None:
        parts.append(Part((len(rows),), torch.int64))
    parts += [Part((seqs + 1,), torch.int32)]
    parts += [Part((seqs,), torch.int32)] * len(lengths)
    parts += [Part((seqs, max(map(len, of))), torch.int32) for of in held]
    out = Outgoing(Layout(parts), device)
    arrays = iter(out.arrays)
    for values in (token_ids, positions, *slots, *(() if rows is None else (rows,))):
        next(arrays)[:] = values
    starts = next(arrays)
    starts[0] = 0
    np.cumsum(query_lens, out=starts[1:])
    for values in lengths:
        next(arrays)[:] = values
    for of in held:
        fill_table(next(arrays), of)
    sent = iter(out.send())
    ids, at = next(sent), next(sent)
    places = [next(sent) for _ in slots]
    wanted = None if rows is None else next(sent)
    cu_seqlens_q = next(sent)
    lens = [next(sent) for _ in lengths]
    longest, most = max(query_lens), max(context_lens)
    batches = [
        PagedBatch(
            table, lens[kind if len(lens) > 1 else 0], cu_seqlens_q, longest, most,
            batch_invariant=batch_invariant,
        )
        for kind, table in enumerate(sent)
    ]  # fmt: skip
    return StepInputs(ids, batches, [NewTokens(at, slot) for slot in places], wanted)


def fill_table(table: np.ndarray, rows: Table) -> None:
    """The blocks of each sequence into int32 [sequences at least, most blocks], and block 0 into
    what is left."""
    table[:] = 0
    for out, row in zip(table, rows, strict=False):
        out[: len(row)] = row


def _held(
    tables: list[Table], context_lens: Sequence[int], evicted: Sequence[Sequence[int]]
) -> tuple[list[Table], list[Sequence[int]]]:
    """The tables without what was let go of, and the lengths that are left: of each kind, or of all
    kinds at once."""
    if not any(any(gone) for gone in evicted):
        return tables, [context_lens]
    held: list[Table] = []
    lengths: list[Sequence[int]] = []
    for rows, gone in zip(tables, evicted, strict=True):
        held.append([[b for b in r if b] if g else r for r, g in zip(rows, gone, strict=True)])
        lengths.append([n - g * BLOCK_SIZE for n, g in zip(context_lens, gone, strict=True)])
    return held, lengths
