"""The engine over paged keys and values: continuous batching, chunked prefill, prefix sharing.

The scheduler plans a step (runtime/scheduling), the decoder runs it, the sampler picks, and the
scheduler hears what came of it. A request joins as soon as there is room, and leaves when it ends.
What requests have in common is computed once, also from one call of `run` to the next.
"""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..kernels.errors import UserError
from ..quantize.checkpoint.kv_config import KVStorage
from ..quantize.planning.machine import available_bytes
from .engine import EngineStats
from .kv_pools import copy_blocks, decline_paged, layer_pools, wipe_blocks
from .loader import LoadedModel
from .metrics import EngineMetrics
from .models.choice import decline_model, make_decoder
from .models.decoder import KVPools
from .request import Request
from .sampling.beams import BeamRequest
from .sampling.logprobs import add_prompt_logprobs
from .scheduling.config import Batching, KVKind, SchedulerConfig
from .scheduling.plan import StepPlan
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import RequestState
from .scheduling.stats import SchedulerStats
from .step_inputs import step_inputs
from .step_results import Asked, Live, StepResults

BLOCK_SIZE = 16
MEMORY_SHARE = 0.25  # of the free memory that the pools may grow to where nothing is said
UNKNOWN_MEMORY = 1 << 30  # is taken to be free where the system does not tell
HEAD_ROWS = 256  # of a prompt's hidden states whose logits are in memory at once


class EngineLimits(NamedTuple):
    """max_num_seqs: that run at once. max_num_batched_tokens: of a step. max_model_len: prompt and
    output together. kv_memory: bytes of all pools; None: a quarter of the free memory, or as much
    as `max_num_seqs` requests of the longest kind fill. batching: see SchedulerConfig."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_memory: int | None = None
    prefix_cache: bool = True
    batching: Batching = "continuous"


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
        self._decoder = make_decoder(loaded.model, limits.max_model_len)
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
                batching=limits.batching,
                prefix_cache=limits.prefix_cache,
            )
        )
        self._live: dict[str, Live] = {}

        def wipe(kind: int, blocks: list[int]) -> None:
            wipe_blocks(self._pools, self._decoder.kinds, kind, blocks)

        self._results = StepResults(self._scheduler, loaded.dtype, wipe)

    @property
    def scheduler_stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    @property
    def kv_bytes(self) -> int:
        """Of all pools."""
        return sum(pool.nbytes for pools in self._pools for pool in pools)

    @property
    def capacity(self) -> int:
        """Tokens that the blocks of a layer hold."""
        return self._scheduler.config.kinds[0].num_blocks * BLOCK_SIZE

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
        self._live[request.request_id] = Live(request, state)

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
        asked = [Asked(*of) for of in zip(plan.runs, lives, strict=True) if of[0].num_logits]
        logits, broken = self._logits(plan, lives)  # K and V are stored even where nobody asks
        self.stats.output_tokens += self._results.advance(plan, asked, logits, broken)
        self._count(plan, lives, started, time.perf_counter() - started)
        told = dict.fromkeys(live.request for live in [*(a.live for a in asked), *broken])
        for request in told:
            if request.finished:
                self._live.pop(request.request_id, None)
        if not self._live:
            self._scheduler.roster.free_leaving()
        return list(told)

    @torch.inference_mode()
    def _logits(self, plan: StepPlan, lives: list[Live]) -> tuple[Tensor, list[Live]]:
        """[asked, vocabulary] after the last token of each run that is asked for one; and whose
        prompts are broken. Prompts' own logits are told to the requests that want to know them.

        A key or value that is not finite makes its token's hidden state so. Seen in the step that
        stores it, it is wiped before another request can get its block.
        """
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
        parts = [
            (run, live, end)
            for run, live, end in zip(plan.runs, lives, ends, strict=True)
            if run.end - run.start > 1 or not run.num_logits or _wants_logits(live.request)
        ]
        rows += [row for run, _, end in parts for row in range(end - run.end + run.start, end)]
        at = torch.tensor(rows, dtype=torch.int64, device=self.loaded.device)
        hidden = self._decoder(step.token_ids, self._pools, step.batches, step.new, at)
        finite = torch.isfinite(hidden[asked:]).all(dim=-1).tolist() if parts else []
        broken, begin = [], 0
        for run, live, _ in parts:
            end = begin + run.end - run.start
            if not all(finite[begin:end]):
                broken.append(live)
            elif _wants_logits(live.request):
                self._tell(live.request, run.start, hidden[asked + begin : asked + end])
            begin = end
        return self._decoder.logits(hidden[:asked]), broken

    def _tell(self, request: Request, start: int, hidden: Tensor) -> None:
        """The logprobs of the tokens after position `start`, from the hidden states there on."""
        for first in range(0, len(hidden), HEAD_ROWS):
            logits = self._decoder.logits(hidden[first : first + HEAD_ROWS])
            add_prompt_logprobs(request, start + first, logits)

    def _count(self, plan: StepPlan, lives: list[Live], started: float, seconds: float) -> None:
        """Share the step's seconds out: what prompts took by their tokens, the rest is decoding."""
        each = seconds / len(plan.token_ids)
        counted: dict[int, tuple[Live, bool]] = {}
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
        memory, free = self.limits.kv_memory, _free_memory(self.loaded.device)
        if memory is None:
            memory = int((free or UNKNOWN_MEMORY) * MEMORY_SHARE)
            memory = min(memory, (longest * self.limits.max_num_seqs + 1) * a_block)
        elif free is not None and memory > free:
            raise UserError(
                f"kv_memory asks for {memory:,} bytes for keys and values, and {free:,} are free: "
                "ask for less, or leave it out"
            )
        blocks = memory // a_block - 1  # one is nobody's
        if blocks < 1:
            raise UserError(
                f"the memory for keys and values, {memory:,} bytes, holds no more than one block "
                f"of {BLOCK_SIZE} tokens, which takes {a_block:,}: give it more"
            )
        return blocks


def _wants_logits(request: Request | BeamRequest) -> TypeGuard[Request]:
    """Of its prompt, too."""
    return isinstance(request, Request) and request.wants_prompt_logprobs


def _free_memory(device: torch.device) -> int | None:
    """None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()
