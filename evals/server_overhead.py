"""What HTTP costs: tokens a second that clients of a server get, beside those of its engine alone.

    python -m lowbit.evals.server_overhead MODEL [--concurrent 16] [--rounds 6]

One process has one engine and serves it; the client of its streams is another process. Rounds take
turns, engine first and HTTP first: in each all requests begin at once, and it is over with the last
one's last token. Prompts are random, so that no round finds another's in the prefix cache. Beside
the wall clock the serving process's own time on the CPU is told: it says the same of a machine on
which others work, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..kernels.errors import UserError

if TYPE_CHECKING:
    from ..runtime.async_engine import AsyncEngine

NAME = "model"
START_SECONDS = 600.0


@dataclass(frozen=True)
class Load:
    """concurrent: requests of a round, each of `prompt` random tokens that goes on for `new`."""

    concurrent: int = 16
    prompt: int = 64
    new: int = 64
    rounds: int = 6
    seed: int = 0


class Round(NamedTuple):
    """way: "engine" or "http". seconds: of the wall clock; cpu_seconds: of the serving process."""

    way: str
    seconds: float
    cpu_seconds: float


def bodies(load: Load, vocabulary: int, rng: random.Random) -> list[dict[str, Any]]:
    """Of one round, as /v1/completions takes them."""
    return [
        {
            "prompt": [rng.randrange(3, vocabulary) for _ in range(load.prompt)],
            "max_tokens": load.new, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(load.concurrent)
    ]  # fmt: skip


async def ask_engine(engine: AsyncEngine, asked: list[dict[str, Any]]) -> int:
    """Tokens that came."""
    from ..runtime import SamplingParams

    async def one(body: dict[str, Any]) -> int:
        params = SamplingParams(max_tokens=body["max_tokens"], temperature=0, ignore_eos=True)
        stream = engine.generate(body["prompt"], params, delta=True)
        return sum([len(output.outputs[0].token_ids) async for output in stream])

    return sum(await asyncio.gather(*map(one, asked)))


async def ask_http(http: Any, asked: list[dict[str, Any]]) -> int:
    """Tokens that came. http: a client of the server."""

    async def one(body: dict[str, Any]) -> int:
        last = ""
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    last = line
        return json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]

    return sum(await asyncio.gather(*map(one, asked)))


def client(url: str, pipe: Connection) -> None:
    """A process that asks for what comes through the pipe, and sends back (tokens, seconds)."""
    import httpx2

    async def work() -> None:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
            while asked := await asyncio.to_thread(pipe.recv):
                began = time.perf_counter()
                tokens = await ask_http(http, asked)
                pipe.send((tokens, time.perf_counter() - began))

    asyncio.run(work())


@contextmanager
def serving(model: Path) -> Iterator[tuple[str, AsyncEngine]]:
    """The address and the engine of a server in a thread of this process."""
    from ..runtime import LLM
    from ..runtime.server.run import address_of, bind, make_server
    from ..runtime.server.service import Service
    from ..runtime.server.settings import ServerSettings

    settings = ServerSettings(NAME, port=0, client_timeout=600.0, queue_timeout=600.0)
    listening = bind(settings.host, 0, settings.client_timeout)
    service = Service(settings, lambda: LLM(model))
    server = make_server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        end = time.monotonic() + START_SECONDS
        while service.loaded is None:
            if service.failure is not None or time.monotonic() > end:
                raise UserError(
                    f"the server did not start: {service.failure or 'it took too long'}"
                )
            time.sleep(0.05)
        yield address_of(listening), service.loaded.engine
    finally:
        server.should_exit = True
        thread.join()
        service.close()


def measure(model: Path, load: Load) -> list[Round]:
    """Rounds in the order that they ran, without the first two, which warm up."""
    rng, rounds = random.Random(load.seed), list[Round]()
    with serving(model) as (url, engine):
        vocabulary = engine.llm.vocab_size
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=client, args=(url, theirs))
        process.start()
        try:
            for number in range(load.rounds + 1):
                ways = ("engine", "http") if number % 2 else ("http", "engine")
                for way in ways:
                    asked, cpu = bodies(load, vocabulary, rng), time.process_time()
                    if way == "http":
                        ours.send(asked)
                        tokens, seconds = ours.recv()
                    else:
                        began = time.perf_counter()
                        tokens = asyncio.run(ask_engine(engine, asked))
                        seconds = time.perf_counter() - began
                    if tokens != load.concurrent * load.new:
                        raise UserError(f"{tokens} tokens came of {load.concurrent * load.new}")
                    rounds.append(Round(way, seconds, time.process_time() - cpu))
            ours.send(None)
        finally:
            process.join(10)
            process.kill()
    return rounds[2:]


def summary(rounds: list[Round], load: Load) -> dict[str, Any]:
    """Medians, and of rounds beside each other how much of the engine's speed HTTP has."""
    tokens = load.concurrent * load.new
    told: dict[str, Any] = {}
    for way in ("engine", "http"):
        of_way = [r for r in rounds if r.way == way]
        told[way] = {
            "tokens_per_second": round(statistics.median(tokens / r.seconds for r in of_way), 2),
            "cpu_ms_per_token": round(
                statistics.median(1e3 * r.cpu_seconds / tokens for r in of_way), 3
            ),
        }
    pairs = [rounds[i : i + 2] for i in range(0, len(rounds), 2)]
    by_way = [{r.way: r for r in pair} for pair in pairs]
    ratios = [pair["engine"].seconds / pair["http"].seconds for pair in by_way]
    of_cpu = [pair["engine"].cpu_seconds / pair["http"].cpu_seconds for pair in by_way]
    return {
        **told, "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(r, 4) for r in ratios],
        "cpu_ratio": round(statistics.median(of_cpu), 4),
        "cpu_ratios": [round(r, 4) for r in of_cpu],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lowbit.evals.server_overhead")
    parser.add_argument("model", type=Path)
    for name, value in asdict(Load()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = vars(parser.parse_args())
    model = asked.pop("model")
    load = Load(**asked)
    told = {"model": model.name, **asdict(load), **summary(measure(model, load), load)}
    sys.stdout.write(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
