"""The engine over paged keys and values: continuous batching, chunked prefill, prefix sharing.

The scheduler plans a step (runtime/scheduling), the decoder runs it, the sampler picks, and the
scheduler hears what came of it. A request joins as soon as there is room, and leaves when it ends.
What requests have in common is computed once, also from one call of `run` to the next.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from ..quantize.checkpoint.kv_config import KVStorage
from .cuda_recorder import cuda_graphs
from .engine import EngineStats
from .eviction import Eviction, Evictor
from .flight import Flight, can_wait, is_over, may_plan_ahead
from .graphs import DecodeGraphs, decline_graphs
from .invariance import check_invariance
from .kv_pools import PagedKV, blocks_in, decline_paged, host_blocks_in
from .loader import LoadedModel
from .metrics import EngineMetrics
from .models.choice import decline_model, make_decoder
from .models.decoder import Decoder
from .request import Request
from .sampling.beams import BeamRequest
from .scheduling.config import BLOCK_SIZE, Batching, KVKind, Policy, SchedulerConfig
from .scheduling.plan import StepPlan
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import RequestState
from .scheduling.stats import SchedulerStats
from .speculation.draft_model import DraftModel
from .speculation.proposer import Proposer
from .speculation.speculator import Speculator
from .step_results import Live, StepResults, asked_of
from .step_runner import StepRunner


class EngineLimits(NamedTuple):
    """max_num_seqs: that run at once. max_num_batched_tokens: of a step. max_model_len: prompt and
    output together. kv_memory: bytes of all pools; None: a quarter of the free memory, or as much
    as `max_num_seqs` requests of the longest kind fill. batching: see SchedulerConfig. proposer: of
    tokens to verify, see runtime/speculation. swap_memory: bytes of host memory for blocks of
    requests that have to give up theirs; 0: they are computed again. eviction: of keys and
    values that a sequence has too many of. policy: see SchedulerConfig. cuda_graphs: replay steps
    that decode, see runtime/graphs.py. async_scheduling: plan a step before the tokens of the one
    before are read, see runtime/flight.py; not with a proposer or eviction."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_memory: int | None = None
    prefix_cache: bool = True
    batching: Batching = "continuous"
    proposer: Proposer | None = None
    swap_memory: int = 0
    eviction: Eviction | None = None
    policy: Policy = "fcfs"
    cuda_graphs: bool = False
    async_scheduling: bool = False


def decline_engine(loaded: LoadedModel, kv: KVStorage | None) -> str | None:
    """None, or why the paged engine cannot run a model with such a cache."""
    return decline_paged(kv) or decline_model(loaded.model)


