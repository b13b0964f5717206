"""/v1/completions: a text goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..detokenizer import text_after
from ..request import CompletionOutput, RequestOutput
from ..sampling.logprobs import TokenLogprobs
from .answer_cache import look_up
from .answers import Completion, CompletionChoice, CompletionLogprobs, as_json, finite, usage_of
from .errors import STREAMED
from .frame import Context
from .generation import Events, Generation, news, sse, stream, until_gone
from .protocol import DEFAULT_TOKENS, CompletionRequest
from .service import Service
from .token_texts import Entry, TokenTexts


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post("/v1/completions", response_model=Completion, responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several. With `stream`, server-sent events."""
        context = Context.of(request)
        beginning = _begin(service, body, context, request.headers.get("cache-control", ""))
        generation = await until_gone(request.receive, beginning)
        if body.stream:
            return await stream(request, _events(generation, body), generation.headers)
        outputs = await until_gone(request.receive, generation.last())
        answer = await asyncio.to_thread(_whole, generation, body, outputs)
        return as_json(answer, generation.headers)

    return router


async def _begin(
    service: Service, body: CompletionRequest, context: Context, cache_control: str
) -> Generation:
    """ApiError or UserError for what cannot run."""
    service.check_model(body.model)
    prompts = body.prompts()
    params = body.params(service.most_output(body.max_tokens, default=DEFAULT_TOKENS))
    name = f"cmpl-{context.request_id}"
    requests = [
        await service.request(prompt, params, f"{name}-{number}", "prompt", body)
        for number, prompt in enumerate(prompts)
    ]
    lookup = await look_up(service, context, body, params, cache_control)
    return Generation(service, context, name, requests, lookup)


def _whole(
    generation: Generation, body: CompletionRequest, outputs: list[RequestOutput]
) -> Completion:
    choices = [
        _Choice(generation, body, number * body.n + choice.index).say(output, choice)
        for number, output in enumerate(outputs)
        for choice in output.outputs
    ]
    answer = _answer(generation, choices)
    answer.usage = usage_of(outputs)
    return answer


async def _events(generation: Generation, body: CompletionRequest) -> Events:
    said: dict[int, _Choice] = {}
    async with contextlib.aclosing(generation.pieces()) as pieces:
        async for number, output in pieces:
            choices = []
            for choice in news(output, quiet=body.logprobs is None):
                index = number * body.n + choice.index
                if index not in said:
                    said[index] = _Choice(generation, body, index)
                if said[index].ended:
                    continue
                told = said[index].say(output, choice)
                if told.text or told.finish_reason or (told.logprobs and told.logprobs.tokens):
                    choices.append(told)
            if choices:
                yield sse(_answer(generation, choices))
    if body.wants_usage:
        answer = _answer(generation, [])
        answer.usage = usage_of(generation.context.told)
        yield sse(answer)


def _answer(generation: Generation, choices: list[CompletionChoice]) -> Completion:
    return Completion(
        id=generation.name, created=generation.created, model=generation.model, choices=choices,
        semantic_cache=generation.cache_hit,
    )  # fmt: skip


class _Told(NamedTuple):
    """A token whose text may not be certain yet. top: as its logprobs name it and the likeliest."""

    text: str
    logprob: float | None
    top: dict[str, float] | None


class _Choice:
    """One continuation as it is told, at once or in pieces; the prompt before it with `echo`. A
    token's logprobs come when its text does."""

    def __init__(self, generation: Generation, body: CompletionRequest, index: int) -> None:
        self._tokenizer = generation.tokenizer
        self._index, self._logprobs, self._echo = index, body.logprobs is not None, body.echo
        self._texts: TokenTexts | None = None
        self._waiting: deque[_Told] = deque()
        self._length = self._offset = 0  # of the text, and of what its told tokens have of it
        self.ended = False

    def say(self, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        """What is new of it."""
        self.ended = choice.finish_reason is not None
        text = self._begin(output) + choice.text
        self._length += len(text)
        if self._logprobs:
            self._take(choice.token_ids, choice.logprobs or [], self.ended)
        return CompletionChoice(
            index=self._index, text=text, logprobs=self._certain() if self._logprobs else None,
            finish_reason=choice.finish_reason, stop_reason=choice.stop_reason,
        )  # fmt: skip

    def _begin(self, output: RequestOutput) -> str:
        """What stands before the first piece."""
        if self._texts is not None:
            return ""
        ids, text = output.prompt_token_ids, ""
        if self._echo:
            self._texts = TokenTexts(self._tokenizer)
            text = output.prompt
            if text is None:
                text = "" if self._tokenizer is None else text_after(self._tokenizer, (), ids)
            if self._logprobs:
                self._take(ids, output.prompt_logprobs or [], True)
                self._fit(ids, text)
        self._texts = TokenTexts(self._tokenizer, ids)
        return text

    def _take(self, ids: list[int], logprobs: Iterable[TokenLogprobs | None], is_end: bool) -> None:
        """is_end: nothing of the text comes after them."""
        assert self._texts is not None
        for number, (token, known) in enumerate(zip(ids, logprobs, strict=True), 1):
            last = is_end and number == len(ids)
            text, entries = self._texts.take(token, known or {}, last)
            logprob = None if known is None else finite(known[token].logprob)
            self._waiting.append(_Told(text, logprob, None if known is None else _top(entries)))

    def _fit(self, ids: list[int], prompt: str) -> None:
        """The waiting tokens, of `ids`, to the text that they were read from: a special token that
        it names has its name there, and a space that some tokenizers put after one is not."""
        offset = 0
        for number, (token, told) in enumerate(zip(ids, self._waiting, strict=True)):
            text = told.text
            if not text and self._tokenizer is not None:
                name = self._tokenizer.decode([token])
                text = name if prompt.startswith(name, offset) else ""
            elif not prompt.startswith(text, offset) and prompt.startswith(text[1:], offset):
                text = text.removeprefix(" ")
            self._waiting[number] = told._replace(text=text)
            offset += len(text)

    def _certain(self) -> CompletionLogprobs:
        """Of tokens that the text has reached; at its end of all, cut off where that was."""
        told = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        while self._waiting:
            text, logprob, top = self._waiting[0]
            left = self._length - self._offset
            if len(text) > left and not self.ended:
                break
            self._waiting.popleft()
            text = text[:left]
            told.tokens.append(text)
            told.token_logprobs.append(logprob)
            told.top_logprobs.append(top)
            told.text_offset.append(self._offset)
            self._offset += len(text)
        return told


def _top(entries: dict[int, Entry]) -> dict[str, float]:
    """Of the token and the likeliest beside it; where two read alike, the first."""
    told: dict[str, float] = {}
    for entry in entries.values():
        told.setdefault(entry.name, finite(entry.logprob))
    return told
