"""/v1/chat/completions: a conversation goes on."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..request import CompletionOutput, RequestOutput
from ..sampling.params import ParamError
from .answer_cache import look_up
from .answers import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Delta,
    DeltaChoice,
    as_json,
    chat_logprobs,
    usage_of,
)
from .errors import STREAMED
from .frame import Context
from .generation import Events, Generation, news, sse, stream, until_gone
from .messages import as_conversation
from .protocol import ChatRequest
from .service import Service
from .token_texts import TokenTexts
from .tools import ToolUse, tool_use


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation. With `stream`, server-sent events."""
        context = Context.of(request)
        beginning = _begin(service, body, context, request.headers.get("cache-control", ""))
        generation, use = await until_gone(request.receive, beginning)
        if body.stream:
            return await stream(request, _events(generation, body, use), generation.headers)
        outputs = await until_gone(request.receive, generation.last())
        answer = await asyncio.to_thread(_whole, generation, body, use, outputs[0])
        return as_json(answer, generation.headers)

    return router


async def _begin(
    service: Service, body: ChatRequest, context: Context, cache_control: str
) -> tuple[Generation, ToolUse]:
    """ApiError or UserError for what cannot run."""
    service.check_model(body.model)
    most = service.most_output(*body.asked_tokens())
    engine = service.ready().engine
    use = tool_use(body, engine.llm.tokenizer, service.settings.tool_parser)
    more = {} if use.structure is None else {"structured_outputs": use.structure}
    params = body.sampling(most, logprobs=body.counted_logprobs(), **more)
    prompt = await engine.chat_prompt(
        as_conversation(body.messages),
        tools=use.tools,
        **_template_options(body, engine.llm.tokenizer),
    )
    name = f"chatcmpl-{context.request_id}"
    requests = [await service.request(prompt, params, name, "messages", body)]
    lookup = await look_up(service, context, body, params, cache_control)
    return Generation(service, context, name, requests, lookup), use


def _template_options(body: ChatRequest, tokenizer: Any | None) -> dict[str, Any]:
    """What the chat template is told beside the messages. ParamError for names that mean something
    to what fills it in: another template among them."""
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if options and tokenizer is not None:
        own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        if taken := sorted(own & options.keys()):
            raise ParamError(
                "chat_template_kwargs",
                f"chat_template_kwargs may not set {', '.join(taken)}: leave them out",
            )
    if body.continue_final_message:
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    elif not body.add_generation_prompt:
        options["add_generation_prompt"] = False
    return options


def _whole(
    generation: Generation, body: ChatRequest, use: ToolUse, output: RequestOutput
) -> ChatCompletion:
    return ChatCompletion(
        id=generation.name, created=generation.created, model=generation.model,
        choices=[_choice(choice, _Speaker(generation, body, use)) for choice in output.outputs],
        usage=usage_of([output]), semantic_cache=generation.cache_hit,
    )  # fmt: skip


def _choice(choice: CompletionOutput, speaker: _Speaker) -> ChatChoice:
    text, calls = speaker.say(choice)
    return ChatChoice(
        index=choice.index,
        message=ChatMessage(
            content=(text.strip() or None) if calls else text, tool_calls=calls or None
        ),
        logprobs=speaker.logprobs(choice),
        finish_reason=speaker.ended,
        stop_reason=choice.stop_reason,
    )


async def _events(generation: Generation, body: ChatRequest, use: ToolUse) -> Events:
    speakers = [_Speaker(generation, body, use) for _ in range(body.n)]
    roles = [DeltaChoice(index=i, delta=Delta(role="assistant", content="")) for i in range(body.n)]
    begun = False
    async with contextlib.aclosing(generation.pieces()) as pieces:
        async for _, output in pieces:
            if not begun:
                begun = True
                yield sse(_chunk(generation, roles))
            choices = [
                piece
                for choice in news(output, quiet=not body.logprobs)
                if speakers[choice.index].ended is None
                and (piece := _piece(choice, speakers[choice.index]))
            ]
            if choices:
                yield sse(_chunk(generation, choices))
    if body.wants_usage:
        chunk = _chunk(generation, [])
        chunk.usage = usage_of(generation.context.told)
        yield sse(chunk)


def _piece(choice: CompletionOutput, speaker: _Speaker) -> DeltaChoice | None:
    """None where it is not certain yet what its text will be."""
    text, calls = speaker.say(choice)
    for call in calls:
        call.index, speaker.calls = speaker.calls, speaker.calls + 1
    logprobs = speaker.logprobs(choice)
    if not (text or calls or speaker.ended or logprobs):
        return None
    return DeltaChoice(
        index=choice.index,
        delta=Delta(content=text or None, tool_calls=calls or None),
        logprobs=logprobs,
        finish_reason=speaker.ended,
        stop_reason=choice.stop_reason,
    )


class _Speaker:
    """One continuation as it is told. calls: those told so far, which a stream counts. ended: its
    finish_reason."""

    def __init__(self, generation: Generation, body: ChatRequest, use: ToolUse) -> None:
        self._parser = use.parser()
        self._texts = TokenTexts(generation.tokenizer, generation.requests[0].prompt_token_ids)
        self._top_logprobs = body.top_logprobs or 0
        self._called = False
        self.calls = 0
        self.ended: str | None = None

    def logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        """Of its new tokens, where they were asked for."""
        return chat_logprobs(choice, self._texts, self._top_logprobs)

    def say(self, choice: CompletionOutput) -> tuple[str, list[CalledTool]]:
        """What is new of it and certain: text, and calls."""
        text, calls = self._parser.push(choice.text)
        if choice.finish_reason is not None:
            more, last = self._parser.finish()
            text, calls = text + more, calls + last
        self._called = self._called or bool(calls)
        if choice.finish_reason is not None:
            called = self._called and choice.finish_reason == "stop"
            self.ended = "tool_calls" if called else choice.finish_reason
        return text, [
            CalledTool(
                id=f"call_{uuid.uuid4().hex[:24]}",
                function=CalledFunction(name=call.name, arguments=call.arguments),
            )
            for call in calls
        ]


def _chunk(generation: Generation, choices: list[DeltaChoice]) -> ChatChunk:
    return ChatChunk(
        id=generation.name, created=generation.created, model=generation.model, choices=choices,
        semantic_cache=generation.cache_hit,
    )  # fmt: skip
