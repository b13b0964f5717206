"""The routes put together, and what stands around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Lifespan

from .answer_cache import HEADER as CACHE_HEADER
from .chat import chat_routes
from .completions import completion_routes
from .embeddings import embedding_routes
from .errors import add_error_handlers
from .frame import ClientGone, Context, Frame
from .gate import Gate
from .metrics import ServerMetrics
from .page import page_routes
from .service import Service
from .settings import ServerSettings
from .status import status_routes
from .tokens import token_routes
from .tracing import Tracing


def make_app(service: Service, stop: Callable[[], None]) -> ASGIApp:
    """stop: see Service.begin."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.begin(stop)
        yield

    routes = make_routes(service, lifespan)
    return enclosed(routes, service.metrics, service.settings, service.tracing)


def make_replica_app(service: Service) -> ASGIApp:
    """Without a gate, which stands at the front that asks it."""
    timeout = service.settings.client_timeout
    return Frame(make_routes(service), service.metrics, timeout, service.tracing)


def enclosed(
    routes: ASGIApp,
    metrics: ServerMetrics,
    settings: ServerSettings,
    tracing: Tracing | None = None,
) -> ASGIApp:
    """What stands around a server's routes."""
    app: ASGIApp = Gate(routes, settings)
    if settings.cors_origins:
        app = CORSMiddleware(
            app, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"],
            allow_headers=["*"], expose_headers=["x-request-id", "retry-after", CACHE_HEADER],
        )  # fmt: skip
    return Frame(app, metrics, settings.client_timeout, tracing)


def make_routes(service: Service, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    app = FastAPI(
        title="lowbit", version=version("lowbit"), lifespan=lifespan, docs_url=None,
        redoc_url=None, description="A language model over OpenAI's interface.",
    )  # fmt: skip
    add_error_handlers(app)
    app.add_exception_handler(ClientGone, _gone)
    for routes in (
        status_routes, completion_routes, chat_routes, embedding_routes, token_routes,
    ):  # fmt: skip
        app.include_router(routes(service))
    app.include_router(page_routes())
    return app


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads it; the log and the metrics have the status by which proxies say so."""
    Context.of(request).outcome = "client_gone"
    return Response(status_code=499)
