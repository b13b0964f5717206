"""How much may be asked at once, and how often."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import RETRY_SECONDS, ApiError

MAX_CALLERS = 10_000  # that are remembered; the one that has not asked for longest is forgotten


class Places:
    """Continuations that run or wait. running: that the engine runs at once; max_queue: beside
    them."""

    def __init__(self, running: int, max_queue: int) -> None:
        self.running, self.max_queue, self.taken = running, max_queue, 0

    @contextmanager
    def take(self, n: int) -> Iterator[None]:
        """Hold n places. ApiError where there are not so many, now or ever."""
        if n > self.running + self.max_queue:
            raise ApiError(
                422,
                f"the request asks for {n} continuations, and {self.running + self.max_queue} may "
                "run and wait at once: ask for fewer prompts or a smaller n",
                code="too_many_continuations",
            )
        if self.taken + n > self.running + self.max_queue:
            raise ApiError(
                503,
                f"{self.taken} continuations run or wait, and {self.running + self.max_queue} may: "
                f"there is no room for {n} more",
                code="queue_full",
                retry_after=RETRY_SECONDS,
            )
        self.taken += n
        try:
            yield
        finally:
            self.taken -= n


class RateLimiter:
    """A bucket for each caller, which holds a minute's requests and fills steadily.

    clock: seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, when

    def ask(self, caller: str) -> float:
        """0 where `caller` may go on, else after how many seconds."""
        now, rate = self._clock(), self._per_minute / 60
        tokens, when = self._buckets.pop(caller, (float(self._per_minute), now))
        tokens = min(self._per_minute, tokens + (now - when) * rate)
        goes = tokens >= 1
        self._buckets[caller] = (tokens - goes, now)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if goes else (1 - tokens) / rate
