"""What all routes share: the engine from loading to its end, and who may use it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...kernels.errors import UserError
from ..async_engine import AsyncEngine
from ..llm import LLM
from ..prompts import PromptTooLong
from ..request import Request as EngineRequest
from ..sampling.params import ParamError, SamplingParams
from ..streams import EngineDeadError
from .answer_cache import AnswerCache
from .errors import ApiError
from .limits import Places
from .logs import log
from .metrics import ServerMetrics
from .protocol import Sampling
from .settings import ServerSettings
from .text_vectors import make_vectors
from .tracing import Tracing

State = Literal["loading", "ready", "draining", "dead"]


@dataclass(frozen=True)
class Ready:
    """engine: warm. places: for continuations. most_tokens: that prompt and output may have.
    cache: of answers, where one was asked for."""

    engine: AsyncEngine
    places: Places
    most_tokens: int
    cache: AnswerCache | None = None


class Service:
    """load: makes the model, in a thread of its own. failure: what has ended the service."""

    def __init__(self, settings: ServerSettings, load: Callable[[], LLM]) -> None:
        self.settings = settings
        self.metrics = ServerMetrics(settings.model_name)
        traces = settings.otlp_traces_endpoint
        self.tracing = None if traces is None else Tracing(settings.model_name, traces)
        self.created = int(time.time())
        self.state: State = "loading"
        self.failure: BaseException | None = None
        self._load = load
        self._ready: Ready | None = None
        self._stop: Callable[[], None] = lambda: None

    def begin(self, stop: Callable[[], None]) -> None:
        """Load, while the event loop that this is called in goes on. stop: ends the server, where
        that fails or the engine dies."""
        self._stop = stop
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._start, args=(loop,), name="lowbit-load", daemon=True).start()

    def drain(self) -> None:
        """Take no more requests."""
        if self.state != "dead":
            self.state = "draining"

    def close(self) -> None:
        """End the engine and whatever still runs."""
        self.drain()
        if self._ready is not None:
            self._ready.engine.shutdown()
        if self.tracing is not None:
            self.tracing.close()

    @property
    def loaded(self) -> Ready | None:
        """None until the engine is warm."""
        return self._ready

    def ready(self) -> Ready:
        """ApiError where no request can be taken."""
        if self.state == "ready" and self._ready is not None:
            return self._ready
        why = {
            "loading": "the model is being loaded", "draining": "the server is about to end",
            "dead": "the engine has ended",
        }[self.state]  # fmt: skip
        raise ApiError(503, why, code=self.state, retry_after=5)

    def check_model(self, name: str | None) -> None:
        """ApiError for a model that is not served here."""
        if name is not None and name != self.settings.model_name:
            raise ApiError(
                404,
                f"there is no model {name!r} here: the one that is served is "
                f"'{self.settings.model_name}'",
                code="model_not_found",
                param="model",
            )

    def most_output(
        self, asked: int | None, field: str = "max_tokens", default: int | None = None
    ) -> int:
        """max_tokens of a request that asks for so many in `field`. ApiError for too many."""
        limit = self.settings.max_output_tokens
        if asked is None:
            allowed = self.ready().most_tokens if default is None else default
            return allowed if limit is None else min(allowed, limit)
        if limit is not None and asked > limit:
            raise ApiError(
                422, f"{field} is {asked}, and at most {limit} are allowed",
                code="output_too_long", param=field,
            )  # fmt: skip
        return asked

    async def request(
        self,
        prompt: object,
        params: SamplingParams,
        request_id: str,
        field: str,
        body: Sampling | None = None,
    ) -> EngineRequest:
        """Of a prompt that is no longer than it may be, with no more continuations than run at
        once. field: where it was given. body: that asks for it, where it is to be continued."""
        most = self.ready().places.running
        if params.n > most:
            raise ApiError(
                422, f"n is {params.n}, and max_num_seqs, {most}, continuations of a prompt run at "
                "once: ask for fewer",
                code="too_many_continuations", param="n",
            )  # fmt: skip
        try:
            made = await self.ready().engine.request(prompt, params, request_id)  # type: ignore[arg-type]
        except PromptTooLong as e:
            raise ApiError(422, str(e), code="context_length_exceeded", param=field) from e
        except ParamError as e:
            if body is None or e.param != "structured_outputs":
                raise
            raise ApiError(400, str(e), param=body.structure_field) from e
        if body is not None and body.priority:
            made.priority = self._priority(body.priority)
        limit, length = self.settings.max_prompt_tokens, len(made.prompt_token_ids)
        if limit is not None and length > limit:
            raise ApiError(
                422, f"the prompt has {length} tokens, and at most {limit} are allowed: shorten it",
                code="prompt_too_long", param=field,
            )  # fmt: skip
        return made

    def _priority(self, asked: int) -> int:
        """ApiError where requests run as they came."""
        if self.ready().engine.llm.scheduling_policy != "priority":
            raise ApiError(
                422, f"priority is {asked}, and requests run here as they came: leave it out, or "
                "start the server with --scheduling-policy priority",
                code="no_priorities", param="priority",
            )  # fmt: skip
        return asked

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the loading thread."""
        started = time.perf_counter()
        try:
            llm = self._load()
            warm_up(llm)
            cache = None
            if self.settings.semantic_cache is not None:
                vectors = make_vectors(llm, self.settings.semantic_cache_model)
                cache = AnswerCache(self.settings, vectors)
            places = Places(llm.max_num_seqs, self.settings.max_queue)
            ready = Ready(AsyncEngine(llm), places, llm.capacity, cache)
        except BaseException as e:
            error = e
            self._call(loop, lambda: self._fail(error, "the model cannot be served"))
            return
        seconds = time.perf_counter() - started
        if not self._call(loop, lambda: self._open(ready, loop, seconds)):
            ready.engine.shutdown()

    def _open(self, ready: Ready, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._ready = ready
        if self.state != "loading":
            return  # the server ends, and `close` ends the engine
        self.state = "ready"

        def at_end(dead: EngineDeadError) -> None:
            self._call(loop, lambda: self._end(dead))

        ready.engine.at_end(at_end)
        llm = ready.engine.llm
        self.metrics.warm(llm.metrics().output_tokens)
        log(
            "ready", model=self.settings.model_name, seconds=round(seconds, 2), engine=llm.engine,
            device=str(llm.device), dtype=str(llm.dtype), max_tokens=ready.most_tokens,
            max_num_seqs=llm.max_num_seqs, warnings=llm.warnings,
        )  # fmt: skip

    def _end(self, dead: EngineDeadError) -> None:
        if self.state != "draining":
            self._fail(dead.__cause__ or dead, "the engine has died")

    def _fail(self, error: BaseException, event: str) -> None:
        self.state, self.failure = "dead", error
        cause = None if isinstance(error, UserError) else error
        log(event, logging.CRITICAL, cause, reason=str(error))
        self._stop()

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> bool:
        """Have it run in `loop`; False where that is over."""
        try:
            loop.call_soon_threadsafe(what)
        except RuntimeError:
            return False
        return True


def warm_up(llm: LLM) -> None:
    """A few tokens, so that the first request does not wait for what is made when it is needed."""
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    llm.generate([[0, 0, 0]], params, use_tqdm=False)
