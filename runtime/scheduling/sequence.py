"""A request on its way, and each of its continuations: what the scheduler knows of them."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from typing import Literal

from ...kernels.errors import UserError
from .block_table import BlockTable

FinishReason = Literal["stop", "length", "error", "dropped"]


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, with tokens that were computed before
    FINISHED = "finished"
    CANCELLED = "cancelled"


OVER = (RequestStatus.FINISHED, RequestStatus.CANCELLED)


class Sequence:
    """One continuation of a request.

    tokens: int32, of the prompt and those sampled since. num_computed: leading tokens whose keys
    and values are in its blocks, or come there in a step that was planned. num_pending: samples
    that planned steps owe it. proposed: tokens to verify in the next step. unsettled: what comes
    after the step in flight depends on its result, so nothing can be planned for it before.
    host_blocks: of each kind, where its blocks are while it is swapped out. token_times: seconds of
    the scheduler's clock at which each sampled token came. epoch: grows when its blocks are
    dropped. finish_reason "dropped": a beam that others have outdone.
    """

    __slots__ = ("request", "num_prompt_tokens", "tokens", "table", "num_computed", "num_pending",
                 "proposed", "unsettled", "host_blocks", "token_times", "epoch",
                 "finish_reason")  # fmt: skip

    def __init__(self, request: RequestState, tokens: array[int], table: BlockTable) -> None:
        self.request, self.tokens, self.table = request, tokens, table
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_computed = 0
        self.num_pending = 0
        self.proposed = array("i")
        self.unsettled = False
        self.host_blocks: list[array[int]] | None = None
        self.token_times = array("d")
        self.epoch = 0
        self.finish_reason: FinishReason | None = None

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def generated(self) -> array[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_to_run(self) -> int:
        """Tokens, known or in flight, that have not been planned yet; 0: no more are wanted."""
        known = len(self.tokens) + self.num_pending
        if known - self.num_prompt_tokens >= self.request.max_tokens:
            return 0
        return known - self.num_computed

    def split(self, table: BlockTable) -> Sequence:
        """Another continuation that has all in common so far; table: shares the blocks."""
        other = Sequence(self.request, self.tokens[:], table)
        other.num_computed = self.num_computed
        other.token_times = self.token_times[:]
        return other


class RequestState:
    """What is asked of the scheduler, and how it goes.

    prompt_token_ids: at least one. max_tokens: of each continuation. n: continuations, 1 or more.
    lockstep: they are the beams of a search, which run together, and `Scheduler.advance_beams` says
    how they go on. priority: lower ones first, under the policy of that name. reuse_prefix: False
    where every prompt token has to be computed, as for prompt logprobs.

    Times are seconds of the scheduler's clock, None before they are known.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        max_tokens: int,
        *,
        n: int = 1,
        lockstep: bool = False,
        priority: int = 0,
        reuse_prefix: bool = True,
    ) -> None:
        self.request_id = request_id
        self.prompt = array("i", prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt)
        if not self.prompt:
            raise UserError(f"request {request_id}: the prompt is empty; it needs a token or more")
        if max_tokens < 1 or n < 1:
            raise UserError(
                f"request {request_id}: max_tokens and n must be at least 1, got {max_tokens} "
                f"and {n}"
            )
        self.max_tokens, self.n, self.lockstep = max_tokens, n, lockstep
        self.priority, self.reuse_prefix = priority, reuse_prefix
        self.status = RequestStatus.WAITING
        self.order: tuple[int, int] = (0, 0)  # who goes first: the scheduler sets it
        self.sequences: list[Sequence] = []
        self.arrived = 0.0
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.ended: float | None = None
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache
        self.num_preemptions = 0
        self.num_swaps = 0  # of the preemptions, those whose blocks went to host memory

    @property
    def max_stored(self) -> int:
        """Tokens whose keys and values a continuation ever stores: the last one's are not."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences if s.finish_reason is None]

    @property
    def parts_next(self) -> bool:
        """Its first sample gives several continuations."""
        return self.n > 1 and self.first_token is None
