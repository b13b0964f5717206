"""Send a load to a target and note when what comes back.

Open-loop requests are sent when they are due, however many are under way, and their time counts
from then: a target that is slow cannot slow down who asks (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from ...kernels.errors import UserError
from .latency import Timeline
from .load import ClosedLoop, Job, Load

Clock = Callable[[], float]


class Answer(NamedTuple):
    """tokens: of the output; token_ids: where the target tells them."""

    tokens: int
    token_ids: tuple[int, ...] | None = None


class Target(Protocol):
    """What answers."""

    async def run(self, job: Job, heard: Callable[[], None]) -> Answer:
        """The answer; `heard` is called as each piece of it arrives. UserError where it fails."""
        ...


async def drive(target: Target, load: Load, clock: Clock = time.perf_counter) -> list[Timeline]:
    """A timeline for each job, in the jobs' order. clock: seconds, as asyncio's loop counts."""
    start = clock()
    done: dict[int, Timeline] = {}

    async def run(index: int, job: Job) -> None:
        due = clock() if job.due is None else start + job.due
        done[index] = await _ask(target, job, due, clock)

    if isinstance(load.arrivals, ClosedLoop):
        await _closed(load, run)
    else:
        await _open(load, run, start, clock)
    return [done[i] for i in range(len(load.jobs))]


Run = Callable[[int, Job], Awaitable[None]]


async def _closed(load: Load, run: Run) -> None:
    assert isinstance(load.arrivals, ClosedLoop)
    waiting = iter(enumerate(load.jobs))

    async def client() -> None:
        for index, job in waiting:
            await run(index, job)

    await _all([client() for _ in range(min(load.arrivals.concurrency, len(load.jobs)))])


async def _open(load: Load, run: Run, start: float, clock: Clock) -> None:
    async def later(index: int, job: Job) -> None:
        assert job.due is not None
        await asyncio.sleep(max(0.0, start + job.due - clock()))
        await run(index, job)

    await _all([later(index, job) for index, job in enumerate(load.jobs)])


async def _all(coroutines: list[Awaitable[None]]) -> None:
    """Await them together; where one fails, cancel the others."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _ask(target: Target, job: Job, due: float, clock: Clock) -> Timeline:
    times: list[float] = []
    try:
        answer = await target.run(job, lambda: times.append(clock()))
    except UserError as e:
        return Timeline(due, tuple(times), 0, job.prompt, error=str(e))
    return Timeline(due, tuple(times), answer.tokens, job.prompt, answer.token_ids)
