"""OpenTelemetry spans of requests: one for each that generates or embeds, without any text of it.

Names are those of the semantic conventions for generative AI, and of vLLM where they have none. A
span is made when its request is over and exported from a thread of its own, in batches: a collector
that does not answer costs spans, never a request's time.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ...kernels.errors import UserError

if TYPE_CHECKING:
    from .frame import Context

OPERATIONS = {
    "/v1/completions": "text_completion", "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
}  # fmt: skip
END_SECONDS = 2.0  # for what is not exported yet when the server ends
_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def check_tracing(endpoint: str) -> None:
    """UserError where spans cannot be sent there."""
    for package in _PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as e:
            raise UserError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({e}): pip install 'lowbit[otel]'"
            ) from e
    if not endpoint.startswith(("http://", "https://")):
        raise UserError(
            f"--otlp-traces-endpoint takes a URL such as http://localhost:4318/v1/traces, got "
            f"'{endpoint}'"
        )
    for name in _PROTOCOLS:
        if (told := os.environ.get(name, "http/protobuf")) != "http/protobuf":
            raise UserError(
                f"{name} is '{told}', and traces are sent by http/protobuf alone: unset it, and "
                "give the collector's HTTP port (4318) with --otlp-traces-endpoint"
            )


class Tracing:
    """endpoint: an OTLP collector's URL for traces. The variables OTEL_* say the rest: sampler,
    headers, resource, sizes of batches."""

    def __init__(self, model_name: str, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.version": version("lowbit")})
        if "OTEL_SERVICE_NAME" not in os.environ:
            named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
            resource = resource if named else resource.merge(Resource({"service.name": "lowbit"}))
        self._model = model_name
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lowbit.server", version("lowbit"))

    def finished(
        self, path: str, headers: Mapping[str, str], context: Context, seconds: tuple[float, float]
    ) -> None:
        """A request is over. headers: its own, of which `traceparent` names the span above it.
        seconds: when it began and ended, since the epoch."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        operation = OPERATIONS.get(path)
        if operation is None:
            return
        began, ended = (int(at * 1e9) for at in seconds)
        span = self._tracer.start_span(
            f"{operation} {self._model}", extract(headers), SpanKind.SERVER, start_time=began,
            attributes={
                "gen_ai.operation.name": operation, "gen_ai.provider.name": "lowbit",
                "gen_ai.request.model": self._model, "gen_ai.response.model": self._model,
                **_http(path, context), **_asked(context), **_told(context),
                "gen_ai.latency.e2e": seconds[1] - seconds[0],
            },
        )  # fmt: skip
        failed = context.outcome in ("failed", "fault", "shut_down")
        if failed or (context.status or 500) >= 500:
            span.set_attribute("error.type", str(context.status or context.outcome))
            span.set_status(Status(StatusCode.ERROR, context.outcome))
        span.end(ended)

    def close(self) -> None:
        """Export what is left, but for END_SECONDS at most."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(END_SECONDS)


def _http(path: str, context: Context) -> dict[str, Any]:
    return {
        "http.request.method": "POST", "url.path": path, "gen_ai.request.id": context.request_id,
        **({} if context.status is None else {"http.response.status_code": context.status}),
        "lowbit.outcome": context.outcome,
    }  # fmt: skip


def _asked(context: Context) -> dict[str, Any]:
    """Of the sampling parameters of what was asked for."""
    if not context.asked:
        return {}
    first = context.asked[0]
    params = first.params
    named = {
        "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k,
        "frequency_penalty": params.frequency_penalty, "choice.count": params.n,
        "presence_penalty": params.presence_penalty, "max_tokens": first.max_tokens,
        "seed": params.seed,
    }  # fmt: skip
    return {f"gen_ai.request.{name}": value for name, value in named.items() if value is not None}


def _told(context: Context) -> dict[str, Any]:
    """Of what has come of its prompts."""
    told = context.told
    if not told:
        tokens = context.fields.get("prompt_tokens")  # of texts that were embedded
        return {} if tokens is None else {"gen_ai.usage.input_tokens": tokens}
    metrics = [output.metrics for output in told]
    first = [m.ttft for m in metrics if m.ttft is not None]
    queued = [m.queue_seconds for m in metrics if m.queue_seconds is not None]
    return {
        "gen_ai.usage.input_tokens": sum(len(o.prompt_token_ids) for o in told),
        "gen_ai.usage.output_tokens": sum(m.output_tokens for m in metrics),
        "gen_ai.usage.cache_read.input_tokens": sum(m.cached_tokens for m in metrics),
        "gen_ai.response.finish_reasons": [
            c.finish_reason for o in told for c in o.outputs if c.finish_reason
        ],
        **({"gen_ai.latency.time_to_first_token": min(first)} if first else {}),
        **({"gen_ai.latency.time_in_queue": max(queued)} if queued else {}),
    }
