"""Calls that stop in their midst and go on later.

A model's forward pass cannot be left half-way from outside, and calibration wants just that: every
batch has to reach a linear before its weight is decided, and then go on from there. So each batch's
pass is a call in a thread of its own, and the threads take turns: exactly one runs at any time, in
an order that the caller sets. They are coroutines for code that was not written as one, not
parallelism.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Closed(BaseException):
    """Unwinds a paused call that will not go on; BaseException so that nothing swallows it."""


class PausableCall(Generic[T]):
    """`call` in a thread that runs only between `resume` and the next `pause` or the call's end."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._running = self._closing = False
        self._error: BaseException | None = None
        self._result: list[T] = []
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Run to the next pause, or to the end. Raises what the call raises."""
        self._running = True
        self._go.release()
        self._wait()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """From inside the call: stop until the next `resume`."""
        self._stopped.release()
        self._go.acquire()
        if self._closing:
            raise _Closed

    def finish(self) -> T:
        """Run to the end, which no pause may precede, and return what the call returns."""
        self.resume()
        assert self._result, "the call paused once more than it was expected to"
        return self._result.pop()

    def close(self) -> None:
        """Unwind the call where it stands; nothing when it has ended."""
        if self._running:  # the caller was interrupted while it waited
            self._wait()
        self._closing = True
        self._go.release()
        self._thread.join()

    def _wait(self) -> None:
        self._stopped.acquire()
        self._running = False

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._closing:
                self._result.append(self._call())
        except _Closed:
            pass
        except BaseException as e:
            self._error = e
        self._stopped.release()
