"""The engine for models that the decoder does not know, and for caches that do not lie in blocks:
prompts one at a time into a contiguous cache, decode for all of them together.

Requests go in waves of at most `max_num_seqs`, longest prompt first, so that rows of like length
share a wave. In a wave every prompt is computed alone, exactly as it would be without the others;
each decode step then takes one token of every row. A row that finishes is dropped from the batch.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.errors import UserError
from ..quantize.checkpoint.kv_config import KVStorage
from .kv_cache import KVCache, batchable, cache_keyword
from .loader import LoadedModel
from .request import Request
from .rope import RopeProbe
from .sampler import SamplingBatch, sample, sampling_batch, uniform


@dataclass
class EngineStats:
    """What an engine has done so far. Seconds are wall clock, decode tokens those of all rows.
    Prompt tokens that the prefix cache had are not among prefill's."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


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

    def run(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Run `requests` to their end; after each step, those that got a token in it."""
        longest_first = sorted(requests, key=lambda r: -len(r.prompt_token_ids))
        for i in range(0, len(longest_first), self.max_num_seqs):
            yield from self._run_wave(longest_first[i : i + self.max_num_seqs])

    def _run_wave(self, wave: list[Request]) -> Iterator[list[Request]]:
        batch = _Batch(wave, self._cache(wave), self.loaded.device)
        self._sample(batch, torch.cat([self._prefill(batch, row) for row in range(len(wave))]))
        while True:
            yield batch.requests
            batch.drop_finished()
            if not batch.requests:
                return
            started = time.perf_counter()
            self._sample(batch, self._decode(batch))
            self._count_decode(batch.requests, time.perf_counter() - started)

    def _cache(self, wave: list[Request]) -> KVCache:
        """Room for the longest prompt and the longest output."""
        prompt = max(len(r.prompt_token_ids) for r in wave)
        columns = prompt + max(r.max_tokens for r in wave)
        return KVCache(self.loaded.model.config, len(wave), columns, self.kv, self._probe)

    def _prefill(self, batch: _Batch, row: int) -> Tensor:
        """Logits [1, vocabulary] after the prompt of `row`, whose columns are now in the cache."""
        request = batch.requests[row]
        started = time.perf_counter()
        n = len(request.prompt_token_ids)
        batch.cache.place_prompt(row, batch.length - n)
        tokens = torch.tensor([request.prompt_token_ids], device=self.loaded.device)
        logits = self._forward(tokens, batch.cache)
        request.prefill_seconds = time.perf_counter() - started
        self.stats.prefill_tokens += n
        self.stats.prefill_seconds += request.prefill_seconds
        return logits

    def _decode(self, batch: _Batch) -> Tensor:
        """Logits [B, vocabulary] after the newest token of every row."""
        tokens = torch.tensor([[r.token_ids[-1]] for r in batch.requests])
        batch.advance()
        extra: dict[str, Any] = {}
        if batch.mask is not None:
            extra["attention_mask"] = batch.mask[:, : batch.length]
        if self._takes_positions:
            extra["position_ids"] = batch.positions
        return self._forward(tokens.to(self.loaded.device), batch.cache, **extra)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, cache: KVCache, **extra: Any) -> Tensor:
        extra[self._cache_name] = cache
        output = self.loaded.model(
            input_ids=tokens, use_cache=True, **self._last_logits_only, **extra
        )
        return output.logits[:, -1]

    @torch.inference_mode()
    def _sample(self, batch: _Batch, logits: Tensor) -> None:
        """Give every row its next token."""
        tokens = next_tokens(logits, batch.requests, batch.sampling, self.loaded.dtype)
        for request, token in zip(batch.requests, tokens, strict=True):
            request.append(token)

    def _count_decode(self, requests: list[Request], seconds: float) -> None:
        self.stats.decode_tokens += len(requests)
        self.stats.decode_seconds += seconds
        for request in requests:
            request.decode_seconds += seconds


def next_tokens(
    logits: Tensor, requests: list[Request], sampling: SamplingBatch, dtype: torch.dtype
) -> list[int]:
    """The next token of each of `requests` from logits [rows, vocabulary]; sampling: theirs.
    UserError where the logits of a model that runs in `dtype` are not finite."""
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        raise UserError(
            f"the model's logits are not finite in {dtype}: its weights are damaged or its "
            "activations overflow; try dtype float32"
        )
    uniforms = [0.0 if r.params.temperature == 0 else uniform(r.seed, len(r.token_ids))
                for r in requests]  # fmt: skip
    return sample(logits, sampling, uniforms).tolist()


class _Batch:
    """The rows that decode together and their place in the cache.

    length: columns in use, the same for all rows. mask int64 [B, max_len], 0 for the columns left
    of a row's prompt; None when all rows are full. positions int64 [B, 1] of the newest tokens.
    """

    def __init__(self, wave: list[Request], cache: KVCache, device: torch.device) -> None:
        self.requests, self.cache = wave, cache
        lengths = [len(r.prompt_token_ids) for r in wave]
        self.length = max(lengths)
        pads = torch.tensor([self.length - n for n in lengths], device=device)
        column = torch.arange(cache.max_len, device=device)
        self.mask = (column >= pads[:, None]).long() if int(pads.max()) else None
        self.positions = torch.tensor(lengths, device=device)[:, None] - 1
        self.sampling = self._sampling_batch(device)

    def advance(self) -> None:
        """Make room for one more column."""
        self.cache.place_decode(self.length)
        self.length += 1
        self.positions = self.positions + 1

    def drop_finished(self) -> None:
        """Keep only the rows whose requests go on."""
        going = [i for i, r in enumerate(self.requests) if r.finish_reason is None]
        if len(going) == len(self.requests):
            return
        self.requests = [self.requests[i] for i in going]
        device = self.positions.device
        rows = torch.tensor(going, dtype=torch.int64, device=device)
        self.cache.keep(rows)
        self.positions = self.positions[rows]
        self.mask = None if self.mask is None else self.mask[rows]
        self.sampling = self._sampling_batch(device)

    def _sampling_batch(self, device: torch.device) -> SamplingBatch:
        return sampling_batch([r.params for r in self.requests], device)
