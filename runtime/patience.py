"""Work whose length nobody knows before, in threads that are left when it takes too long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..kernels.errors import UserError

T = TypeVar("T")


class Patience:
    """seconds: for each. most: at once, those that were left and still run among them. what: what
    it is, in words."""

    def __init__(self, what: str, seconds: float, most: int) -> None:
        self._what, self._seconds, self._most = what, seconds, most
        self._running = 0
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives. UserError where it takes too long, or too many are at work."""
        with self._lock:
            if self._running >= self._most:
                raise UserError(f"{self._running} others of {self._what} are at work: try later")
            self._running += 1
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        # A daemon: a process that ends does not wait for it.
        thread = threading.Thread(target=self._work, args=(work, loop, answer), daemon=True)
        thread.start()
        try:
            return await asyncio.wait_for(answer, self._seconds)
        except asyncio.TimeoutError:
            raise UserError(
                f"{self._what} took longer than {self._seconds:g} s: simplify it"
            ) from None

    def _work(
        self,
        work: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        answer: asyncio.Future[Any],
    ) -> None:
        told, error = None, None
        try:
            told = work()
        except Exception as e:
            error = e
        with self._lock:
            self._running -= 1

        def tell() -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(told)
            else:
                answer.set_exception(error)

        try:
            loop.call_soon_threadsafe(tell)
        except RuntimeError:
            return  # the loop is closed: nobody waits
