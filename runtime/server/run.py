"""A process that serves: its socket, its signals and its end."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from ...kernels.errors import UserError
from .settings import ServerSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ..llm import LLM

_PACKAGES = ("fastapi", "uvicorn", "pydantic", "prometheus_client")
SEND_BUFFER = 64 << 10  # bytes of a connection that wait in the kernel for a slow reader
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Served(Protocol):
    """A Service, or the Front of replicas. failure: what has ended it."""

    settings: ServerSettings
    failure: BaseException | None

    def drain(self) -> None:
        """Take no more requests."""

    def close(self) -> None:
        """End whatever still runs."""


def serve(settings: ServerSettings, load: Callable[[], LLM]) -> None:
    """Serve until a signal: the first ends it when what runs is done, or after drain_timeout; the
    second at once. load: makes the model, while the server answers that it is not ready.

    UserError where the extra is missing, the address cannot be had, or the model cannot be loaded;
    what the engine died of is raised.
    """
    check_packages()
    from .service import Service

    listening = bind(settings.host, settings.port, settings.client_timeout)
    service = Service(settings, load)
    run_until_signal(service, make_server(service), listening)


def run_until_signal(service: Served, server: Any, listening: socket.socket) -> None:
    """server: of make_server. What has ended the service is raised."""
    from .logs import log, set_up_logs

    set_up_logs()
    log("listening", address=address_of(listening), settings=service.settings.told())
    server.run(sockets=[listening])
    service.close()
    if service.failure is not None:
        raise service.failure
    log("ended")


def check_packages() -> None:
    for package in _PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as e:
            raise UserError(
                f"the server needs the package {package} ({e}): pip install 'lowbit[serve]'"
            ) from e


def bind(host: str, port: int, client_timeout: float) -> socket.socket:
    """A socket there, whose connections end when their other side does not answer for so many
    seconds. UserError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as e:
        raise UserError(
            f"cannot listen at {host}, port {port}: {e.strerror}; give another --host or --port"
        ) from e
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    seconds = max(1, round(client_timeout))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", seconds), ("TCP_KEEPINTVL", max(1, seconds // 4)), ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 1000 * seconds), ("TCP_NODELAY", 1),
    ):  # fmt: skip
        if hasattr(socket, option):  # what the listening socket has, its connections inherit
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(service: Served, make: Callable[..., ASGIApp] | None = None) -> Any:
    """uvicorn's, with our signals. make: the application, of `service` and what stops the server;
    make_app if not said."""
    import uvicorn

    from .app import make_app
    from .connection import make_protocol
    from .logs import log

    make = make_app if make is None else make

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:
                log("ended at once", logging.WARNING)
                os._exit(_CODES[signal.Signals(sig)])
            service.drain()
            log("draining", seconds=service.settings.drain_timeout)
            self.should_exit = True

    server: Server

    def stop() -> None:
        server.should_exit = True

    drain = max(1, round(service.settings.drain_timeout))
    config = uvicorn.Config(
        make(service, stop), lifespan="on", log_config=None, access_log=False,
        server_header=False, timeout_graceful_shutdown=drain,
        http=make_protocol(service.settings.client_timeout),
    )  # fmt: skip
    server = Server(config)
    return server
