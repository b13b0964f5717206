"""The requests that wait, in their order: a heap, so that their number is no cost."""

from __future__ import annotations

import heapq

from .sequence import RequestState, RequestStatus

_WAITS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_SLACK = 64


class WaitingQueue:
    """Requests in the order of their `order`. One that is cancelled meanwhile is passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], RequestState]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, request: RequestState) -> None:
        heapq.heappush(self._heap, (request.order, request))
        self._live += 1

    def peek(self) -> RequestState | None:
        """The first, which stays; None where nobody waits."""
        while self._heap and self._heap[0][1].status not in _WAITS:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> RequestState:
        """The first, which `peek` has told of."""
        self._live -= 1
        return heapq.heappop(self._heap)[1]

    def leave(self) -> None:
        """One of those that wait has been cancelled: its status says so."""
        self._live -= 1
        if len(self._heap) > 2 * self._live + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1].status in _WAITS]
            heapq.heapify(self._heap)
