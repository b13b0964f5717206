"""The page at /: a conversation and live plots, one file that needs nothing from outside."""

from __future__ import annotations

import functools
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def page_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}
        return HTMLResponse(_html(), headers=headers)

    return router


@functools.cache
def _html() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")
