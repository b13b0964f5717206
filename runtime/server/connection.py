"""Connections on which nobody says what they want are ended: a request's header has to come in
time, as its body has (gate.py)."""

from __future__ import annotations

import asyncio
from typing import Any


def make_protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's own, which waits for ever for a header. seconds: that it may take, from the
    connection's beginning or the header's."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    http: Any = AutoHTTPProtocol

    class Protocol(http):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._expect_header()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._has_request:
                self._stop()
            else:
                self._expect_header()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        @property
        def _has_request(self) -> bool:
            """One is being answered."""
            return self.cycle is not None and not self.cycle.response_complete

        def _expect_header(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(seconds, self._give_up)

        def _give_up(self) -> None:
            self._timer = None
            if not self._has_request:
                self.transport.close()

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Protocol