class PagedEngine:
    """Runs requests on a loaded model. kv: how the cache is quantized (None: not at all).

    UserError where not even one request of `max_model_len` tokens fits into the memory.
    """

    def __init__(self, loaded: LoadedModel, limits: EngineLimits, kv: KVStorage | None) -> None:
        self.loaded, self.kv, self.limits = loaded, kv, limits
        self.stats = EngineStats()
        invariant = loaded.batch_invariant
        self._decoder = make_decoder(loaded.model, limits.max_model_len, invariant)
        if invariant:
            check_invariance(self._decoder, loaded, kv)
        decoder, proposer = self._decoder, limits.proposer
        self._speculator = None if proposer is None else Speculator(proposer)
        self._kv = PagedKV(decoder.layers, decoder.kinds, kv, loaded.dtype, loaded.device)
        blocks, host_blocks = self._allocate(proposer)
        self._decoder.prepare(self._kv.pools)
        budget = limits.eviction.bound if limits.eviction else None
        self._scheduler = Scheduler(
            SchedulerConfig(
                tuple(
                    KVKind(blocks, window, host_blocks, budget if window is None else None)
                    for window in decoder.windows
                ),
                BLOCK_SIZE,
                limits.max_num_seqs,
                max(limits.max_num_batched_tokens, limits.max_num_seqs),
                policy=limits.policy,
                batching=limits.batching,
                preemption="swap" if host_blocks else "recompute",
                prefix_cache=limits.prefix_cache and limits.eviction is None,
            )
        )
        self._evictor = Evictor(limits.eviction, self._scheduler) if limits.eviction else None
        self._live: dict[str, Live] = {}
        self._results = StepResults(self._scheduler, loaded.dtype, self._kv.wipe, self._speculator)
        self._runner = StepRunner(
            decoder, self._kv, loaded.device, invariant, self._evictor, self._captured()
        )
        self._overlaps = (
            limits.async_scheduling and self._speculator is None and self._evictor is None
        )
        self._flight: Flight | None = None  # whose tokens have not been read
        self._landed = 0.0  # when the last ones were

    def _allocate(self, proposer: Proposer | None) -> tuple[int, int]:
        """Blocks of each pool that hold tokens, on the device and on the host; a draft model has as
        many as the device."""
        limits, a_block = self.limits, self._kv.block_bytes
        beside = proposer.block_bytes if isinstance(proposer, DraftModel) else 0
        most = -(-limits.max_model_len // BLOCK_SIZE) * limits.max_num_seqs
        blocks = blocks_in(limits.kv_memory, most, a_block + beside, self.loaded.device)
        host_blocks = host_blocks_in(limits.swap_memory, a_block)
        self._kv.allocate(blocks, host_blocks)
        if isinstance(proposer, DraftModel):
            proposer.allocate(blocks)
        return blocks, host_blocks

    @property
    def graphs_declined(self) -> str | None:
        """None, or why no step of this engine can be replayed."""
        watched = self.limits.eviction is not None
        return decline_graphs(self._decoder, self.loaded.device, watched)

    def _captured(self) -> DecodeGraphs | None:
        """Graphs of decode steps; None where they are not wanted, or cannot be."""
        limits, decoder, device = self.limits, self._decoder, self.loaded.device
        if not limits.cuda_graphs or self.graphs_declined is not None:
            return None
        assert isinstance(decoder, Decoder)
        most, longest = limits.max_num_seqs, limits.max_model_len
        invariant = self.loaded.batch_invariant
        return cuda_graphs(decoder, self._kv.pools, most, longest, device, invariant)

    @property
    def decode_graphs(self) -> str:
        """How decode steps are launched, in words."""
        if not self.limits.cuda_graphs:
            return "no CUDA graphs: they were not asked for"
        graphs = self._runner.graphs
        return f"no CUDA graphs: {self.graphs_declined}" if graphs is None else graphs.describe()

    @property
    def scheduler_stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    @property
    def kv_bytes(self) -> int:
        """Of all pools."""
        return self._kv.nbytes

    @property
    def capacity(self) -> int:
        """Tokens that the blocks of a layer hold."""
        return self._scheduler.config.kinds[0].num_blocks * BLOCK_SIZE

    @property
    def has_work(self) -> bool:
        return self._flight is not None or self._scheduler.has_work

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
            swaps=told.swaps,
            acceptance_rate=told.acceptance_rate,
            speculation=None
            if self._speculator is None
            else self._speculator.metrics(told.tokens.proposed, told.tokens.accepted),
        )

    def add(self, request: Request | BeamRequest) -> None:
        """Let `request` wait for its turn. UserError where it could never run to its end."""
        state = RequestState(
            request.request_id, request.prompt_token_ids, request.max_tokens,
            n=len(request.continuations), lockstep=isinstance(request, BeamRequest),
            priority=request.priority,
            reuse_prefix=request.prompt_logprobs is None,
        )  # fmt: skip
        self._scheduler.add(state)
        self._live[request.request_id] = Live(request, state)

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free in the next step. Nothing if it is over."""
        if live := self._live.pop(request_id, None):
            live.request.end("abort")
            self._scheduler.cancel(request_id)

    def step(self) -> list[Request | BeamRequest]:
        """Plan and run one step; the requests that something has come of. Where steps overlap, what
        comes of this one is told by the next."""
        with self._decoder.threads(self._kv.pools):
            return self._step()

    def _step(self) -> list[Request | BeamRequest]:
        told: list[Request | BeamRequest] = []
        before, self._flight = self._flight, None
        if before is not None and not may_plan_ahead(before.plan, self._scheduler):
            told += self._land(before)
            before = None
        flight = self._launch(before)
        if before is not None:
            told += self._land(before)
        if flight is None:
            return told
        if self._overlaps and self._live and can_wait(flight.plan, flight.lives):
            self._flight = flight
        else:
            told += self._land(flight)
        return told

    def _launch(self, before: Flight | None) -> Flight | None:
        """Plan a step and have the device run it; None where there is nothing to do. before: the
        step whose tokens have not been read."""
        started = time.perf_counter()
        if self._speculator is not None:
            self._speculator.propose(self._scheduler, self._live.__getitem__)
        plan = self._scheduler.plan()
        if not plan.runs:
            return None
        lives = [self._live[run.sequence.request.request_id] for run in plan.runs]
        unread = None if before is None else before.unread
        ran = self._runner.run(plan, lives, unread)
        asked = asked_of(plan, lives)
        drawing = self._results.draw(asked, ran.logits, [] if ran.finite is None else [ran.finite])
        return Flight(plan, lives, asked, ran, drawing, started)

    def _land(self, flight: Flight) -> list[Request | BeamRequest]:
        """Wait for what comes of a step and tell it; the requests that something has come of."""
        plan, lives, asked, ran, drawing, started = flight
        picked, also = drawing.read()
        over = [is_over(run.sequence) for run in plan.runs]  # by what was read since it was planned
        broken = self._runner.tell_prompts(ran, also[0]) if also else []
        drawn = self._results.advance(plan, asked, ran.logits, drawing, picked, broken)
        if self._evictor is not None:
            self._evictor.evict(plan)
        now = time.perf_counter()
        seconds, self._landed = now - max(started, self._landed), now
        self.stats.output_tokens += sum(drawn)
        self._count(plan, lives, drawn, over, started, seconds)
        if self._speculator is not None:
            self._speculator.record(plan, seconds, sum(drawn))
        told = dict.fromkeys(
            live.request
            for live in [*(a.live for a in asked), *broken]
            if self._live.get(live.request.request_id) is live
        )
        for request in told:
            if request.finished:
                self._live.pop(request.request_id, None)
        if not self._live:
            self._scheduler.roster.free_leaving()
        return list(told)

    def _count(
        self, plan: StepPlan, lives: list[Live], drawn: list[int], over: list[bool], started: float,
        seconds: float,
    ) -> None:  # fmt: skip
        """Share the step's seconds out: what prompts took by their tokens, the rest is decoding.
        drawn: tokens that came of each run; over: of those, none were wanted."""
        each = seconds / len(plan.token_ids)
        counted: dict[int, tuple[Live, bool]] = {}
        for run, live, new, unwanted in zip(plan.runs, lives, drawn, over, strict=True):
            if unwanted:
                continue
            tokens = run.end - run.start
            decodes = run.start >= len(live.request.prompt_token_ids)
            counted[id(live.state)] = live, decodes
            if decodes:
                self.stats.decode_tokens += new if run.num_proposed else tokens
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
