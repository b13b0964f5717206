"""The nouns of serving, with vLLM's names: what is asked for, what comes back, one in flight."""

from __future__ import annotations

import itertools
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..kernels.errors import UserError
from .detokenizer import TextStream
from .sampling.params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from .sampling.grammar import CompiledGrammar, Grammar
    from .sampling.logprobs import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]
_NUMBERS = itertools.count()

__all__ = [
    "CompletionOutput", "Continuation", "Request", "RequestFailed", "RequestMetrics",
    "RequestOutput", "SamplingParams", "StructuredOutputsParams",
]  # fmt: skip


@dataclass(frozen=True)
class RequestMetrics:
    """What one request took. Prefill gives the first token; every other one is a decode token.

    Seconds are wall clock; those of prefill and decode are shared with whatever ran in the same
    steps. prefill_tokens: of the prompt; cached_tokens: those among them that were not computed but
    found in the prefix cache. output_tokens: of all continuations. queue_seconds: from arrival to
    the first step. ttft: from arrival to the first token. tpot: mean seconds a token after the
    first, of the longest continuation. itl: seconds between tokens, of all continuations one after
    another. seconds: from arrival to the end. preemptions: times that it gave up its blocks. None:
    has not come to be.
    """

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    queue_seconds: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    itl: tuple[float, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. `token_ids` keep the end-of-sequence token, `text` drops special ones.

    finish_reason: None while it goes on. stop_reason: the stop string, or the id out of
    stop_token_ids, that ended it. logprobs: of each token, where they were asked for;
    cumulative_logprob: their sum.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What came of one prompt. `prompt` is None when it was given as token ids. prompt_logprobs: of
    each of its tokens, None for the first. error: why it failed. finished: nothing more comes."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    request_id: str = ""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    finished: bool = True


class RequestFailed(UserError):
    """Requests have failed, the first of them with this message; others may not have.

    outputs: of all requests that were asked for together.
    """

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


class Request:
    """One prompt on its way. The engine appends tokens to its continuations until all have ended.

    max_tokens: params.max_tokens, cut to what the model's context leaves room for. grammar: what
    the text has to follow. priority: lower ones first, under the scheduling policy of that name.
    Times are those of time.perf_counter.
    """

    priority: int = 0

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        tokenizer: Any | None,
        *,
        request_id: str | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        self.request_id = str(next(_NUMBERS)) if request_id is None else request_id
        self.prompt, self.prompt_token_ids = prompt, prompt_token_ids
        self.params, self.max_tokens, self.tokenizer = params, max_tokens, tokenizer
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.end_token_ids = self.eos_token_ids | frozenset(params.stop_token_ids or ())
        self.continuations = [
            Continuation(self, i, grammar.begin() if grammar else None) for i in range(params.n)
        ]
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self.error: str | None = None
        self.arrived = time.perf_counter()
        self.started: float | None = None  # its first step
        self.prefill_seconds = self.decode_seconds = 0.0
        self.num_cached_tokens = self.num_preemptions = 0

    @property
    def finished(self) -> bool:
        return all(c.finish_reason for c in self.continuations)

    @property
    def wants_prompt_logprobs(self) -> bool:
        known = self.prompt_logprobs
        return known is not None and len(known) < len(self.prompt_token_ids)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Nothing more comes of it. error: why it failed."""
        self.error = self.error or error
        for continuation in self.continuations:
            if continuation.finish_reason is None:
                continuation.end(reason)

    def output(self, delta: bool = False) -> RequestOutput:
        """What has come of it by now; delta: since the last call, in text, tokens and logprobs."""
        return RequestOutput(
            self.prompt,
            list(self.prompt_token_ids),
            [c.output(delta) for c in self.continuations],
            self.metrics(),
            self.request_id,
            self.prompt_logprobs,
            self.error,
            self.finished,
        )

    def metrics(self) -> RequestMetrics:
        times = [c.token_times for c in self.continuations]
        longest = max(times, key=len)
        first = min((t[0] for t in times if t), default=None)
        last = max((t[-1] for t in times if t), default=None)
        tokens = sum(map(len, times))
        decoded = len(longest) - 1
        return RequestMetrics(
            prefill_tokens=len(self.prompt_token_ids),
            prefill_seconds=self.prefill_seconds,
            decode_tokens=max(0, tokens - sum(map(bool, times))),
            decode_seconds=self.decode_seconds,
            output_tokens=tokens,
            cached_tokens=self.num_cached_tokens,
            preemptions=self.num_preemptions,
            queue_seconds=None if self.started is None else self.started - self.arrived,
            ttft=None if first is None else first - self.arrived,
            tpot=(longest[-1] - longest[0]) / decoded if decoded > 0 else None,
            itl=tuple(b - a for t in times for a, b in itertools.pairwise(t)),
            seconds=last - self.arrived if last is not None and self.finished else None,
        )


class Continuation:
    """One way on from the prompt of `request`, its `index` among them. grammar: how far it has come
    in what it has to follow."""

    def __init__(self, request: Request, index: int, grammar: Grammar | None) -> None:
        self.request, self.index, self.grammar = request, index, grammar
        self.token_ids: list[int] = []
        self.token_times: list[float] = []
        params = request.params
        self.text = TextStream(
            request.tokenizer, params.stop_strings, params.include_stop_str_in_output,
            request.prompt_token_ids,
        )  # fmt: skip
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._told = 0  # tokens that `output` has handed out

    def must_go_on(self, ahead: int = 0) -> bool:
        """The next token, or the one after `ahead` more, must not be an end."""
        return len(self.token_ids) + ahead < self.request.params.min_tokens

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Take one new token; sets `finish_reason` when it is the last."""
        assert self.finish_reason is None
        request, params, early = self.request, self.request.params, self.must_go_on()
        if self.grammar is not None and not self.grammar.accept(token_id):
            request.error = request.error or (
                f"request {request.request_id}: its grammar allows no token after "
                f"{len(self.token_ids)} of them"
            )
            self.end("error")
            return
        self.token_ids.append(token_id)
        self.token_times.append(time.perf_counter())
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        if not early and token_id in request.end_token_ids:
            if token_id not in request.eos_token_ids:
                self.stop_reason = token_id
            if params.include_stop_str_in_output:
                self.text.push(token_id, search=False)
            self.end("stop")
            return
        self.text.push(token_id, search=not early)
        if self.text.stopped or (self.grammar is not None and self.grammar.is_over):
            self.end("stop")
        elif len(self.token_ids) >= request.max_tokens:
            self.end("length")

    def end(self, reason: FinishReason) -> None:
        self.text.finish()
        self.finish_reason = reason
        if self.text.stopped_by is not None:  # also by what was an unfinished character
            self.finish_reason, self.stop_reason = "stop", self.text.stopped_by

    def output(self, delta: bool = False) -> CompletionOutput:
        begin = self._told if delta else 0
        if delta:
            self._told = len(self.token_ids)
        told = self.logprobs
        return CompletionOutput(
            self.index,
            self.text.new_text() if delta else self.text.text,
            self.token_ids[begin:],
            self.finish_reason,
            self.stop_reason,
            None if told is None else sum(
                told[i][token].logprob for i, token in enumerate(self.token_ids)
            ),
            None if told is None else told[begin:],
        )  # fmt: skip
