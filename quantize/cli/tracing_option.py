"""The option of `quantize serve` for traces."""

from __future__ import annotations

from typing import Annotated

import typer

TracesEndpoint = Annotated[
    str | None,
    typer.Option(
        help="URL to which OpenTelemetry spans of requests go, as"
        " http://localhost:4318/v1/traces; no prompt text is in them.",
        rich_help_panel="Access and logs",
    ),
]


def check_endpoint(endpoint: str | None) -> None:
    """UserError where spans cannot be sent there."""
    if endpoint is not None:
        from ...runtime.server.tracing import check_tracing

        check_tracing(endpoint)
