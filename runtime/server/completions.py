"""/v1/completions: a text goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..request import CompletionOutput, RequestOutput
from ..sampling.logprobs import TokenLogprobs
from .answers import Completion, CompletionChoice, CompletionLogprobs, as_json, finite, usage_of
from .errors import STREAMED
from .frame import Context
from .generation import Events, Generation, news, sse, stream, until_gone
from .protocol import DEFAULT_TOKENS, CompletionRequest
from .service import Service


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post("/v1/completions", response_model=Completion, responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several. With `stream`, server-sent events."""
        context = Context.of(request)
        generation = await until_gone(request.receive, _begin(service, body, context))
        if body.stream:
            return await stream(request, _events(generation, body))
        outputs = await until_gone(request.receive, generation.last())
        return as_json(_whole(generation, body, outputs))

    return router


async def _begin(service: Service, body: CompletionRequest, context: Context) -> Generation:
    """ApiError or UserError for what cannot run."""
    service.check_model(body.model)
    prompts = body.prompts()
    params = body.params(service.most_output(body.max_tokens, default=DEFAULT_TOKENS))
    name = f"cmpl-{context.request_id}"
    requests = [
        await service.request(prompt, params, f"{name}-{number}")
        for number, prompt in enumerate(prompts)
    ]
    return Generation(service, context, name, requests)


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
                if not said[index].ended:
                    choices.append(said[index].say(output, choice))
            if choices:
                yield sse(_answer(generation, choices))
    if body.wants_usage:
        answer = _answer(generation, [])
        answer.usage = usage_of(generation.context.told)
        yield sse(answer)


def _answer(generation: Generation, choices: list[CompletionChoice]) -> Completion:
    return Completion(
        id=generation.name, created=generation.created, model=generation.model, choices=choices
    )


class _Choice:
    """One continuation as it is told, at once or in pieces; the prompt before it with `echo`."""

    def __init__(self, generation: Generation, body: CompletionRequest, index: int) -> None:
        self._decode = generation.tokenizer.decode if generation.tokenizer else lambda ids: ""
        self._index, self._logprobs, self._offset = index, body.logprobs, 0
        self._echo = body.echo
        self.ended = False

    def say(self, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        """What is new of it."""
        text, told = choice.text, None
        if self._logprobs is not None:
            told = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if self._echo:
            self._echo = False
            ids = output.prompt_token_ids
            text = (self._decode(ids) if output.prompt is None else output.prompt) + text
            self._tell(told, ids, output.prompt_logprobs or [])
        self._tell(told, choice.token_ids, choice.logprobs or [])
        self.ended = choice.finish_reason is not None
        return CompletionChoice(
            index=self._index, text=text, logprobs=told, finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )  # fmt: skip

    def _tell(
        self,
        told: CompletionLogprobs | None,
        ids: list[int],
        logprobs: Iterable[TokenLogprobs | None],
    ) -> None:
        if told is None:
            return
        for token, known in zip(ids, logprobs, strict=True):
            text = self._decode([token])
            told.tokens.append(text)
            told.token_logprobs.append(None if known is None else finite(known[token].logprob))
            told.top_logprobs.append(None if known is None else _by_text(known))
            told.text_offset.append(self._offset)
            self._offset += len(text)


def _by_text(known: TokenLogprobs) -> dict[str, float]:
    """Of the token and the likeliest beside it; where two read alike, the first."""
    told: dict[str, float] = {}
    for entry in known.values():
        told.setdefault(entry.decoded_token or "", finite(entry.logprob))
    return told
