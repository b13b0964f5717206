"""What Prometheus reads, under vLLM's names where the meaning is the same.

Gauges are read from the engine when they are asked for; counters and histograms take each request
when it is over.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..metrics import EngineMetrics
from ..request import RequestOutput

_STEPS = (1, 2, 5)
SHORT = tuple(s * 10.0**e for e in range(-3, 2) for s in _STEPS)  # seconds: 1 ms to 50 s
LONG = tuple(s * 10.0**e for e in range(-2, 4) for s in _STEPS)  # 10 ms to 5,000 s
TOKENS = tuple(float(s * 10**e) for e in range(6) for s in _STEPS)
ROUTES = {
    "/", "/health", "/ready", "/version", "/metrics", "/tokenize", "/detokenize", "/v1/models",
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings",
}  # fmt: skip


class ServerMetrics:
    """Of one model. Paths that are no route are counted together."""

    def __init__(self, model_name: str) -> None:
        self._registry, self._model = CollectorRegistry(), model_name
        self._counted = 0  # output tokens of the engine
        self._running = self._gauge("num_requests_running", "Requests that run.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for their turn.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "KV blocks in use; 1 is all of them.")
        self._preemptions = self._counter("num_preemptions", "Requests that gave up their blocks.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked for in it.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens that it had.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success", "Continuations that have ended.",
            ["model_name", "finished_reason"], registry=self._registry,
        )  # fmt: skip
        self._ttft = self._histogram("time_to_first_token_seconds", "To the first token.", LONG)
        self._itl = self._histogram("inter_token_latency_seconds", "Between two tokens.", SHORT)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean seconds a token after the first.", SHORT
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", LONG)
        self._queue = self._histogram("request_queue_time_seconds", "Before the first step.", LONG)
        self._prompts = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._outputs = self._histogram("request_generation_tokens", "Tokens generated.", TOKENS)
        self._cache = Counter(
            "lowbit:semantic_cache_lookups", "Requests whose text was sought among answered ones.",
            ["outcome"], registry=self._registry,
        )  # fmt: skip
        self._http = Counter(
            "lowbit:http_requests", "HTTP requests by path and status.", ["path", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._http_seconds = Histogram(
            "lowbit:http_request_seconds", "From headers to the last byte of the answer.",
            ["path"], buckets=LONG, registry=self._registry,
        )  # fmt: skip

    def answered(self, path: str, status: int | None, seconds: float) -> None:
        """An HTTP request is over. status: None where the client was gone before."""
        path = path if path in ROUTES else "other"
        self._http.labels(path, "none" if status is None else str(status)).inc()
        self._http_seconds.labels(path).observe(seconds)

    def finished(self, output: RequestOutput) -> None:
        """A request of the engine is over, as its last output says."""
        told = output.metrics
        self._prompt.inc(told.prefill_tokens)
        self._queries.inc(told.prefill_tokens)
        self._hits.inc(told.cached_tokens)
        self._preemptions.inc(told.preemptions)
        self._prompts.observe(told.prefill_tokens)
        self._outputs.observe(told.output_tokens)
        for continuation in output.outputs:
            self._success.labels(self._model, continuation.finish_reason or "abort").inc()
        for histogram, value in (
            (self._ttft, told.ttft), (self._tpot, told.tpot), (self._e2e, told.seconds),
            (self._queue, told.queue_seconds),
        ):  # fmt: skip
            if value is not None:
                histogram.observe(value)
        for seconds in told.itl:
            self._itl.observe(seconds)

    def looked_up(self, hit: bool) -> None:
        """An answer was sought in the semantic cache."""
        self._cache.labels("hit" if hit else "miss").inc()

    def warm(self, output_tokens: int) -> None:
        """The engine has made so many tokens before anybody asked."""
        self._counted = output_tokens

    def text(self, engine: EngineMetrics | None) -> bytes:
        """In Prometheus' text format. engine: what it is doing now; None: there is none."""
        if engine:
            self._generated.inc(engine.output_tokens - self._counted)
            self._counted = engine.output_tokens
        self._running.set(engine.running if engine else 0)
        self._waiting.set(engine.waiting if engine else 0)
        self._kv_usage.set((engine.kv_usage if engine else None) or 0.0)
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        made = Gauge(f"vllm:{name}", text, ["model_name"], registry=self._registry)
        return made.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        made = Counter(f"vllm:{name}", text, ["model_name"], registry=self._registry)
        return made.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(
            f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self._registry
        )
        return made.labels(self._model)
