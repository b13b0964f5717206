"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}} with a status that says
whose fault it is."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...kernels.errors import UserError
from ..request import RequestFailed
from ..sampling.params import ParamError
from ..streams import EngineDeadError, NotStarted
from .validation import what_is_wrong

MAX_MESSAGE = 1000  # letters
RETRY_SECONDS = 1  # what a client is told to wait where nobody can know

_TYPES = {
    401: "authentication_error", 403: "permission_error", 429: "rate_limit_error",
    500: "server_error", 503: "server_error",
}  # fmt: skip


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error} for status in (400, 401, 404, 408, 413, 415, 422, 429, 500, 503)
}

STREAMED: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
}  # of routes that can stream, beside their model


class ApiError(Exception):
    """An answer that is an error. retry_after: seconds after which it may go well."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        message = self.message
        if len(message) > MAX_MESSAGE:  # which may quote what was sent
            message = f"{message[:MAX_MESSAGE]}..."
        told = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}

    def response(self) -> Response:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        text = json.dumps(self.body())  # ASCII: a message may quote half a character
        return Response(text, self.status, headers, "application/json")


def as_api_error(error: Exception) -> ApiError:
    """What is told of `error`. What is no fault of the client's is told without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), code="model_failed")
    if isinstance(error, ParamError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, NotStarted):
        told = f"{error}: the server is busy"
        return ApiError(503, told, code="queue_timeout", retry_after=RETRY_SECONDS)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine has ended", code="engine_dead", retry_after=RETRY_SECONDS)
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return _unread(error)
    return ApiError(500, "internal error: the log has it under this request's id")


def _invalid(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    if isinstance(error.body, bytes):
        return ApiError(
            415, "the body has to come as JSON: send the header 'Content-Type: application/json'",
            code="no_json",
        )  # fmt: skip
    wrong = what_is_wrong(error.errors(), error.body)
    return ApiError(400, wrong.message, code=wrong.code, param=wrong.field or None)


def _unread(error: HTTPException) -> ApiError:
    """What the framework says, who tells not what has kept it from reading a body."""
    cause = error.__cause__
    if isinstance(cause, UnicodeDecodeError):
        told = f"the body is no UTF-8: {cause.reason} at byte {cause.start}"
    elif isinstance(cause, RecursionError):
        told = "the body's lists and objects are too deep in each other: make it flatter"
    elif isinstance(cause, ValueError):
        told = f"the body cannot be read: {cause}"
    else:
        told = str(error.detail)
    return ApiError(error.status_code, told)


def add_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    for kind in (
        ApiError, UserError, NotStarted, EngineDeadError, RequestValidationError, HTTPException,
        Exception,
    ):  # fmt: skip
        app.add_exception_handler(kind, answer)
