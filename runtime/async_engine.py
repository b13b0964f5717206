"""The engine for asyncio: requests come and go while it runs, each with a stream of its own.

One thread owns the engine and everything in it. Coroutines send it commands, and it sends results
into their event loops, one call a step for each loop. So no coroutine waits for a step of the
model, and nothing in the engine needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from ..kernels.errors import UserError
from .embeddings import mean_pooled
from .llm import LLM
from .metrics import EngineMetrics
from .patience import Patience
from .prompts import Messages, Prompt
from .request import Request, RequestOutput, SamplingParams
from .streams import EngineDeadError, Item, Stream, put_all

GRAMMAR_SECONDS, MAX_GRAMMARS = 20.0, 4  # that are compiled at once
T = TypeVar("T")


class AsyncEngine:
    """model: an LLM, which belongs to the engine alone from now on, or what one is made of, with
    `options`.

    Close it with `shutdown`, or use it as `async with AsyncEngine(...) as engine`.
    """

    def __init__(self, model: LLM | str | Path, **options: Any) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._maker, self._engine = self.llm._maker, self.llm._engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Item]]] = {}
        self._dead: EngineDeadError | None = None
        self._at_end: Callable[[EngineDeadError], None] | None = None
        self._closing = False
        self._gate = threading.Lock()  # between commands that come and the engine's end
        self._grammars = Patience("making a grammar", GRAMMAR_SECONDS, MAX_GRAMMARS)
        if self.llm.tokenizer is not None:
            self.llm.tokenizer("")  # may change the tokenizer, which decodes in the other thread
        self._thread = threading.Thread(target=self._work, name="lowbit-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.shutdown)

    @property
    def dead(self) -> EngineDeadError | None:
        """Why nothing can be asked of the engine any more."""
        return self._dead

    def at_end(self, callback: Callable[[EngineDeadError], None]) -> None:
        """Call this in the engine's thread when it ends, or now where it has."""
        with self._gate:
            dead = self._dead
            if dead is None:
                self._at_end = callback
        if dead is not None:
            callback(dead)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        delta: bool = False,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """What has come of `prompt`, after every step that brought something, until `finished`.

        delta: texts, tokens and logprobs since the output before, not all so far. priority: see
        LLM's scheduling_policy. Left or cancelled before its end, the request is aborted and its
        blocks are free in the next step. UserError for what cannot run, RequestFailed where the
        model gave no finite logits, EngineDeadError.
        """
        request = await self.request(prompt, sampling_params, request_id)
        request.priority = priority
        async with contextlib.aclosing(self.run(request, delta=delta)) as outputs:
            async for output in outputs:
                yield output

    async def request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> Request:
        """What `run` takes, with the prompt's tokens. UserError for what cannot run."""
        params = SamplingParams() if sampling_params is None else sampling_params
        structured = params.structured_outputs
        grammar = None
        if structured is not None:
            grammar = await self._grammars.run(lambda: self._maker.grammar(structured))
        return await asyncio.to_thread(self._maker.request, prompt, params, request_id, grammar)

    async def run(
        self,
        request: Request,
        *,
        delta: bool = False,
        only_last: bool = False,
        start_within: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate` of a request that was made. only_last: what it has come to alone.
        start_within: seconds that it may wait for its first step, else NotStarted."""
        stream = Stream(request, asyncio.get_running_loop(), delta, only_last)
        self._send(lambda: self._add(stream))
        going = True
        try:
            item = await stream.first(start_within)
            while True:
                going = isinstance(item, RequestOutput) and not item.finished
                if not isinstance(item, RequestOutput):
                    raise item
                yield item
                if not going:
                    return
                item = await stream.items.get()
        finally:
            if going:
                self._try_to_send(lambda: self._abort(request.request_id, tell=False))

    async def chat_prompt(self, messages: Messages, **options: Any) -> dict[str, Any]:
        """What the chat template makes of a conversation. options: as RequestMaker has them."""
        return await asyncio.to_thread(self._maker.chat_prompt, messages, **options)

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        delta: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate` with what the chat template makes of a conversation."""
        prompt = await self.chat_prompt(messages)
        outputs = self.generate(prompt, sampling_params, request_id, delta=delta)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """UserError where there is no tokenizer, or `text` is no text."""
        return await asyncio.to_thread(self._maker.tokenize, text, add_special_tokens)

    async def abort(self, request_id: str) -> None:
        """End a request: its stream gets a last output, with finish_reason "abort". Nothing if it
        is over."""
        self._send(lambda: self._abort(request_id, tell=True))

    async def metrics(self) -> EngineMetrics:
        """What the engine is doing and has done, between two steps."""
        return await self._ask(self._engine.metrics)

    async def embed(self, token_ids: list[int]) -> Tensor:
        """See mean_pooled; computed whole, between two steps."""
        model, device = self.llm.model, self.llm.device
        return await self._ask(lambda: mean_pooled(model, token_ids, device))

    async def _ask(self, what: Callable[[], T]) -> T:
        """What it gives in the engine's thread."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def tell(told: T | None, error: BaseException | None) -> None:
            if answer.done():
                return  # cancelled
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(cast("T", told))

        def ask() -> None:
            told, error = None, self._last_words() if self._dead else None
            if error is None and not answer.cancelled():
                try:
                    told = what()
                except Exception as e:
                    error = e
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(tell, told, error)

        self._send(ask)
        return await answer

    def shutdown(self) -> None:
        """End all requests and the thread."""
        self._try_to_send(self._close)
        self._thread.join()

    def _send(self, command: Callable[[], None]) -> None:
        """Have `command` run in the engine's thread, between two steps."""
        if not self._try_to_send(command):
            raise self._last_words()

    def _try_to_send(self, command: Callable[[], None]) -> bool:
        with self._gate:
            if self._dead is None:
                self._commands.put(command)
            return self._dead is None

    def _last_words(self) -> EngineDeadError:
        """Why the engine is dead, a new one for everybody who waits."""
        error = EngineDeadError(str(self._dead))
        error.__cause__ = self._dead.__cause__ if self._dead else None
        return error

    # What follows runs in the engine's thread.

    def _work(self) -> None:
        try:
            while not self._closing:
                if not self._engine.has_work:
                    self._commands.get()()  # waits for one
                while not self._commands.empty():
                    self._commands.get()()
                if not self._closing and self._engine.has_work:
                    self._tell(self._engine.step())
                self._deliver()
        except BaseException as e:
            dead = EngineDeadError(f"the engine has died of {type(e).__name__}: {e}")
            dead.__cause__ = e
        else:
            dead = EngineDeadError("the engine was shut down")
        self._end(dead)

    def _add(self, stream: Stream) -> None:
        name = stream.request.request_id
        if self._dead:
            self._put(stream, self._last_words())
            return
        try:
            if name in self._streams:
                raise UserError(f"request {name} is running already: give another request_id")
            self._engine.add(stream.request)
        except UserError as e:
            self._put(stream, e)
        else:
            self._streams[name] = stream

    def _abort(self, request_id: str, tell: bool) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is None or self._dead:
            return
        self._engine.abort(request_id)
        if tell:
            self._put(stream, stream.item())

    def _close(self) -> None:
        for name in list(self._streams):
            self._abort(name, tell=True)
        self._closing = True

    def _tell(self, stepped: list[Any]) -> None:
        for request in stepped:
            if stream := self._streams.get(request.request_id):
                if request.finished:
                    del self._streams[request.request_id]
                if request.finished or not stream.only_last:
                    self._put(stream, stream.item())

    def _put(self, stream: Stream, item: Item) -> None:
        self._outbox.setdefault(stream.loop, []).append((stream, item))

    def _deliver(self) -> None:
        """Into each event loop what has come for it; what waits in a closed one is aborted."""
        outbox, self._outbox = self._outbox, {}
        for loop, entries in outbox.items():
            try:
                loop.call_soon_threadsafe(put_all, entries)
            except RuntimeError:
                for stream, _ in entries:
                    self._abort(stream.request.request_id, tell=False)

    def _end(self, dead: EngineDeadError) -> None:
        """Nobody is left to wait for what does not come."""
        with self._gate:
            self._dead = dead
            at_end = self._at_end
        for stream in self._streams.values():
            self._put(stream, self._last_words())
        self._streams.clear()
        while not self._commands.empty():
            self._commands.get()()
        self._deliver()
        if at_end is not None:
            at_end(dead)
