"""One replica: an engine and its routes, in a process that Ray starts, watches and replaces."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from ..app import make_replica_app
from ..frame import Context, fields_of
from ..logs import set_up_logs
from ..service import Service
from ..settings import ServerSettings
from .asked import Asked

if TYPE_CHECKING:
    from ...llm import LLM

TOLD = "lowbit.told"  # type of a message: what the front's log says of the request
Piece = dict[str, Any]


class Replica:
    """settings: without API keys, which the front asks for. load: makes the model. threads: of the
    CPU."""

    def __init__(self, settings: ServerSettings, load: Callable[[], LLM], threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        set_up_logs()
        self._service = Service(settings, load)
        self._app = make_replica_app(self._service)
        self._begun = False
        self.name = _name()

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Ray calls this after the constructor, and takes the replica into service after it: the
        model is loaded here. What it cannot be loaded for is raised."""
        if self._begun:
            return
        self._begun = True
        ended = asyncio.Event()
        self._service.begin(ended.set)
        while self._service.state == "loading":
            await asyncio.sleep(0.02)
        if self._service.failure is not None:
            raise self._service.failure
        self._ending = asyncio.ensure_future(_end_with(ended))

    async def ask(self, asked: Asked) -> AsyncGenerator[Any, None]:
        """The replica's name, then the messages of ASGI that answer, one of type TOLD before the
        last of them."""
        yield self.name
        scope = asked.scope()
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        given = False

        async def receive() -> Piece:
            nonlocal given
            if given:
                await asyncio.Event().wait()  # who goes away is cancelled by the front
            given = True
            return {"type": "http.request", "body": asked.body, "more_body": False}

        async def send(message: Any) -> None:
            pieces.put_nowait(message)

        task = asyncio.ensure_future(self._app(scope, receive, send))
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        last: Piece | None = None
        try:
            while (piece := await pieces.get()) is not None:
                if piece["type"] == "http.response.body" and not piece.get("more_body", False):
                    last = (
                        piece  # with it the request is over: nothing could be told of it any more
                    )
                else:
                    yield piece
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        context: Context = scope["lowbit"]
        yield {"type": TOLD, "outcome": context.outcome, "fields": fields_of(context)}
        if last is not None:
            yield last

    async def metrics(self) -> tuple[str, str]:
        """The replica's name, and what Prometheus reads of it."""
        ready = self._service.loaded
        alive = ready is not None and ready.engine.dead is None
        told = await ready.engine.metrics() if ready is not None and alive else None
        return self.name, self._service.metrics.text(told).decode()

    def check_health(self) -> None:
        """Ray replaces a replica in which this raises."""
        if self._service.failure is not None:
            raise self._service.failure

    async def __del__(self) -> None:
        """Ray calls this when it ends a replica, after its last request."""
        await asyncio.to_thread(self._service.close)


async def _end_with(ended: asyncio.Event) -> None:
    """The engine has died: so does the process, at once, so that the front asks another replica
    for what this one cannot answer any more."""
    await ended.wait()
    os._exit(1)


def _name() -> str:
    from ray import serve

    return serve.get_replica_context().replica_id.unique_id
