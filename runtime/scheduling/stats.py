"""What serving took: of one request when it is over, of the scheduler so far."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .block_manager import KVUsage
from .sequence import FinishReason, RequestState, RequestStatus


@dataclass(frozen=True)
class RequestStats:
    """Seconds of the scheduler's clock; None for what did not come to be.

    queue_seconds: from arrival to the first step. ttft: from arrival to the first token. tpot: mean
    seconds a token after the first, of the longest continuation. itl: seconds between tokens, of
    all continuations one after another; 0 between tokens of one step. output_tokens: of all
    continuations. cached_tokens: of the prompt, not computed but found in the prefix cache.
    """

    request_id: str
    status: RequestStatus
    finish_reasons: tuple[FinishReason | None, ...]
    queue_seconds: float | None
    ttft: float | None
    tpot: float | None
    itl: tuple[float, ...]
    seconds: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    swaps: int


@dataclass
class Counts:
    """Of all steps so far. computed: tokens that were planned to run, of prompts, decodes, rejected
    proposals and recomputation alike. prompt, cached: prompt tokens of requests that have begun,
    and those among them that were not computed, since the prefix cache had them."""

    steps: int = 0
    computed: int = 0
    output: int = 0
    prompt: int = 0
    cached: int = 0
    proposed: int = 0
    accepted: int = 0

    def copy(self) -> Counts:
        return replace(self)


@dataclass(frozen=True)
class SchedulerStats:
    """running, waiting: requests. swaps: of the preemptions. seconds: since the first step."""

    running: int
    waiting: int
    tokens: Counts
    preemptions: int
    swaps: int
    kv: KVUsage
    seconds: float

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that did not have to be computed."""
        return self.tokens.cached / self.tokens.prompt if self.tokens.prompt else 0.0

    @property
    def acceptance_rate(self) -> float:
        """The share of proposed tokens that were accepted."""
        return self.tokens.accepted / self.tokens.proposed if self.tokens.proposed else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens."""
        return self.tokens.output / self.seconds if self.seconds else 0.0


def request_stats(request: RequestState) -> RequestStats:
    """Of a request at any time; what is over is final."""
    sequences = request.sequences
    times = [s.token_times for s in sequences]
    longest = max(times, key=len, default=None)
    tpot = None
    if longest is not None and len(longest) > 1:
        tpot = (longest[-1] - longest[0]) / (len(longest) - 1)
    return RequestStats(
        request.request_id,
        request.status,
        tuple(s.finish_reason for s in sequences),
        _since(request.arrived, request.scheduled),
        _since(request.arrived, request.first_token),
        tpot,
        tuple(b - a for t in times for a, b in zip(t, t[1:], strict=False)),
        _since(request.arrived, request.ended),
        request.num_prompt_tokens,
        sum(s.num_generated for s in sequences),
        request.num_cached_tokens,
        request.num_preemptions,
        request.num_swaps,
    )


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else end - start
