"""Who runs, who waits, who leaves: requests with their seats and blocks, between those three."""

from __future__ import annotations

from bisect import bisect_left, insort

from .admission import Admission
from .block_manager import BlockManager
from .config import SchedulerConfig
from .host_blocks import HostBlocks
from .plan import BlockCopy
from .sequence import RequestState, RequestStatus, Sequence
from .waiting import WaitingQueue


class Roster:
    """running: the requests that take part in steps, in their order. waiting: those that will.
    requests: both, by their ids. seats: sequences that the running requests may have."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockManager(config.kinds, config.block_size, config.prefix_cache)
        self.host = HostBlocks([kind.num_host_blocks for kind in config.kinds])
        self.admission = Admission(config, self.blocks, self.host)
        self.running: list[RequestState] = []
        self.waiting = WaitingQueue()
        self.requests: dict[str, RequestState] = {}
        self.seats = 0
        self.num_preemptions = self.num_swaps = 0
        self._leaving: list[RequestState] = []  # over since the last plan, blocks not yet freed
        self._arrivals = 0

    def add(self, request: RequestState, now: float) -> None:
        """Let `request` wait. UserError where it could never run to its end."""
        self.admission.check(request)
        assert request.request_id not in self.requests, f"{request.request_id} is not over"
        urgency = request.priority if self.config.policy == "priority" else 0
        request.order = (urgency, self._arrivals)
        self._arrivals += 1
        request.arrived = now
        request.sequences = [Sequence(request, request.prompt[:], self.blocks.new_table())]
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def start(self, request: RequestState, copies: list[BlockCopy]) -> bool:
        """`request`, the first that waits, runs; whether it got blocks back from host memory."""
        first = self.waiting.pop()
        assert first is request
        swapped = any(s.host_blocks is not None for s in request.sequences)
        if swapped:
            self.host.swap_in(request, self.blocks, copies)
        request.status = RequestStatus.RUNNING
        self.seats += request.n
        insort(self.running, request, key=_order)
        return swapped

    def preempt(self, request: RequestState, swap: bool, copies: list[BlockCopy]) -> None:
        """Take a running request's blocks; it waits until it can go on. swap: what it has computed
        is brought to host memory where that has room; else it is dropped and computed again."""
        self._stop(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        if swap and self.host.swap_out(request, self.blocks, copies):
            request.num_swaps += 1
            self.num_swaps += 1
        else:
            for sequence in request.live:
                self.release(sequence)
        self.waiting.push(request)

    def end(self, request: RequestState, status: RequestStatus, now: float) -> None:
        """`request` is over; `free_leaving` will free what it holds."""
        was, request.status = request.status, status
        if was is RequestStatus.RUNNING:
            self._stop(request)
        else:
            self.waiting.leave()
        request.ended = now
        del self.requests[request.request_id]
        self._leaving.append(request)

    def free_leaving(self) -> None:
        for request in self._leaving:
            for sequence in request.sequences:
                self.release(sequence)
            self.host.drop(request)
        self._leaving.clear()

    def release(self, sequence: Sequence) -> None:
        """Let go of its blocks; the full ones stay in the prefix cache for others."""
        if sequence.host_blocks is None:
            computed = min(sequence.num_computed, len(sequence.tokens))
            self.blocks.commit(sequence.table, sequence.tokens, computed)
        self.blocks.release(sequence.table)
        sequence.num_computed = 0
        sequence.epoch += 1

    def holders(self) -> list[Sequence]:
        """The sequences that may hold blocks."""
        going = (s for r in self.requests.values() for s in r.sequences)
        return [*going, *(s for r in self._leaving for s in r.sequences)]

    @property
    def is_empty(self) -> bool:
        """Nobody waits or runs, and no block is held."""
        return not self.requests and not self._leaving

    def _stop(self, request: RequestState) -> None:
        del self.running[bisect_left(self.running, request.order, key=_order)]
        self.seats -= request.n


def _order(request: RequestState) -> tuple[int, int]:
    return request.order
