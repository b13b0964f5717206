"""Spans of requests: what is in them, what is not, and what a collector that is down costs."""

from __future__ import annotations

import importlib
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from lowbit.kernels.errors import UserError
from lowbit.runtime.server.tracing import END_SECONDS, check_tracing

from .runtime_models import FAMILIES, save_tiny
from .serving import served, until

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter"
pytest.importorskip(EXPORTER.rpartition(".")[0])

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "a prompt that nobody may read"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())


@pytest.fixture
def exporter(monkeypatch) -> Any:
    made = memory.InMemorySpanExporter()
    monkeypatch.setattr(EXPORTER, lambda endpoint: made)
    return made


def spans(server: Any, exporter: Any, number: int) -> list[Any]:
    """Of so many requests, which end a moment after their answers."""

    def finished() -> list[Any]:
        assert server.service.tracing._provider.force_flush()
        return list(exporter.get_finished_spans())

    return until(lambda: len(told := finished()) == number and told)


def test_a_span_says_all_but_the_text(folder, exporter):
    body = {"prompt": SECRET, "max_tokens": 5, "temperature": 0.5, "seed": 3, "ignore_eos": True}
    headers = {"traceparent": PARENT, "x-request-id": "mine"}
    with served(folder, otlp_traces_endpoint="http://collector/v1/traces") as server:
        server.post("/v1/completions", {**body, "stop": "secret stop"}, headers=headers)
        server.http.get("/v1/models")
        (span,) = spans(server, exporter, 1)
    told = dict(span.attributes)
    for name in ("time_to_first_token", "time_in_queue", "e2e"):
        assert 0 <= told.pop(f"gen_ai.latency.{name}") < 60
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "lowbit",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.id": "mine",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "lowbit.outcome": "answered",
    }
    assert span.name == "text_completion tiny" and span.kind.name == "SERVER"
    assert span.context.trace_id == int(PARENT.split("-")[1], 16)
    assert span.parent.span_id == int(PARENT.split("-")[2], 16)
    assert span.resource.attributes["service.name"] == "lowbit"
    assert span.status.is_ok and 0 < span.end_time - span.start_time < 60e9
    assert "nobody" not in span.to_json() and "secret stop" not in span.to_json()


def test_streams_chats_embeddings_and_errors_have_spans_too(folder, exporter, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    prompt = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    with served(folder, otlp_traces_endpoint="http://collector/v1/traces") as server:
        server.events("/v1/completions", prompt)
        server.post("/v1/embeddings", {"input": ["abc", "de"]})
        server.post("/v1/completions", {**prompt, "temperature": -1})
        server.post("/v1/completions", {**prompt, "n": 2, "temperature": 1})
        stream, embedding, wrong, two = spans(server, exporter, 4)
    assert stream.attributes["gen_ai.usage.output_tokens"] == 3 and stream.parent is None
    assert stream.resource.attributes["service.name"] == "ours"
    assert embedding.name == "embeddings tiny"
    assert embedding.attributes["gen_ai.usage.input_tokens"] == 5
    assert wrong.attributes["http.response.status_code"] == 400
    assert wrong.status.is_unset and "gen_ai.usage.output_tokens" not in wrong.attributes
    assert two.attributes["gen_ai.request.choice.count"] == 2
    assert two.attributes["gen_ai.response.finish_reasons"] == ("length", "length")


def test_a_fault_of_the_server_is_an_error(folder, exporter, monkeypatch):
    with served(folder, otlp_traces_endpoint="http://collector/v1/traces") as server:

        def broken(*args: object) -> None:
            raise RuntimeError("no")

        monkeypatch.setattr(server.service, "request", broken)
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 500
        (span,) = spans(server, exporter, 1)
    assert span.status.status_code.name == "ERROR" and span.attributes["error.type"] == "500"


def test_a_collector_that_is_down_fails_no_request_and_does_not_keep_the_server(folder):
    """Nobody listens at its port, then somebody who never answers."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        for listening in (False, True):
            if listening:
                deaf.listen()
            endpoint = f"http://127.0.0.1:{port}/v1/traces"
            with served(folder, otlp_traces_endpoint=endpoint) as server:
                for _ in range(5):
                    server.complete(max_tokens=2)
                began = time.monotonic()
            assert time.monotonic() - began < END_SECONDS + 10


def test_what_cannot_be_sent_is_refused(monkeypatch):
    with pytest.raises(UserError, match="takes a URL such as http://localhost:4318"):
        check_tracing("localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(UserError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'.*4318"):
        check_tracing("http://localhost:4317")
    monkeypatch.undo()
    check_tracing("http://localhost:4318/v1/traces")
    real = importlib.import_module

    def missing(name: str) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named '{name}'")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install 'lowbit\[otel\]'"):
        check_tracing("http://localhost:4318/v1/traces")
