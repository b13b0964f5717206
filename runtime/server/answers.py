"""Bodies of answers, as OpenAI has them. stop_reason is vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, Field
from starlette.responses import Response

from ..request import CompletionOutput, RequestOutput
from .token_texts import Entry, TokenTexts


def _is_none(value: object) -> bool:
    return value is None


LEAST_LOGPROB = -9999.0
LEFT_OUT = Field(default=None, exclude_if=_is_none)  # where there is nothing to say


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(BaseModel):
    """tokens: their sum is the choice's text; what is not in it, a special token or what a stop
    string has cut off, is empty here. text_offset: where each begins in it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = LEFT_OUT


class CacheHit(BaseModel):
    """The answer was another request's, of a text this near. age: seconds since it was made."""

    similarity: float
    age: float


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = LEFT_OUT
    semantic_cache: CacheHit | None = LEFT_OUT


class TopLogprob(BaseModel):
    """bytes: what the token adds to the text in UTF-8: none, where it is a special one or the first
    part of a character, whose last part adds all of it."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]


class CalledFunction(BaseModel):
    name: str
    arguments: str


class CalledTool(BaseModel):
    """index: in pieces of a stream alone."""

    index: int | None = LEFT_OUT
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[CalledTool] | None = LEFT_OUT


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None = LEFT_OUT


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    semantic_cache: CacheHit | None = LEFT_OUT


class Delta(BaseModel):
    role: Literal["assistant"] | None = LEFT_OUT
    content: str | None = LEFT_OUT
    tool_calls: list[CalledTool] | None = LEFT_OUT


class DeltaChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = LEFT_OUT


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[DeltaChoice]
    usage: Usage | None = LEFT_OUT
    semantic_cache: CacheHit | None = LEFT_OUT


class Embedding(BaseModel):
    """embedding: numbers, or their float32 bytes in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["lowbit"] = "lowbit"
    max_model_len: int | None


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = LEFT_OUT


class Text(BaseModel):
    prompt: str


def as_json(answer: BaseModel, headers: Mapping[str, str] | None = None) -> Response:
    return Response(answer.model_dump_json(), headers=headers, media_type="application/json")


def finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, LEAST_LOGPROB)


def usage_of(outputs: list[RequestOutput]) -> Usage:
    """Of the last outputs of a request's prompts."""
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    new = sum(o.metrics.output_tokens for o in outputs)
    cached = sum(o.metrics.cached_tokens for o in outputs)
    return Usage(
        prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new,
        prompt_tokens_details=CachedTokens(cached_tokens=cached),
    )  # fmt: skip


def chat_logprobs(output: CompletionOutput, texts: TokenTexts, top: int) -> ChatLogprobs | None:
    """Of its tokens, each beside the `top` likeliest; None where they were not asked for."""
    if output.logprobs is None:
        return None
    content, count = [], len(output.token_ids)
    for number, (token, known) in enumerate(zip(output.token_ids, output.logprobs, strict=True), 1):
        last = number == count and output.finish_reason is not None
        _, entries = texts.take(token, known, last)
        told = _top_logprob(entries[token])
        likeliest = sorted(known, key=lambda t: known[t].rank)[:top]
        others = [_top_logprob(entries[t]) for t in likeliest]
        content.append(ChatLogprob(**told.model_dump(), top_logprobs=others))
    return ChatLogprobs(content=content)


def _top_logprob(entry: Entry) -> TopLogprob:
    return TopLogprob(
        token=entry.name, logprob=finite(entry.logprob), bytes=list(entry.text.encode())
    )
