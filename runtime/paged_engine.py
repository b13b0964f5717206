"""The engine over paged keys and values: continuous batching, chunked prefill, prefix sharing.

The scheduler plans a step (runtime/scheduling), the decoder runs it, the sampler picks, and the
scheduler hears what came of it. A request joins as soon as there is room, and leaves when it ends.
What requests have in common is computed once, also from one call of `run` to the next.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.errors import UserError
from ..quantize.checkpoint.kv_config import KVStorage
from ..quantize.planning.machine import available_bytes
from .engine import EngineStats, fail_not_finite
from .kv_pools import copy_blocks, decline_paged, layer_pools, wipe_blocks
from .loader import LoadedModel
from .metrics import EngineMetrics
from .models.decoder import Decoder, KVPools
from .models.families import decline_decoder
from .request import Continuation, Request
from .sampling.beams import BeamRequest
from .sampling.logprobs import add_prompt_logprobs
from .sampling.picker import NOT_FINITE, Rows, pick
from .scheduling.block_allocator import NULL_BLOCK
from .scheduling.config import KVKind, SchedulerConfig
from .scheduling.plan import SequenceRun, StepPlan
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import RequestState, Sequence
from .scheduling.stats import SchedulerStats
from .step_inputs import step_inputs

BLOCK_SIZE = 16
MEMORY_SHARE = 0.25  # of the free memory that the pools may grow to where nothing is said
HEAD_ROWS = 256  # of a prompt's hidden states whose logits are in memory at once


class EngineLimits(NamedTuple):
    """max_num_seqs: that run at once. max_num_batched_tokens: of a step. max_model_len: prompt and
    output together. kv_memory: bytes of all pools; None: a quarter of the free memory, or as much
    as `max_num_seqs` requests of the longest kind fill."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_memory: int | None = None
    prefix_cache: bool = True


class _Live(NamedTuple):
    """A request that is not over: what was asked, and what the scheduler knows of it."""

    request: Request | BeamRequest
    state: RequestState


def decline_engine(loaded: LoadedModel, kv: KVStorage | None) -> str | None:
    """None, or why the paged engine cannot run a model with such a cache."""
    return decline_decoder(loaded.model.config) or decline_paged(kv)


