"""What a load can be sent to: our engine in this process, or any server with OpenAI's interface."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from ...kernels.errors import UserError
from .drive import Answer
from .load import Job

if TYPE_CHECKING:
    from ...runtime import AsyncEngine

TIMEOUT = 600.0  # seconds between two pieces of an answer
SHOWN = 300  # characters of a server's complaint


class EngineTarget:
    """Our engine: greedy, to the last token that is asked for."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    async def run(self, job: Job, heard: Callable[[], None]) -> Answer:
        from ...runtime import SamplingParams

        params = SamplingParams(max_tokens=job.output, temperature=0.0, ignore_eos=True)
        prompt: Any = {"prompt_token_ids": list(job.prompt)}
        token_ids: list[int] = []
        async for output in self.engine.generate(prompt, params, delta=True):
            if new := output.outputs[0].token_ids:
                heard()
                token_ids += new
        return Answer(len(token_ids), tuple(token_ids))


class UrlTarget:
    """A server at `url`, the part of its address before "/completions" (ending in /v1 mostly).

    Prompts are sent as token ids, which the interface allows; `ignore_eos`, which vLLM and others
    have beside it, asks for all tokens. A piece is one event of the stream. Use it as `async with`.
    """

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        try:
            import httpx2
        except ImportError as e:
            raise UserError("bench --url needs httpx2: pip install 'lowbit[evals]'") from e
        self._errors = (httpx2.HTTPError, httpx2.InvalidURL)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx2.Timeout(TIMEOUT)
        self._client = httpx2.AsyncClient(headers=headers, limits=limits, timeout=timeout)
        self.url, self.model = url.rstrip("/"), model

    async def __aenter__(self) -> UrlTarget:
        self.model = self.model or await self._served()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def run(self, job: Job, heard: Callable[[], None]) -> Answer:
        body = {
            "model": self.model, "prompt": list(job.prompt), "max_tokens": job.output,
            "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        pieces, tokens = 0, None
        async for event in self._events(body):
            if "error" in event:
                raise UserError(f"{self.url} failed: {json.dumps(event['error'])[:SHOWN]}")
            choice = next(iter(event.get("choices") or ()), None)
            if choice is not None and (choice.get("text") or choice.get("finish_reason") is None):
                heard()
                pieces += 1
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return Answer(pieces if tokens is None else tokens)

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        try:
            async with self._client.stream("POST", f"{self.url}/completions", json=body) as reply:
                if reply.status_code != 200:
                    said = (await reply.aread()).decode(errors="replace")[:SHOWN]
                    raise UserError(f"{self.url} answered {reply.status_code}: {said}")
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if data and data != line and data != "[DONE]":
                        yield json.loads(data)
        except self._errors as e:
            raise UserError(f"{self.url}: {type(e).__name__}: {e}") from e
        except ValueError as e:
            raise UserError(f"{self.url} sent an event that is no JSON: {e}") from e

    async def _served(self) -> str:
        """The name of the first model that the server has."""
        try:
            reply = await self._client.get(f"{self.url}/models")
            return reply.raise_for_status().json()["data"][0]["id"]
        except self._errors as e:
            raise UserError(f"no server answers at {self.url}/models: {e}") from e
        except (ValueError, LookupError, TypeError) as e:
            raise UserError(f"{self.url}/models names no model; give --served-name") from e
