"""Long contexts in few blocks: which keys and values a sequence lets go of when it has too many.

Three ways to choose, all over whole blocks, the same ones in every layer, since layers share block
tables. Keys stay at the positions at which they were computed.

- window: the first blocks and the newest (Xiao et al. 2023, arXiv:2309.17453, StreamingLLM).
- h2o: beside these, the blocks that have been attended to most so far (Zhang et al. 2023,
  arXiv:2306.14048); half of the budget are the newest.
- snapkv: once, when the prompt has been computed: beside the first and the newest, the blocks that
  the prompt's last tokens attend to (Li et al. 2024, arXiv:2404.14469). What is generated is kept.

The papers choose for each head or layer apart; here attention is summed over both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..kernels.attention_ops import AttentionOptions, PagedBatch
from ..kernels.errors import UserError
from ..kernels.kv_quant import rotate_heads
from ..kernels.paged_kv import BlockPool, gather_blocks
from .attending import WatchedBatch
from .scheduling.block_allocator import NULL_BLOCK
from .scheduling.block_table import BlockTable
from .scheduling.config import BLOCK_SIZE
from .scheduling.plan import SequenceRun, StepPlan
from .scheduling.scheduler import Scheduler

Method = Literal["window", "h2o", "snapkv"]
SINKS = 1  # blocks at the front that are always kept
OBSERVED = 32  # last tokens of a prompt whose attention snapkv looks at
LEAST = 4  # blocks of a budget
QUERIES_AT_ONCE = 256


class Eviction(NamedTuple):
    """method: how to choose. blocks: that a sequence keeps, in layers that see all keys."""

    method: Method
    blocks: int

    @classmethod
    def of(cls, method: str | None, tokens: int | None) -> Eviction | None:
        """From what the user asks for; UserError where that is nothing."""
        if method is None and tokens is None:
            return None
        known: Method | None = next((m for m in get_args(Method) if m == method), None)
        if known is None:
            raise UserError(
                f"kv_eviction must be one of {', '.join(get_args(Method))}, got {method!r}"
            )
        if tokens is None or tokens < LEAST * BLOCK_SIZE:
            raise UserError(
                f"kv_budget must be at least {LEAST * BLOCK_SIZE} tokens with "
                f"kv_eviction='{method}', got {tokens}"
            )
        return cls(known, tokens // BLOCK_SIZE)

    @property
    def bound(self) -> int | None:
        """Tokens that a sequence keeps at most after each step; None: there is no such bound."""
        return None if self.method == "snapkv" else self.blocks * BLOCK_SIZE

    @property
    def newest(self) -> int:
        """Blocks at the end that are kept whatever is attended to."""
        if self.method == "window":
            return self.blocks - SINKS
        return self.blocks // 2 if self.method == "h2o" else -(-OBSERVED // BLOCK_SIZE) + 1

    def outdone(self, held: Sequence[int], heat: Sequence[float]) -> list[int]:
        """Which of the entries `held` of a table, rising, are let go of. heat: of each entry of the
        table, how much it was attended to."""
        middle = list(held[SINKS : len(held) - self.newest])
        keep = self.blocks - SINKS - self.newest
        coldest_last = sorted(middle, key=lambda entry: (-heat[entry], -entry))
        return sorted(coldest_last[keep:])


class Evictor:
    """Carries `eviction` out for the layers of the kinds that see all keys. `watch` before a step
    runs, `evict` when its results are told."""

    def __init__(self, eviction: Eviction, scheduler: Scheduler) -> None:
        self.eviction, self._scheduler = eviction, scheduler
        windows = scheduler.blocks.windows
        self._kind = windows.index(None) if None in windows else None
        self._heat: dict[int, Tensor] = {}  # of each run that is watched, by its number

    def watch(self, plan: StepPlan, batches: list[PagedBatch]) -> list[PagedBatch]:
        """The batches of the kinds, one of them watched where that is needed."""
        self._heat = {}
        if self._kind is None or self.eviction.method == "window":
            return batches
        watched = [
            (number, run) for number, run in enumerate(plan.runs)
            if self.eviction.method == "h2o" or _ends_prompt(run)
        ]  # fmt: skip
        if not watched:
            return batches
        batch = batches[self._kind]
        starts, lengths = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist()
        last = OBSERVED if self.eviction.method == "snapkv" else None

        def watch(q: Tensor, keys: BlockPool, lse: Tensor, options: AttentionOptions) -> None:
            for number, _ in watched:
                begin, end, length = starts[number], starts[number + 1], lengths[number]
                begin = begin if last is None else max(begin, end - last)
                table = batch.block_tables[number, : -(-length // keys.block_size)]
                heat = block_heat(q[begin:end], keys, table, length, lse[begin:end], options)
                known = self._heat.get(number)
                self._heat[number] = heat if known is None else known + heat

        of_kind = WatchedBatch(
            batch.block_tables, batch.context_lens, batch.cu_seqlens_q, batch.max_query_len,
            batch.max_context_len, watch,
        )  # fmt: skip
        return [of_kind if k == self._kind else other for k, other in enumerate(batches)]

    def evict(self, plan: StepPlan) -> None:
        """Let sequences go of what they have too much of."""
        if self._kind is None:
            return
        for number, run in enumerate(plan.runs):
            request = run.sequence.request
            if request.is_over or run.sequence.epoch != run.epoch:
                continue
            due = self.eviction.method != "snapkv" or _ends_prompt(run)
            more = self._heat[number].tolist() if number in self._heat else []
            parted = run.num_draws > 1  # into continuations that have the same blocks
            for sequence in request.sequences if parted else [run.sequence]:
                if sequence.finish_reason is None:
                    self._evict(sequence.table, self._kind, more, due)

    def _evict(self, table: BlockTable, kind: int, more: list[float], due: bool) -> None:
        blocks, heat = table.blocks[kind], table.heat
        held = [entry for entry, block in enumerate(blocks) if block != NULL_BLOCK]
        heat.extend([0.0] * (len(blocks) - len(heat)))
        for entry, attention in zip(held, more, strict=False):
            heat[entry] += attention
        if due and len(held) > self.eviction.blocks:
            self._scheduler.blocks.evict(table, kind, self.eviction.outdone(held, heat))


def _ends_prompt(run: SequenceRun) -> bool:
    return run.start < run.sequence.num_prompt_tokens <= run.end


def block_heat(
    q: Tensor, keys: BlockPool, table: Tensor, length: int, lse: Tensor, options: AttentionOptions
) -> Tensor:
    """float32 [blocks]: the attention of the newest tokens q [n, heads, head_dim] of a sequence to
    each block of its table (int32 [blocks], `length` keys), summed over them and over heads. lse:
    [n, heads], as attention gave it."""
    if options.rotated_queries and keys.fmt is not None and keys.fmt.rotate:
        q = rotate_heads(q.float())  # gathered keys are turned back
    k = gather_blocks(keys, table[None], torch.float32)[0]
    n, heads, size = len(q), q.shape[1], keys.block_size
    sums = torch.zeros(k.shape[1], device=q.device)
    places = torch.arange(k.shape[1], device=q.device)
    for begin in range(0, n, QUERIES_AT_ONCE):
        part = slice(begin, begin + QUERIES_AT_ONCE)
        rows = q[part].float().unflatten(1, (len(k), heads // len(k))).permute(1, 2, 0, 3)
        logits = (rows @ k.unsqueeze(1).mT).flatten(0, 1).mul_(options.scale)  # [heads, rows, keys]
        if options.softcap is not None:
            logits = torch.tanh(logits / options.softcap) * options.softcap
        position = torch.arange(length - n + begin, length - n + begin + logits.shape[1])
        unseen = places > position.to(q.device)[:, None]
        weights = torch.exp(logits - lse[part].T.unsqueeze(-1)).masked_fill_(unseen, 0)
        sums += weights.sum(dim=(0, 1))
    return sums.view(-1, size).sum(1)