class PagedEngine:
    """Runs requests on a loaded model. kv: how the cache is quantized (None: not at all).

    UserError where not even one request of `max_model_len` tokens fits into the memory.
    """

    def __init__(self, loaded: LoadedModel, limits: EngineLimits, kv: KVStorage | None) -> None:
        self.loaded, self.kv, self.limits = loaded, kv, limits
        self.stats = EngineStats()
        self._decoder = Decoder(loaded.model, limits.max_model_len)
        blocks = self._num_blocks()
        self._pools = [
            self._layer_pools(index, blocks + 1) for index in range(len(self._decoder.layers))
        ]
        self._scheduler = Scheduler(
            SchedulerConfig(
                tuple(KVKind(blocks, window) for window in self._decoder.windows),
                BLOCK_SIZE,
                limits.max_num_seqs,
                max(limits.max_num_batched_tokens, limits.max_num_seqs),
                prefix_cache=limits.prefix_cache,
            )
        )
        self._live: dict[str, _Live] = {}
        self._rows: Rows | None = None

    @property
    def scheduler_stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    @property
    def kv_bytes(self) -> int:
        """Of all pools."""
        return sum(pool.nbytes for pools in self._pools for pool in pools)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def metrics(self) -> EngineMetrics:
        told = self._scheduler.stats()
        return EngineMetrics(
            running=told.running,
            waiting=told.waiting,
            kv_usage=told.kv.blocks_in_use / told.kv.blocks,
            hit_rate=told.hit_rate,
            prefill_tokens=self.stats.prefill_tokens,
            output_tokens=told.tokens.output,
            tokens_per_second=self.stats.tokens_per_second,
            preemptions=told.preemptions,
            acceptance_rate=told.acceptance_rate,
        )

    def add(self, request: Request | BeamRequest) -> None:
        """Let `request` wait for its turn. UserError where it could never run to its end."""
        state = RequestState(
            request.request_id, request.prompt_token_ids, request.max_tokens,
            n=len(request.continuations), lockstep=isinstance(request, BeamRequest),
            reuse_prefix=request.prompt_logprobs is None,
        )  # fmt: skip
        self._scheduler.add(state)
        self._live[request.request_id] = _Live(request, state)

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free in the next step. Nothing if it is over."""
        if live := self._live.pop(request_id, None):
            live.request.end("abort")
            self._scheduler.cancel(request_id)

    def step(self) -> list[Request | BeamRequest]:
        """Plan and run one step; the requests that something has come of."""
        started = time.perf_counter()
        plan = self._scheduler.plan()
        if not plan.runs:
            return []
        lives = [self._live[run.sequence.request.request_id] for run in plan.runs]
        asked = [(run, live) for run, live in zip(plan.runs, lives, strict=True) if run.num_logits]
        logits = self._logits(plan, lives)  # keys and values are stored even where nobody asks
        if asked:
            self._advance(plan, asked, logits)
        self._count(plan, lives, started, time.perf_counter() - started)
        stepped = {id(live.request): live.request for _, live in asked}
        for request in stepped.values():
            if request.finished:
                self._live.pop(request.request_id, None)
        if not self._live:
            self._scheduler.roster.free_leaving()
        return list(stepped.values())

    @torch.inference_mode()
    def _logits(self, plan: StepPlan, lives: list[_Live]) -> Tensor:
        """[asked, vocabulary] after the last token of each run that is asked for one. Those of
        prompts are told to their requests where they want to know them."""
        copy_blocks(self._pools, self._decoder.kinds, plan.copies)
        tables = zip(*(run.block_tables for run in plan.runs), strict=True)
        query_lens = [run.end - run.start for run in plan.runs]
        step = step_inputs(
            plan.token_ids, plan.positions, plan.slots, query_lens,
            [run.end for run in plan.runs], tables, self.loaded.device,
        )  # fmt: skip
        ends = list(itertools.accumulate(query_lens))
        rows = [end - 1 for end, run in zip(ends, plan.runs, strict=True) if run.num_logits]
        asked = len(rows)
        told = [
            (live.request, run, end)
            for run, live, end in zip(plan.runs, lives, ends, strict=True)
            if isinstance(live.request, Request) and live.request.prompt_logprobs is not None
        ]
        rows += [row for _, run, end in told for row in range(end - run.end + run.start, end)]
        at = torch.tensor(rows, dtype=torch.int64, device=self.loaded.device)
        hidden = self._decoder(step.token_ids, self._pools, step.batches, step.new, at)
        begin = asked
        for request, run, _ in told:
            for start in range(run.start, run.end, HEAD_ROWS):
                end = begin + min(HEAD_ROWS, run.end - start)
                add_prompt_logprobs(request, start, self._decoder.logits(hidden[begin:end]))
                begin = end
        return self._decoder.logits(hidden[:asked])

    def _advance(
        self, plan: StepPlan, asked: list[tuple[SequenceRun, _Live]], logits: Tensor
    ) -> None:
        """Draw, and tell the scheduler and the requests what came of it."""
        draws = _draws(asked)
        rows = [row for row, _ in draws]
        continuations = [continuation for _, continuation in draws]
        of_beams = [(run, live, row) for row, (run, live) in enumerate(asked)
                    if isinstance(live.request, BeamRequest)]  # fmt: skip
        if self._rows is None or self._rows.continuations != continuations:
            self._rows = Rows(continuations, logits.shape[1], logits.device)
        drawn_from = logits if rows == list(range(len(logits))) else logits[rows]
        tokens, told = pick(drawn_from, self._rows) if draws else ([], [])
        new: dict[int, list[int]] = {}  # of each row
        broken: list[_Live] = []
        for row, token in zip(rows, tokens, strict=True):
            new.setdefault(row, []).append(token)
            if token == NOT_FINITE:
                broken.append(asked[row][1])
        choices = self._choose(of_beams, logits, broken)
        self._fail(broken)
        by_run = {id(run): new.get(row, []) for row, (run, _) in enumerate(asked)}
        self._scheduler.update(plan, [by_run.get(id(run), []) for run in plan.runs])
        for state, chosen in choices:
            self._scheduler.advance_beams(state, chosen)
        for row, continuation, token, entry in zip(rows, continuations, tokens, told, strict=True):
            if continuation.finish_reason is not None:
                continue  # its request has failed
            continuation.append(token, entry)
            self.stats.output_tokens += 1
            sequence = asked[row][1].state.sequences[continuation.index]
            if continuation.finish_reason and sequence.finish_reason is None:
                self._scheduler.finish(sequence, "stop")

    def _choose(
        self, of_beams: list[tuple[SequenceRun, _Live, int]], logits: Tensor, broken: list[_Live]
    ) -> list[tuple[RequestState, list[tuple[Sequence, int]]]]:
        """How the beams of each request go on; those whose logits are not finite are `broken`."""
        rows_of: dict[int, dict[Sequence, int]] = {}
        lives: dict[int, _Live] = {}
        for run, live, row in of_beams:
            lives[id(live.state)] = live
            rows_of.setdefault(id(live.state), {})[run.sequence] = row
        choices = []
        for key, live in lives.items():
            assert isinstance(live.request, BeamRequest)
            beams = live.state.sequences
            own = logits[[rows_of[key][beam] for beam in beams]]
            chosen = live.request.choose(own)
            if chosen is None:
                broken.append(live)
            else:
                choices.append((live.state, [(beams[parent], token) for parent, token in chosen]))
        return choices

    def _fail(self, broken: list[_Live]) -> None:
        """End requests whose logits are not finite, and wipe what they alone have stored: a key or
        value that is masked must not be NaN."""
        failed = {live.request.request_id: live for live in broken}
        held: list[Counter[int]] = [Counter() for _ in self._decoder.windows]
        for name, live in failed.items():
            fail_not_finite(live.request, self.loaded.dtype)
            self._scheduler.fail(name)
            for sequence in live.state.sequences:
                for counter, blocks in zip(held, sequence.table.blocks, strict=True):
                    counter.update(blocks)
        for kind, counter in enumerate(held):
            allocator = self._scheduler.blocks.allocators[kind]
            del counter[NULL_BLOCK]
            refs, nodes = allocator.refs, allocator.nodes
            own = [b for b, count in counter.items() if refs[b] == count and nodes[b] is None]
            if own:
                wipe_blocks(self._pools, self._decoder.kinds, kind, own)

    def _count(self, plan: StepPlan, lives: list[_Live], started: float, seconds: float) -> None:
        """Share the step's seconds out: what prompts took by their tokens, the rest is decoding."""
        each = seconds / len(plan.token_ids)
        counted: dict[int, tuple[_Live, bool]] = {}
        for run, live in zip(plan.runs, lives, strict=True):
            tokens = run.end - run.start
            decodes = run.start >= len(live.request.prompt_token_ids)
            counted[id(live.state)] = live, decodes
            if decodes:
                self.stats.decode_tokens += tokens
                self.stats.decode_seconds += each * tokens
            else:
                self.stats.prefill_tokens += tokens
                self.stats.prefill_seconds += each * tokens
        for (request, state), decodes in counted.values():
            request.started = request.started or started
            request.num_cached_tokens = state.num_cached_tokens
            request.num_preemptions = state.num_preemptions
            if decodes:
                request.decode_seconds += seconds
            else:
                request.prefill_seconds += seconds

    def _layer_pools(
        self, index: int, blocks: int, device: torch.device | str | None = None
    ) -> KVPools:
        layer, where = self._decoder.layers[index], device or self.loaded.device
        return layer_pools(index, layer, blocks, BLOCK_SIZE, self.kv, self.loaded.dtype, where)

    def _num_blocks(self) -> int:
        """Blocks of each pool that hold tokens."""
        layers = range(len(self._decoder.layers))
        a_block = sum(p.nbytes for i in layers for p in self._layer_pools(i, 1, "meta"))
        longest = -(-self.limits.max_model_len // BLOCK_SIZE)
        memory = self.limits.kv_memory
        if memory is None:
            memory = int(_free_memory(self.loaded.device) * MEMORY_SHARE)
            memory = min(memory, (longest * self.limits.max_num_seqs + 1) * a_block)
        blocks = memory // a_block - 1  # one is nobody's
        if blocks < 1:
            raise UserError(
                f"the memory for keys and values, {memory:,} bytes, holds no more than one block "
                f"of {BLOCK_SIZE} tokens, which takes {a_block:,}: give it more"
            )
        return blocks


def _draws(asked: list[tuple[SequenceRun, _Live]]) -> list[tuple[int, Continuation]]:
    """Of each row of logits, the continuations that draw from it; beams do not draw."""
    draws: list[tuple[int, Continuation]] = []
    for row, (run, (request, state)) in enumerate(asked):
        if isinstance(request, BeamRequest):
            continue
        if run.num_draws > 1:
            draws += [(row, continuation) for continuation in request.continuations]
        else:
            draws.append((row, request.continuations[state.sequences.index(run.sequence)]))
    return draws


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes() or (1 << 30)
