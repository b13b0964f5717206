"""What a server is told when it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ...kernels.errors import UserError

_AT_LEAST = {
    "max_queue": 0, "max_body_bytes": 1, "max_prompt_tokens": 1, "max_output_tokens": 1,
    "rate_limit": 1, "semantic_cache_entries": 1, "semantic_cache_bytes": 1,
}  # fmt: skip
TOOL_PARSERS = ("auto", "hermes", "llama3", "none")
_SECONDS = ("queue_timeout", "client_timeout", "drain_timeout", "semantic_cache_ttl")


@dataclass(frozen=True)
class ServerSettings:
    """model_name: what requests call the model. host, port: 0 for any free port. api_keys: one of
    them must come with a request; none: nobody is asked. max_queue: continuations that may wait
    beside those that run. queue_timeout: seconds that a request may wait. max_body_bytes,
    max_prompt_tokens, max_output_tokens: of a request; None: as the model's context allows.
    rate_limit: requests a minute for each key, or address where there are no keys. client_timeout:
    seconds that a client may take to send its request, or to take what is sent to it.
    drain_timeout: seconds for running requests after SIGTERM. cors_origins: web pages that may ask.
    log_prompts: write prompts and answers into the log, too. tool_parser: see tools.py.
    otlp_traces_endpoint: an OpenTelemetry collector's URL for spans of requests; None: nowhere.
    semantic_cache: answers are given again to texts whose vectors have at least this cosine; None:
    never. semantic_cache_model: of these vectors, see text_vectors.py. semantic_cache_entries,
    semantic_cache_bytes, semantic_cache_ttl: answers kept, their bytes, and for how many seconds.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_queue: int = 128
    queue_timeout: float = 60.0
    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    rate_limit: int | None = None
    client_timeout: float = 60.0
    drain_timeout: float = 30.0
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False
    tool_parser: str = "auto"
    otlp_traces_endpoint: str | None = None
    semantic_cache: float | None = None
    semantic_cache_model: str | None = None
    semantic_cache_entries: int = 1024
    semantic_cache_bytes: int = 64 << 20
    semantic_cache_ttl: float = 3600.0

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} must be at least {least}, got {value}")
        if self.tool_parser not in TOOL_PARSERS:
            raise UserError(
                f"tool_parser must be one of {', '.join(TOOL_PARSERS)}, got '{self.tool_parser}'"
            )
        least = self.semantic_cache
        if least is not None and not 0 < least <= 1:
            raise UserError(f"semantic_cache must be above 0 and at most 1, got {least}")
        if least is None and self.semantic_cache_model is not None:
            raise UserError("semantic_cache_model is for a semantic cache: say --semantic-cache")
        for name in _SECONDS:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UserError(f"{name} must be a number of seconds above 0, got {value}")
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"port must be from 0 (any that is free) to 65535, got {self.port}")

    def told(self) -> dict[str, object]:
        """For the log: all but the keys."""
        told: dict[str, object] = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name != "api_keys"
        }
        return {**told, "api_keys": len(self.api_keys)}
