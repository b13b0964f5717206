"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from ...kernels.errors import UserError
from .answers import Text, Tokens, as_json
from .errors import ERRORS
from .messages import as_conversation
from .protocol import DetokenizeRequest, TokenizeRequest
from .service import Service


def token_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", response_model=Tokens, responses=ERRORS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text, or of what the chat template makes of messages."""
        service.check_model(body.model)
        ready = service.ready()
        if (body.prompt is None) == (body.messages is None):
            raise UserError("give either prompt or messages")
        if body.messages is not None:
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
            prompt = await ready.engine.chat_prompt(
                as_conversation(body.messages), tools=tools or None,
                add_generation_prompt=body.add_generation_prompt,
            )  # fmt: skip
            ids = prompt["prompt_token_ids"]
        else:
            ids = await ready.engine.tokenize(body.prompt or "", body.add_special_tokens)
        strings = None
        if body.return_token_strs and ready.engine.llm.tokenizer is not None:
            strings = ready.engine.llm.tokenizer.convert_ids_to_tokens(ids)
        most = ready.engine.llm.max_model_len
        return as_json(Tokens(count=len(ids), max_model_len=most, tokens=ids, token_strs=strings))

    @router.post("/detokenize", response_model=Text, responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        llm = service.ready().engine.llm
        if llm.tokenizer is None:
            raise UserError("the model has no tokenizer")
        outside = [t for t in body.tokens if not 0 <= t < llm.vocab_size]
        if outside:
            raise UserError(
                f"token id {outside[0]} is out of the vocabulary: ids go from 0 to "
                f"{llm.vocab_size - 1}"
            )
        return as_json(Text(prompt=await asyncio.to_thread(llm.tokenizer.decode, body.tokens)))

    return router
