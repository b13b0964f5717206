"""How the server is: for probes, Prometheus and clients that ask which model there is."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

from .answers import Model, Models, as_json
from .errors import ERRORS, ApiError
from .service import Service


def status_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get("/health", responses={503: ERRORS[503]})
    async def health() -> Response:
        """200 as long as the engine lives or is still to come."""
        if service.state == "dead":
            raise ApiError(503, "the engine has ended", code="dead")
        return JSONResponse({"status": service.state})

    @router.get("/ready", responses={503: ERRORS[503]})
    async def ready() -> Response:
        """200 when the model is warm and requests are taken."""
        service.ready()
        return JSONResponse({"status": "ready"})

    @router.get("/version")
    async def versions() -> Response:
        return JSONResponse({"version": version("lowbit")})

    @router.get("/v1/models", response_model=Models)
    async def models() -> Response:
        return as_json(Models(data=[_model(service)]))

    @router.get("/v1/models/{name:path}", response_model=Model, responses={404: ERRORS[404]})
    async def model(name: str) -> Response:
        service.check_model(name)
        return as_json(_model(service))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """In Prometheus' text format."""
        loaded = service.loaded
        alive = loaded is not None and loaded.engine.dead is None
        told = await loaded.engine.metrics() if loaded is not None and alive else None
        return Response(service.metrics.text(told), media_type="text/plain; version=0.0.4")

    return router


def _model(service: Service) -> Model:
    loaded = service.loaded
    most = None if loaded is None else loaded.engine.llm.max_model_len
    return Model(id=service.settings.model_name, created=service.created, max_model_len=most)
