"""The nouns of serving, with vLLM's names: what is asked for, what comes back, one in flight."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..kernels.errors import UserError
from .detokenizer import TextStream

FinishReason = Literal["stop", "length"]
UINT64 = 1 << 64


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens and when to stop.

    max_tokens: at most so many new tokens. temperature: 0 is greedy. top_p: keep the smallest set
    of likeliest tokens with at least this mass (1: all). top_k: keep so many likeliest tokens (0 or
    -1: all). stop: strings that end the text and are cut off it. seed: the draws depend on it and
    on the position alone, not on what else runs; None: a fresh one for each request. ignore_eos: go
    on to max_tokens whatever the model says.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: str | Sequence[str] | None = None
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature must be a finite number from 0 (greedy) on, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < -1:
            raise UserError(f"top_k must be at least 1, or 0 or -1 for all, got {self.top_k}")
        if any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise UserError(f"stop must be strings that are not empty, got {self.stop!r}")
        if self.seed is not None and not 0 <= self.seed < UINT64:
            raise UserError(f"seed must be from 0 to 2^64 - 1, got {self.seed}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(frozen=True)
class RequestMetrics:
    """What one request took. Prefill gives the first token; every other one is a decode token.

    Seconds are wall clock; those of decode are shared with whatever ran in the same batch.
    """

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. `token_ids` keep the end-of-sequence token, `text` drops special ones."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class RequestOutput:
    """What came of one prompt. `prompt` is None when it was given as token ids."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics


@dataclass(eq=False)
class Request:
    """One prompt on its way: the engine appends tokens until `finish_reason` is set."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # params.max_tokens, cut to what the model's context leaves room for
    eos_token_ids: frozenset[int]
    tokenizer: Any | None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed
        self.text = TextStream(self.tokenizer, self.params.stop_strings)

    def append(self, token_id: int) -> None:
        """Take one new token; sets `finish_reason` when it is the last."""
        self.token_ids.append(token_id)
        if token_id in self.eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        else:
            self.text.push(token_id)
            if len(self.token_ids) >= self.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason:
            self.text.finish()
        if self.text.stopped:
            self.finish_reason = "stop"

    def output(self) -> RequestOutput:
        assert self.finish_reason is not None
        completion = CompletionOutput(0, self.text.text, list(self.token_ids), self.finish_reason)
        metrics = RequestMetrics(
            len(self.prompt_token_ids),
            self.prefill_seconds,
            len(self.token_ids) - 1,
            self.decode_seconds,
        )
        return RequestOutput(self.prompt, list(self.prompt_token_ids), [completion], metrics)
