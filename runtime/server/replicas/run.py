"""A server whose engines are replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ..run import bind, check_packages, make_server, run_until_signal
from ..settings import ServerSettings
from .cluster import check_ray, connect, share_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ...llm import LLM
    from .front import Front


class Replication(NamedTuple):
    """replicas: how many. address: of a Ray cluster; None: this machine alone. gpus, memory: what
    each takes at least (bytes). max_num_seqs: of each engine."""

    replicas: int
    address: str | None
    gpus: int
    memory: int
    max_num_seqs: int


def serve_replicas(
    settings: ServerSettings, load: Callable[[], LLM], replication: Replication
) -> None:
    """The same as `serve`; load: is called in each replica's process. UserError also where Ray is
    missing, or its machines have no room for so many replicas."""
    check_packages()
    check_ray()
    from .front import Front

    listening = bind(settings.host, settings.port, settings.client_timeout)
    machines = connect(replication.address)
    share = share_of(replication.replicas, machines, replication.gpus, replication.memory)
    front = Front(settings, load, replication.replicas, share, replication.max_num_seqs)
    run_until_signal(front, make_server(front, make_front_app), listening)


def make_front_app(front: Front, stop: Callable[[], None]) -> ASGIApp:
    """stop: see Service.begin."""
    from starlette.applications import Starlette
    from starlette.routing import Mount

    from ..app import enclosed
    from .forward import Forward

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        front.begin(stop)
        yield

    routes = Starlette(routes=[Mount("/", app=Forward(front))], lifespan=lifespan)
    return enclosed(routes, front.metrics, front.settings)
