"""What runs between the engine's thread and a coroutine that waits for a request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from .request import Request, RequestFailed, RequestOutput

Item = RequestOutput | BaseException


class EngineDeadError(RuntimeError):
    """The engine's thread has ended by an error, its cause, or was shut down."""


class NotStarted(Exception):
    """A request has waited for its first step as long as it was given."""


@dataclass(eq=False)
class Stream:
    """A request and who waits for it. delta: outputs hold what is new, not all so far. only_last:
    there is one output, when it is over."""

    request: Request
    loop: asyncio.AbstractEventLoop
    delta: bool
    only_last: bool
    items: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)

    def item(self) -> Item:
        output = self.request.output(self.delta)
        error = self.request.error
        return output if error is None else RequestFailed(error, [output])

    async def first(self, seconds: float | None) -> Item:
        """NotStarted where the request still waits for its first step after so many seconds."""
        try:
            return await asyncio.wait_for(self.items.get(), seconds)
        except asyncio.TimeoutError:
            if self.request.started is None:
                raise NotStarted(
                    f"request {self.request.request_id} has waited {seconds:g} s for its turn"
                ) from None
        return await self.items.get()


def put_all(entries: list[tuple[Stream, Item]]) -> None:
    """In the event loop of these streams."""
    for stream, item in entries:
        stream.items.put_nowait(item)
