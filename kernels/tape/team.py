"""Threads that run one compiled function together, each told which of them it is."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .memory import post

LOOKS = 4000  # for a job before a thread sleeps; after half of them it lets others run between


@dataclass(frozen=True, eq=False)
class Walker:
    """Compiled functions that run a tape: `walk` once, `serve` whenever a job is posted; see
    program.walker."""

    walk: Callable[..., None]
    serve: Callable[..., int]


class Team:
    """`size` threads, the calling one among them, that run tapes together.

    The others look for the next job in compiled code, without the interpreter's lock, for about a
    millisecond after each, which is the time between two steps; then they sleep.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.zeros(64, np.int64)
        self._barrier = (self._memory.ctypes.data + 63) & ~63
        self._job = self._barrier + 128
        self._turn = threading.Lock()
        self._walkers: list[Walker] = []
        self._current, self._posted = 0, 0
        self._wakes = [threading.Event() for _ in range(1, size)]
        for number, wake in enumerate(self._wakes, start=1):
            threading.Thread(target=self._work, args=(number, wake), daemon=True).start()

    def run(self, walker: Walker, ops: np.ndarray, registers: np.ndarray) -> None:
        """Walk through ops int64 [n, WIDTH] on every thread. Calls take turns."""
        with self._turn:
            if walker not in self._walkers:
                self._walkers.append(walker)
            self._current = self._walkers.index(walker)
            job = ops.ctypes.data, len(ops), registers.ctypes.data
            if self.size > 1:
                self._posted += 1
                post(self._job, self._current, *job)
                for wake in self._wakes:
                    wake.set()
            walker.walk(0, self.size, self._barrier, *job)

    def _work(self, number: int, wake: threading.Event) -> None:
        done = 0
        while True:
            wake.clear()  # before it looks: a job that is posted meanwhile wakes it
            if done == self._posted:
                wake.wait()
            serve = self._walkers[self._current].serve
            done = serve(number, self.size, self._barrier, self._job, self._current, done, LOOKS)


@functools.cache
def team(size: int) -> Team:
    """The team of so many threads of this process."""
    return Team(size)


class _Taken(threading.local):
    size = 0


_taken = _Taken()


def team_size() -> int:
    """Threads for a team: as many as torch has, or had before `alone`."""
    return _taken.size or torch.get_num_threads()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let torch use one thread. Its others spin for a while after each op, on the cores that a
    team's next op is waiting for."""
    before, threads = _taken.size, torch.get_num_threads()
    _taken.size = team_size()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _taken.size = before
        torch.set_num_threads(threads)


os.register_at_fork(after_in_child=team.cache_clear)  # threads do not live on in a child
