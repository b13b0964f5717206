"""The engine over paged keys and values: continuous batching, chunked prefill, prefix sharing.

The scheduler plans a step (runtime/scheduling), the decoder runs it, the sampler picks, and the
scheduler hears what came of it. A request joins as soon as there is room, and leaves when it ends.
What requests have in common is computed once, also from one call of `run` to the next.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.errors import UserError
from ..quantize.checkpoint.kv_config import KVStorage
from ..quantize.planning.machine import available_bytes
from .engine import EngineStats, next_tokens
from .kv_pools import copy_blocks, decline_paged, layer_pools
from .loader import LoadedModel
from .models.decoder import Decoder, KVPools
from .models.families import decline_decoder
from .request import Request
from .sampler import SamplingBatch, sampling_batch
from .scheduling.config import KVKind, SchedulerConfig
from .scheduling.plan import StepPlan
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import RequestState
from .scheduling.stats import SchedulerStats
from .step_inputs import step_inputs

BLOCK_SIZE = 16
MEMORY_SHARE = 0.25  # of the free memory that the pools may grow to where nothing is said


class EngineLimits(NamedTuple):
    """max_num_seqs: that run at once. max_num_batched_tokens: of a step. max_model_len: prompt and
    output together. kv_memory: bytes of all pools; None: a quarter of the free memory, or as much
    as `max_num_seqs` requests of the longest kind fill."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_memory: int | None = None
    prefix_cache: bool = True


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
        self._numbers = itertools.count()
        self._sampling: tuple[list[Request], SamplingBatch] | None = None

    @property
    def scheduler_stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    @property
    def kv_bytes(self) -> int:
        """Of all pools."""
        return sum(pool.nbytes for pools in self._pools for pool in pools)

    def run(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Run `requests` to their end; after each step, those that got a token in it."""
        by_id: dict[str, Request] = {}
        try:
            for request in requests:
                name = str(next(self._numbers))
                self._scheduler.add(
                    RequestState(name, request.prompt_token_ids, request.max_tokens)
                )
                by_id[name] = request
            while self._scheduler.has_work:
                if stepped := self._step(by_id):
                    yield stepped
        finally:
            for name in by_id:
                self._scheduler.cancel(name)

    def _step(self, by_id: dict[str, Request]) -> list[Request]:
        """Plan and run one step; the requests that got a token."""
        started = time.perf_counter()
        plan = self._scheduler.plan()
        if not plan.runs:
            return []
        asked = [run for run in plan.runs if run.num_logits]
        requests = [by_id[run.sequence.request.request_id] for run in asked]
        logits = self._logits(plan)  # keys and values are stored even where nothing is asked
        tokens = self._sample(logits, requests) if asked else []
        new = iter(tokens)
        self._scheduler.update(plan, [[next(new)] if run.num_logits else [] for run in plan.runs])
        for run, request, token in zip(asked, requests, tokens, strict=True):
            request.append(token)
            if request.finish_reason and run.sequence.finish_reason is None:
                self._scheduler.finish(run.sequence, "stop")
        self._count(plan, by_id, time.perf_counter() - started)
        return requests

    @torch.inference_mode()
    def _logits(self, plan: StepPlan) -> Tensor:
        """[asked, vocabulary] after the last token of each run that is asked for one."""
        copy_blocks(self._pools, self._decoder.kinds, plan.copies)
        tables = zip(*(run.block_tables for run in plan.runs), strict=True)
        query_lens = [run.end - run.start for run in plan.runs]
        step = step_inputs(
            plan.token_ids, plan.positions, plan.slots, query_lens,
            [run.end for run in plan.runs], tables, self.loaded.device,
        )  # fmt: skip
        ends = itertools.accumulate(query_lens)
        rows = [end - 1 for end, run in zip(ends, plan.runs, strict=True) if run.num_logits]
        at = torch.tensor(rows, dtype=torch.int64, device=self.loaded.device)
        hidden = self._decoder(step.token_ids, self._pools, step.batches, step.new, at)
        return self._decoder.logits(hidden)

    @torch.inference_mode()
    def _sample(self, logits: Tensor, requests: list[Request]) -> list[int]:
        if self._sampling is None or self._sampling[0] != requests:
            params = sampling_batch([r.params for r in requests], logits.device)
            self._sampling = requests, params
        return next_tokens(logits, requests, self._sampling[1], self.loaded.dtype)

    def _count(self, plan: StepPlan, by_id: dict[str, Request], seconds: float) -> None:
        """Share the step's seconds out: what prompts took by their tokens, the rest is decoding."""
        each = seconds / len(plan.token_ids)
        for run in plan.runs:
            request, tokens = by_id[run.sequence.request.request_id], run.end - run.start
            if run.start >= len(request.prompt_token_ids):
                request.decode_seconds += seconds
                self.stats.decode_tokens += tokens
                self.stats.decode_seconds += each * tokens
            else:
                request.prefill_seconds += seconds
                self.stats.prefill_tokens += tokens
                self.stats.prefill_seconds += each * tokens

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


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes() or (1 << 30)
