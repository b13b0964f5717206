"""Who may come in, how often, and with how much: before a body is parsed."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .frame import ClientGone, Context
from .keys import ApiKeys
from .limits import RateLimiter
from .settings import ServerSettings

OPEN = {"/", "/health", "/ready"}  # to everybody: they tell nothing of anybody
_UNCOUNTED = OPEN | {"/metrics"}  # by the rate


class Gate:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._keys = ApiKeys(settings.api_keys)
        self._rate = RateLimiter(settings.rate_limit) if settings.rate_limit else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._let_in(scope)
            body = await self._read(scope, receive)
        except ApiError as e:
            response = e.response()
            response.headers["connection"] = "close"  # what is left of the body is not read
            await response(scope, receive, send)
            return
        await self._app(scope, _replayed(body, receive), send)

    def _let_in(self, scope: Scope) -> None:
        context: Context = scope["lowbit"]
        path, client = scope["path"], scope.get("client")
        context.caller = client[0] if client else "unknown"
        if self._keys and path not in OPEN:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            number = self._keys.number(given.strip()) if scheme.lower() == "bearer" else None
            if number is None:
                raise ApiError(
                    401,
                    "this server wants an API key: send 'Authorization: Bearer KEY' with one that "
                    "it knows",
                    code="invalid_api_key",
                )
            context.caller = f"key {number}"
        if self._rate and path not in _UNCOUNTED and (seconds := self._rate.ask(context.caller)):
            raise ApiError(
                429,
                f"{self._settings.rate_limit} requests a minute are allowed: the next one in "
                f"{seconds:.1f} s",
                code="rate_limit_exceeded",
                retry_after=seconds + 0.5,
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body, which may be so long and take so long."""
        most, seconds = self._settings.max_body_bytes, self._settings.client_timeout
        too_large = ApiError(
            413, f"the body is larger than {most:,} bytes: send less", code="body_too_large"
        )
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise too_large

        async def read() -> bytes:
            body = bytearray()
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > most:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)

        try:
            return await asyncio.wait_for(read(), seconds)
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"the body did not come within {seconds:g} s", code="body_timeout"
            ) from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """What was read, then whatever else comes."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
