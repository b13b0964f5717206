"""/v1/embeddings: texts as vectors of length one."""

from __future__ import annotations

import base64
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from torch import Tensor

from ..sampling.params import ParamError, SamplingParams
from .answers import Embedding, Embeddings, EmbeddingUsage, as_json
from .errors import ERRORS
from .frame import Context
from .generation import until_gone
from .protocol import EmbeddingRequest, as_prompts
from .service import Service


def embedding_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["embeddings"])

    @router.post("/v1/embeddings", response_model=Embeddings, responses=ERRORS)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """The mean of the last layer's hidden states over each input's tokens, of length one."""
        context = Context.of(request)
        return as_json(await until_gone(request.receive, _embed(service, body, context)))

    return router


async def _embed(service: Service, body: EmbeddingRequest, context: Context) -> Embeddings:
    service.check_model(body.model)
    ready, inputs = service.ready(), as_prompts(body.input, "input")
    size = ready.engine.llm.model.config.get_text_config(decoder=True).hidden_size
    if body.dimensions not in (None, size):
        raise ParamError(
            "dimensions", f"dimensions is {body.dimensions}: this model has {size}, leave it out"
        )
    made: list[Embedding] = []
    tokens = 0
    with ready.places.take(1):
        for index, given in enumerate(inputs):
            name = f"embd-{context.request_id}-{index}"
            ids = (await service.request(given, _ONE, name, "input")).prompt_token_ids
            vector = await ready.engine.embed(ids)
            tokens += len(ids)
            made.append(Embedding(index=index, embedding=_written(vector, body.encoding_format)))
    context.fields["prompt_tokens"] = tokens
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return Embeddings(data=made, model=service.settings.model_name, usage=usage)


_ONE = SamplingParams(max_tokens=1)


def _written(vector: Tensor, form: str) -> Any:
    """vector: float32 [hidden size]."""
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
