"""Requests of one body on their way through the engine, for as long as their client is there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...kernels.errors import UserError
from ..request import CompletionOutput, RequestFailed, RequestOutput
from ..request import Request as EngineRequest
from .answer_cache import HEADER, Lookup
from .answers import CacheHit
from .errors import ApiError, as_api_error
from .frame import ClientGone, Context
from .logs import log
from .service import Service

T = TypeVar("T")
Events = AsyncGenerator[bytes, None]

DONE = b"data: [DONE]\n\n"


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; when the client goes, it is cancelled, and ClientGone raised."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Generation:
    """The engine's requests of one body. name, created: of the answer. lookup: in the cache of
    answers; the one request of a hit is not run. ApiError where there is no engine to take them."""

    def __init__(
        self,
        service: Service,
        context: Context,
        name: str,
        requests: Sequence[EngineRequest],
        lookup: Lookup | None = None,
    ) -> None:
        self.service, self.context, self.requests = service, context, requests
        self.name, self.created, self.model = name, int(time.time()), service.settings.model_name
        self._ready, context.asked = service.ready(), requests
        self.tokenizer = self._ready.engine.llm.tokenizer
        self._places = sum(r.params.n for r in requests)
        self._lookup = lookup
        self._hit = None if lookup is None else lookup.hit

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer."""
        return {} if self._lookup is None else {HEADER: self._lookup.header}

    @property
    def cache_hit(self) -> CacheHit | None:
        """For the answer's body."""
        if self._hit is None:
            return None
        return CacheHit(similarity=round(self._hit.similarity, 4), age=round(self._hit.age, 1))

    async def last(self) -> list[RequestOutput]:
        """What has come of each."""
        if self._hit is not None:
            return [self._replay()]
        with self._ready.places.take(self._places):
            tasks = [asyncio.ensure_future(self._last(request)) for request in self.requests]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def pieces(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(which request, what is new of it), as they come."""
        if self._hit is not None:
            yield 0, self._replay()
            return
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException]] = asyncio.Queue()
        with self._ready.places.take(self._places):
            tasks = [
                asyncio.ensure_future(self._pump(number, request, queue))
                for number, request in enumerate(self.requests)
            ]
            going = len(tasks)
            try:
                while going:
                    number, piece = await queue.get()
                    if isinstance(piece, BaseException):
                        raise piece
                    going -= piece.finished
                    yield number, piece
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _last(self, request: EngineRequest) -> RequestOutput:
        async with contextlib.aclosing(self._run(request, only_last=True)) as outputs:
            return [output async for output in outputs][-1]

    async def _pump(self, number: int, request: EngineRequest, queue: asyncio.Queue[Any]) -> None:
        try:
            async with contextlib.aclosing(self._run(request, delta=True)) as outputs:
                async for output in outputs:
                    queue.put_nowait((number, output))
        except Exception as e:
            queue.put_nowait((number, e))

    async def _run(
        self, request: EngineRequest, **how: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        timeout = self.service.settings.queue_timeout
        outputs = self._ready.engine.run(request, start_within=timeout, **how)
        refused = False
        try:
            async for output in outputs:
                yield output
        except UserError as e:
            refused = not isinstance(e, RequestFailed)
            if refused:
                raise ApiError(422, str(e), code="never_fits") from e
            raise
        finally:
            await outputs.aclose()
            if not refused:
                self._note(request)

    def _note(self, request: EngineRequest) -> None:
        """`request` is over: for the log and the metrics."""
        told = request.output(delta=True)
        self.context.told.append(told)
        self.service.metrics.finished(told)
        if self._lookup is not None:
            self._lookup.keep(request)
        self._note_texts(request, [c.text.text for c in request.continuations])

    def _replay(self) -> RequestOutput:
        """The hit, as the request's output."""
        assert self._lookup is not None
        (request,) = self.requests
        told = self._lookup.replay(request)
        self.context.told.append(told)
        self._note_texts(request, [c.text for c in told.outputs])
        return told

    def _note_texts(self, request: EngineRequest, answers: list[str]) -> None:
        """For the log, where it may have them."""
        if self.service.settings.log_prompts:
            texts = {"prompt": request.prompt or request.prompt_token_ids, "answers": answers}
            self.context.fields.setdefault("texts", []).append(texts)


def news(output: RequestOutput, quiet: bool) -> list[CompletionOutput]:
    """The continuations that have something new. quiet: text and ends alone are news, not tokens
    whose text is not certain yet."""
    return [c for c in output.outputs if c.text or c.finish_reason or (c.token_ids and not quiet)]


def sse(piece: BaseModel) -> bytes:
    """As a server-sent event."""
    return b"data: " + piece.model_dump_json().encode() + b"\n\n"


async def stream(request: Request, events: Events, headers: Mapping[str, str]) -> Response:
    """An answer that comes in pieces. What is wrong before the first of them is raised."""

    async def begin() -> bytes:
        return await anext(events)

    try:
        first = await until_gone(request.receive, begin())
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, Context.of(request), headers)


class EventStream(Response):
    """Server-sent events, until their end or the client's."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: Events, context: Context, headers: Mapping[str, str]
    ) -> None:
        own = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers={**own, **headers})
        del self.headers["content-length"]
        self._first, self._events, self._context = first, events, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events):
                await until_gone(receive, self._send_all(send))
        except ClientGone:  # after the answer has begun there is no other
            self._context.outcome = "client_gone"

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send(_part(self._first))
        try:
            async for event in self._events:
                await send(_part(event))
        except Exception as e:
            if isinstance(e, ClientGone):
                raise
            self._context.outcome = "failed"
            if not isinstance(e, ApiError | UserError):
                log("fault", logging.ERROR, e, request_id=self._context.request_id)
            body = as_api_error(e).response().body
            await send(_part(b"data: " + bytes(body) + b"\n\n"))
        await send(_part(DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _part(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}
