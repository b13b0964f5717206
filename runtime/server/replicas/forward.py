"""The front's application: it asks a replica, and another one where that is lost before anything of
its answer was sent."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from ..errors import ApiError, as_api_error
from ..frame import ClientGone, Context
from ..generation import DONE, until_gone
from ..logs import log
from .asked import Asked
from .front import Front
from .metrics import merged
from .replica import TOLD

ATTEMPTS = 3  # a request that ends processes must not end all of them again and again
METRICS_SECONDS = 10.0


class Lost(Exception):
    """A replica has gone without an answer's end."""


class Forward:
    """An ASGI application. Nothing but /health, /ready and /metrics is answered here."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._here = {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: Context = scope["lowbit"]
        try:
            if scope["path"] in self._here and scope["method"] in ("GET", "HEAD"):
                response = await self._here[scope["path"]]()
                await response(scope, receive, send)
                return
            self._front.ready()
            body = (await receive())["body"]  # whole: the gate has read it
            asked = Asked.of(scope, body, context.request_id)
            await until_gone(receive, self._answer(asked, context, send))
        except ApiError as e:
            await e.response()(scope, receive, send)
        except ClientGone:
            context.outcome, context.status = "client_gone", context.status or 499

    async def _answer(self, asked: Asked, context: Context, send: Send) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            answer = _Answer(self._front, asked, context, send)
            try:
                await answer.relay()
                return
            except Lost as e:
                log(
                    "replica lost", logging.ERROR, request_id=context.request_id, attempt=attempt,
                    replica=context.fields.get("replica"), begun=answer.begun, reason=str(e),
                )  # fmt: skip
                if answer.begun:
                    await answer.break_off()
                    return
                context.fields["retries"] = attempt
        raise ApiError(
            503, f"{ATTEMPTS} replicas were lost, one after another, with this request",
            code="replica_lost", retry_after=5,
        )  # fmt: skip

    async def _health(self) -> Any:
        state = self._front.state
        if state == "ready":
            seen = await self._front.look()
            state = "dead" if seen.failed and not seen.running else state
        if state == "dead":
            raise ApiError(503, "no replica runs, and none can be started", code="dead")
        return JSONResponse({"status": state})

    async def _ready(self) -> Any:
        self._front.ready()
        seen = await self._front.look()
        if not seen.running:
            raise ApiError(503, "no replica runs at the moment", code="loading", retry_after=5)
        return JSONResponse({"status": "ready", "replicas": seen.running})

    async def _metrics(self) -> Any:
        told: list[Any] = []
        if self._front.state == "ready":
            broadcast = self._front.handle.broadcast("metrics")
            told = await broadcast.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        texts = dict(pair for pair in told if isinstance(pair, tuple))
        text = merged(self._front.metrics.text(None).decode(), texts)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


class _Answer:
    """One attempt. begun: the client has got something; whole: all of it."""

    def __init__(self, front: Front, asked: Asked, context: Context, send: Send) -> None:
        self._front, self._asked, self._context, self._send = front, asked, context, send
        self._start: Message | None = None  # is held until the first part of the body comes
        self.begun = self.whole = False

    async def relay(self) -> None:
        """Lost where the replica has gone."""
        from ray.exceptions import RayError, RayTaskError

        pieces = self._front.handle.ask.remote(self._asked)
        ended = False
        try:
            await self._accepted(pieces)
            async for piece in pieces:
                await self._pass(piece)
                if self.whole:  # not a moment later: the client may go
                    break
            ended = True
        except RayError as e:
            if isinstance(e, RayTaskError):
                raise  # the replica lives: the fault is ours
            raise Lost(str(e).partition("\n")[0]) from e
        finally:
            if not ended:
                pieces.cancel()

    async def _accepted(self, pieces: Any) -> None:
        """A replica has it."""
        seconds = self._front.settings.queue_timeout
        try:
            self._context.fields["replica"] = await asyncio.wait_for(anext(pieces), seconds)
        except asyncio.TimeoutError:
            raise ApiError(
                503, f"no replica has taken the request within {seconds:g} s",
                code="queue_timeout", retry_after=5,
            ) from None  # fmt: skip

    async def _pass(self, piece: Message) -> None:
        if piece["type"] == TOLD:
            self._context.outcome = piece["outcome"]
            self._context.fields |= piece["fields"]
        elif piece["type"] == "http.response.start":
            self._start = piece
        else:
            if self._start is not None:
                start, self._start = self._start, None
                self.begun = True
                await self._send(start)
            await self._send(piece)
            self.whole = not piece.get("more_body", False)

    async def break_off(self) -> None:
        """End a stream whose replica has gone: no other can go on with it."""
        self._context.outcome = "failed"
        lost = ApiError(503, "the replica that wrote this answer is lost", code="replica_lost")
        body = b"data: " + bytes(as_api_error(lost).response().body) + b"\n\n" + DONE
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
