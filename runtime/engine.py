"""The engine for models that the decoder does not know, and for caches that do not lie in blocks:
prompts one at a time into a contiguous cache, decode for all of them together.

Requests go in waves of at most `max_num_seqs`, longest prompt first, so that rows of like length
share a wave. In a wave every prompt is computed alone, exactly as it would be without the others;
each decode step then takes one token of every row. A row that finishes is dropped from the batch.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..quantize.checkpoint.kv_config import KVStorage
from .kv_cache import KVCache, batchable, cache_keyword
from .loader import LoadedModel
from .metrics import EngineMetrics
from .request import Continuation, Request
from .rope import RopeProbe
from .sampling.logprobs import add_prompt_logprobs
from .sampling.picker import NOT_FINITE, Rows, pick


@dataclass
class EngineStats:
    """What an engine has done so far. Seconds are wall clock, decode tokens those of all rows.
    Prompt tokens that the prefix cache had are not among prefill's. output_tokens: drawn."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    output_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens by the seconds in which the engine worked."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.output_tokens / seconds if seconds else 0.0


class Engine:
    """Runs requests on a loaded model. max_num_seqs: rows that decode together. kv: how the cache
    is quantized (None: not at all)."""

    def __init__(self, loaded: LoadedModel, max_num_seqs: int, kv: KVStorage | None = None) -> None:
        self.loaded, self.kv = loaded, kv
        self.stats = EngineStats()
        config = loaded.model.config
        before_rope = kv is not None and kv.spec.key_before_rope
        self._probe = RopeProbe(loaded.model) if before_rope else None
        self.max_num_seqs = max_num_seqs if batchable(config) else 1
        accepted = inspect.signature(loaded.model.forward).parameters
        self._cache_name = cache_keyword(loaded.model)
        self._takes_positions = "position_ids" in accepted
        self._last_logits_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._waiting: list[Continuation] = []
        self._round: list[Continuation] = []  # those among them whose turn comes next
        self._batch: _Batch | None = None
        self._rows: Rows | None = None

    def add(self, request: Request) -> None:
        """Let `request` wait for the next wave."""
        self._waiting += request.continuations

    def abort(self, request_id: str) -> None:
        """End a request; its rows are dropped in the next step. Nothing if it is over."""
        for continuation in [*self._waiting, *self._running]:
            if continuation.request.request_id == request_id:
                continuation.request.end("abort")

    @property
    def has_work(self) -> bool:
        return any(c.finish_reason is None for c in [*self._waiting, *self._running])

    def step(self) -> list[Request]:
        """A token for every row that runs; where none does, a wave of those that wait begins. The
        requests that something has come of."""
        self._leave_finished()
        batch = self._batch
        if batch is not None:
            started = time.perf_counter()
            self._sample(batch, self._decode(batch))
            self._count_decode(batch.rows, time.perf_counter() - started)
        else:
            self._batch = batch = self._next_wave()
            if batch is None:
                return []
            logits = torch.cat([self._prefill(batch, row) for row in range(len(batch.rows))])
            self._sample(batch, logits)
        stepped = requests_of(batch.rows)
        self._leave_finished()
        return stepped

    def metrics(self) -> EngineMetrics:
        going = [c for c in self._running if c.finish_reason is None]
        return EngineMetrics(
            running=len(requests_of(going)),
            waiting=len(requests_of(self._waiting)),
            kv_usage=None,
            hit_rate=None,
            prefill_tokens=self.stats.prefill_tokens,
            output_tokens=self.stats.output_tokens,
            tokens_per_second=self.stats.tokens_per_second,
        )

    @property
    def _running(self) -> list[Continuation]:
        return [] if self._batch is None else self._batch.rows

    def _leave_finished(self) -> None:
        """Drop the rows that have ended, and the cache with the last of them."""
        if self._batch is None:
            return
        if any(c.finish_reason is None for c in self._batch.rows):
            self._batch.drop_finished()
        else:
            self._batch = None

    def _next_wave(self) -> _Batch | None:
        """Of those that have waited for the wave before, the longest prompts first."""
        if not self._round:
            going = [c for c in self._waiting if c.finish_reason is None]
            self._round = sorted(going, key=lambda c: -len(c.request.prompt_token_ids))
        wave = [c for c in self._round if c.finish_reason is None][: self.max_num_seqs]
        taken = set(wave)
        self._round = [c for c in self._round if c.finish_reason is None and c not in taken]
        self._waiting = [c for c in self._waiting if c not in taken and c.finish_reason is None]
        return _Batch(wave, self._cache(wave), self.loaded.device) if wave else None

    def _cache(self, wave: list[Continuation]) -> KVCache:
        """Room for the longest prompt and the longest output."""
        prompt = max(len(c.request.prompt_token_ids) for c in wave)
        columns = prompt + max(c.request.max_tokens for c in wave)
        return KVCache(self.loaded.model.config, len(wave), columns, self.kv, self._probe)

    def _prefill(self, batch: _Batch, row: int) -> Tensor:
        """Logits [1, vocabulary] after the prompt of `row`, whose columns are now in the cache."""
        request = batch.rows[row].request
        started = time.perf_counter()
        request.started = request.started or started
        n = len(request.prompt_token_ids)
        batch.cache.place_prompt(row, batch.length - n)
        tokens = torch.tensor([request.prompt_token_ids], device=self.loaded.device)
        logits = self._forward(tokens, batch.cache, request.wants_prompt_logprobs)
        add_prompt_logprobs(request, 0, logits[0, :-1])
        seconds = time.perf_counter() - started
        request.prefill_seconds += seconds
        self.stats.prefill_tokens += n
        self.stats.prefill_seconds += seconds
        return logits[:, -1]

    def _decode(self, batch: _Batch) -> Tensor:
        """Logits [B, vocabulary] after the newest token of every row."""
        tokens = torch.tensor([[c.token_ids[-1]] for c in batch.rows])
        batch.advance()
        extra: dict[str, Any] = {}
        if batch.mask is not None:
            extra["attention_mask"] = batch.mask[:, : batch.length]
        if self._takes_positions:
            extra["position_ids"] = batch.positions
        return self._forward(tokens.to(self.loaded.device), batch.cache, **extra)[:, -1]

    @torch.inference_mode()
    def _forward(
        self, tokens: Tensor, cache: KVCache, all_logits: bool = False, **extra: Any
    ) -> Tensor:
        """Logits [B, n, vocabulary], the last of which are there at least."""
        extra[self._cache_name] = cache
        if not all_logits:
            extra |= self._last_logits_only
        return self.loaded.model(input_ids=tokens, use_cache=True, **extra).logits

    def _sample(self, batch: _Batch, logits: Tensor) -> None:
        """Give every row its next token."""
        if self._rows is None or self._rows.continuations != batch.rows:
            self._rows = Rows(batch.rows, logits.shape[-1], logits.device)
        picked = pick(logits, self._rows)
        for continuation, token, told in zip(batch.rows, *picked, strict=True):
            if token == NOT_FINITE:
                fail_not_finite(continuation.request, self.loaded.dtype)
            elif continuation.finish_reason is None:  # else another of its request has failed
                continuation.append(token, told)
                self.stats.output_tokens += 1

    def _count_decode(self, rows: list[Continuation], seconds: float) -> None:
        self.stats.decode_tokens += len(rows)
        self.stats.decode_seconds += seconds
        for request in requests_of(rows):
            request.decode_seconds += seconds


