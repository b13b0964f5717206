"""Which requests may be answered with what another one was, and how.

An answer is kept under all that it depends on: the body without the last user message's text (or
without the prompt, where that is a text), the sampling parameters and the API key. Within that, the
text may be near another one (semantic_cache.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ..async_engine import AsyncEngine
from ..request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from ..request import Request as EngineRequest
from ..sampling.params import GREEDY
from .messages import as_conversation
from .near_texts import MAX_LETTERS
from .protocol import ChatRequest, CompletionRequest
from .semantic_cache import Answer, Hit, SemanticCache
from .settings import ServerSettings
from .text_vectors import TextVectors

if TYPE_CHECKING:
    from .frame import Context
    from .service import Service

HEADER = "x-lowbit-cache"
_NO_MATTER = {
    "model", "stream", "stream_options", "user", "metadata", "store", "service_tier",
    "safety_identifier", "prompt_cache_key", "reasoning_effort", "priority",
}  # fmt: skip
_IN_PARAMS = {f.name for f in fields(SamplingParams)} | {
    "max_completion_tokens", "response_format", "top_logprobs",
}  # fmt: skip
_KEPT = ("stop", "length")


class AnswerCache:
    """vectors: of the texts that are compared."""

    def __init__(self, settings: ServerSettings, vectors: TextVectors) -> None:
        assert settings.semantic_cache is not None
        self.vectors = vectors
        self.answers = SemanticCache(
            settings.semantic_cache, settings.semantic_cache_entries,
            settings.semantic_cache_bytes, settings.semantic_cache_ttl,
        )  # fmt: skip


@dataclass
class Lookup:
    """What one request got of the cache. state: "bypass": neither sought nor kept; "refresh": not
    sought, and kept. vector: of its text, where that may be near others."""

    state: Literal["hit", "miss", "refresh", "bypass"]
    cache: AnswerCache
    key: bytes = b""
    text: str = ""
    vector: Tensor | None = None
    hit: Hit | None = None

    @property
    def header(self) -> str:
        if self.hit is None:
            return self.state
        return f"hit; similarity={self.hit.similarity:.4f}; age={self.hit.age:.0f}"

    def replay(self, request: EngineRequest) -> RequestOutput:
        """The hit as `request`'s output."""
        assert self.hit is not None
        answer, ids = self.hit.answer, request.prompt_token_ids
        told = CompletionOutput(0, answer.text, [], answer.finish_reason, answer.stop_reason)
        metrics = RequestMetrics(len(ids), 0.0, 0, 0.0, output_tokens=answer.tokens)
        return RequestOutput(request.prompt, list(ids), [told], metrics, request.request_id)

    def keep(self, request: EngineRequest) -> None:
        """The answer of `request`, which is over: not where it failed, was left, or ended with the
        context, which another prompt may leave more room in."""
        if self.state not in ("miss", "refresh"):
            return
        (one,) = request.output().outputs
        cut = one.finish_reason == "length" and request.max_tokens < request.params.max_tokens
        if one.finish_reason in _KEPT and request.error is None and not cut:
            answer = Answer(one.text, one.finish_reason, one.stop_reason, len(one.token_ids))
            self.cache.answers.add(self.key, self.text, self.vector, answer)


async def look_up(
    service: Service,
    context: Context,
    body: ChatRequest | CompletionRequest,
    params: SamplingParams,
    control: str,
) -> Lookup | None:
    """None where there is no cache. control: the request's header Cache-Control. It takes a place,
    as a request of embeddings does. ApiError where there is none."""
    ready = service.ready()
    if ready.cache is None:
        return None
    asked = {part.strip().lower() for part in control.split(",")}
    caller = context.caller if service.settings.api_keys else ""
    nobodys = bool(service.settings.api_keys) and not caller
    text = text_of(body) if may_be_cached(body, params) else None
    if text is None or "no-store" in asked or nobodys:
        return Lookup("bypass", ready.cache)
    made = Lookup("miss", ready.cache, cache_key(body, params, caller), text)
    if "no-cache" in asked:
        made.state = "refresh"
    else:
        made.hit = ready.cache.answers.same(made.key, text)
    if made.hit is None and len(text) <= MAX_LETTERS:
        with ready.places.take(1):
            await _compare(made, ready.engine)
    if made.hit is not None:
        made.state = "hit"
        context.fields["similarity"] = round(made.hit.similarity, 4)
    if made.state != "refresh":
        service.metrics.looked_up(made.hit is not None)
    return made


async def _compare(made: Lookup, engine: AsyncEngine) -> None:
    made.vector = await made.cache.vectors.of(made.text, engine)
    if made.state == "miss":
        made.hit = made.cache.answers.near(made.key, made.text, made.vector)


def may_be_cached(body: ChatRequest | CompletionRequest, params: SamplingParams) -> bool:
    """One answer is wanted, without logprobs, and a client who set a temperature has not asked for
    a draw of its own: it is 0, or there is a seed."""
    if params.n > 1 or params.logprobs is not None or params.prompt_logprobs is not None:
        return False
    return body.temperature is None or params.temperature == GREEDY or params.seed is not None


def text_of(body: ChatRequest | CompletionRequest) -> str | None:
    """What may be near another's; None where there is no such text."""
    if isinstance(body, CompletionRequest):
        text = body.prompt if isinstance(body.prompt, str) else ""
    else:
        last = body.messages[-1]
        text = as_conversation([last])[0]["content"] if last.role == "user" else ""
    return text if text.strip() else None


def cache_key(body: ChatRequest | CompletionRequest, params: SamplingParams, caller: str) -> bytes:
    """Of all that the answer depends on beside the text. A field that is not known to make no
    difference makes one."""
    rest: dict[str, Any] = body.model_dump(
        mode="json", exclude=_NO_MATTER | _IN_PARAMS | {"messages", "prompt"}
    )
    if isinstance(body, ChatRequest):
        rest["messages"] = as_conversation(body.messages)
        rest["messages"][-1]["content"] = None
    if params.temperature == GREEDY:
        params = replace(params, seed=None)
    told = [type(body).__name__, caller, rest, asdict(params)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest()
