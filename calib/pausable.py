"""Calls that stop in their midst and go on later.

A model's forward pass cannot be left half-way from outside, and calibration wants just that: every
batch has to reach a linear before its weight is decided, and then go on from there. So each batch's
pass is a greenlet, a coroutine for code that was not written as one: it has a stack of its own and
runs in the caller's thread. That it is the same thread matters: OpenMP keeps a team of threads for
each thread that computes, and once those outnumber the cores, a team sleeps after each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from greenlet import getcurrent, greenlet

T = TypeVar("T")


class PausableCall(Generic[T]):
    """`call`, run only between `resume` and the next `pause` or the call's end.

    What a thread's state holds (inference mode, autocast) is the caller's too: a call that pauses
    inside such a mode leaves the caller in it.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = greenlet(call)

    def resume(self) -> None:
        """Run to the next pause, or to the end. Raises what the call raises."""
        self._switch()

    def pause(self) -> None:
        """From inside the call: stop until the next `resume`."""
        caller = self._call.parent
        assert caller is not None and getcurrent() is self._call, "only a running call can pause"
        caller.switch()

    def finish(self) -> T:
        """Run to the end, which no pause may precede, and return what the call returns."""
        result = self._switch()
        assert self._call.dead, "the call paused once more than it was expected to"
        return result

    def close(self) -> None:
        """Unwind the call where it stands; nothing when it has ended."""
        self._call.parent = getcurrent()
        self._call.throw()

    def _switch(self) -> T:
        self._call.parent = getcurrent()
        return self._call.switch()
