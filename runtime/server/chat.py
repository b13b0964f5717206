"""/v1/chat/completions: a conversation goes on."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..request import CompletionOutput, RequestOutput
from .answers import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    Delta,
    DeltaChoice,
    as_json,
    chat_logprobs,
    usage_of,
)
from .errors import ERRORS
from .frame import Context
from .generation import Events, Generation, news, sse, stream, until_gone
from .messages import as_conversation
from .protocol import ChatRequest
from .service import Service


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation. With `stream`, server-sent events."""
        context = Context.of(request)
        generation = await until_gone(request.receive, _begin(service, body, context))
        if body.stream:
            return await stream(request, _events(generation, body))
        outputs = await until_gone(request.receive, generation.last())
        return as_json(_whole(generation, body, outputs[0]))

    return router


async def _begin(service: Service, body: ChatRequest, context: Context) -> Generation:
    """ApiError or UserError for what cannot run."""
    service.check_model(body.model)
    most = service.most_output(body.asked_tokens())
    params = body.sampling(most, logprobs=body.counted_logprobs())
    prompt = await service.ready().engine.chat_prompt(
        as_conversation(body.messages), **template_options(body)
    )
    name = f"chatcmpl-{context.request_id}"
    return Generation(service, context, name, [await service.request(prompt, params, name)])


def template_options(body: ChatRequest) -> dict[str, Any]:
    """What the chat template is told beside the messages."""
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.continue_final_message:
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    elif not body.add_generation_prompt:
        options["add_generation_prompt"] = False
    return options


def _whole(generation: Generation, body: ChatRequest, output: RequestOutput) -> ChatCompletion:
    choices = [
        ChatChoice(
            index=choice.index,
            message=ChatMessage(content=choice.text),
            logprobs=chat_logprobs(choice, body.top_logprobs or 0),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        for choice in output.outputs
    ]
    return ChatCompletion(
        id=generation.name, created=generation.created, model=generation.model,
        choices=choices, usage=usage_of([output]),
    )  # fmt: skip


async def _events(generation: Generation, body: ChatRequest) -> Events:
    roles = [DeltaChoice(index=i, delta=Delta(role="assistant", content="")) for i in range(body.n)]
    begun, ended = False, set[int]()
    async for _, output in generation.pieces():
        if not begun:
            begun = True
            yield sse(_chunk(generation, roles))
        choices = [
            _piece(choice, body)
            for choice in news(output, quiet=not body.logprobs)
            if choice.index not in ended
        ]
        ended |= {choice.index for choice in choices if choice.finish_reason}
        if choices:
            yield sse(_chunk(generation, choices))
    if body.wants_usage:
        chunk = _chunk(generation, [])
        chunk.usage = usage_of(generation.context.told)
        yield sse(chunk)


def _piece(choice: CompletionOutput, body: ChatRequest) -> DeltaChoice:
    return DeltaChoice(
        index=choice.index,
        delta=Delta(content=choice.text or None),
        logprobs=chat_logprobs(choice, body.top_logprobs or 0),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


def _chunk(generation: Generation, choices: list[DeltaChoice]) -> ChatChunk:
    return ChatChunk(
        id=generation.name, created=generation.created, model=generation.model, choices=choices
    )
