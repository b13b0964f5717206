"""Around every request: its id, the line in the log, and the end of clients that do not read.

No text of a prompt or an answer gets into the log unless the settings say so.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..request import Request as EngineRequest
from ..request import RequestOutput
from .errors import ApiError, as_api_error
from .logs import log
from .metrics import ServerMetrics
from .tracing import Tracing

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_QUIET = {"/health", "/ready", "/metrics"}  # asked every few seconds


class ClientGone(Exception):
    """Nobody is there any more to get an answer."""


@dataclass
class Context:
    """What log and traces say of a request. caller: the number of its API key, or an address.
    asked: what its prompts have become for the engine; told: what has come of them."""

    request_id: str
    caller: str = ""
    status: int | None = None
    outcome: str = "answered"
    asked: Sequence[EngineRequest] = ()
    told: list[RequestOutput] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> Context:
        return request.scope["lowbit"]


class Frame:
    """An ASGI application around another one."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        client_timeout: float,
        tracing: Tracing | None = None,
    ) -> None:
        self._app, self._metrics, self._client_timeout = app, metrics, client_timeout
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        context = Context(given if _ID.fullmatch(given) else uuid.uuid4().hex)
        scope["lowbit"] = context
        started = time.perf_counter()
        try:
            await self._app(scope, receive, self._send(context, send))
        except ClientGone:
            context.outcome, context.status = "client_gone", context.status or 499
        except asyncio.CancelledError:  # by uvicorn, when the time to drain is over
            context.outcome = "shut_down"
            if context.status is None:
                late = ApiError(503, "the server has ended", code="shut_down", retry_after=5)
                await late.response()(scope, receive, self._send(context, send))
        except Exception as e:  # the last resort: another request must not suffer from it
            if isinstance(e.__cause__, ClientGone):  # told so by who could not answer any more
                context.outcome = "client_gone"
                return
            context.outcome = "fault"
            log("fault", logging.ERROR, e, request_id=context.request_id)
            if context.status is None:
                await as_api_error(e).response()(scope, receive, self._send(context, send))
        finally:
            seconds = time.perf_counter() - started
            self._metrics.answered(scope["path"], context.status, seconds)
            self._log(scope, context, seconds)
            if self._tracing is not None:
                now = time.time()
                self._tracing.finished(
                    scope["path"], Headers(scope=scope), context, (now - seconds, now)
                )

    def _send(self, context: Context, send: Send) -> Send:
        loop = asyncio.get_running_loop()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = context.request_id
            task, late = asyncio.current_task(), False

            def give_up() -> None:
                nonlocal late
                late = True
                if task is not None:
                    task.cancel()

            timer = loop.call_later(self._client_timeout, give_up)
            try:
                await send(message)  # waits while the client does not read
            except asyncio.CancelledError:
                if late:
                    context.fields["slow_client"] = True
                    raise ClientGone from None
                raise
            finally:
                timer.cancel()

        return timed

    def _log(self, scope: Scope, context: Context, seconds: float) -> None:
        if scope["path"] in _QUIET and context.status in (200, 503):
            return
        log(
            "request", request_id=context.request_id, method=scope["method"], path=scope["path"],
            status=context.status, outcome=context.outcome, caller=context.caller,
            seconds=round(seconds, 4), **fields_of(context),
        )  # fmt: skip


def fields_of(context: Context) -> dict[str, Any]:
    """What the log says of the engine's part."""
    told = context.told
    if not told:
        return context.fields
    first = [o.metrics.ttft for o in told if o.metrics.ttft is not None]
    return {
        **context.fields,
        "prompt_tokens": sum(len(o.prompt_token_ids) for o in told),
        "completion_tokens": sum(o.metrics.output_tokens for o in told),
        "cached_tokens": sum(o.metrics.cached_tokens for o in told),
        "ttft": round(min(first), 4) if first else None,
        "finish_reasons": [c.finish_reason for o in told for c in o.outputs],
    }