def requests_of(continuations: list[Continuation]) -> list[Request]:
    """Each once, in their order."""
    return list(dict.fromkeys(c.request for c in continuations))


def fail_not_finite(request: Any, dtype: torch.dtype) -> None:
    """End a request for which a model that runs in `dtype` gave no finite logits."""
    request.end(
        "error",
        f"request {request.request_id}: the model's logits are not finite in {dtype}: its weights "
        "are damaged or its activations overflow; try dtype float32",
    )


class _Batch:
    """The rows that decode together and their place in the cache.

    length: columns in use, the same for all rows. mask int64 [B, max_len], 0 for the columns left
    of a row's prompt; None when all rows are full. positions int64 [B, 1] of the newest tokens.
    """

    def __init__(self, wave: list[Continuation], cache: KVCache, device: torch.device) -> None:
        self.rows, self.cache = wave, cache
        lengths = [len(c.request.prompt_token_ids) for c in wave]
        self.length = max(lengths)
        pads = torch.tensor([self.length - n for n in lengths], device=device)
        column = torch.arange(cache.max_len, device=device)
        self.mask = (column >= pads[:, None]).long() if int(pads.max()) else None
        self.positions = torch.tensor(lengths, device=device)[:, None] - 1

    def advance(self) -> None:
        """Make room for one more column."""
        self.cache.place_decode(self.length)
        self.length += 1
        self.positions = self.positions + 1

    def drop_finished(self) -> None:
        """Keep only the rows that go on."""
        going = [i for i, c in enumerate(self.rows) if c.finish_reason is None]
        if len(going) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in going]
        rows = torch.tensor(going, dtype=torch.int64, device=self.positions.device)
        self.cache.keep(rows)
        self.positions = self.positions[rows]
        self.mask = None if self.mask is None else self.mask[rows]
