"""Hours of a server's life in minutes: many clients, some of which leave or read slowly.

    python -m lowbit.evals.server_soak MODEL [--seconds 600] [--requests N] [--clients 64]

starts `quantize serve MODEL` on a free port of this machine and sends it random requests, for so
long or so many. Of each ten one hangs up in the middle of its stream and one reads slowly. Eight
more connections say nothing, half a header or half a body, and come again when the server has ended
them. Every half second the server's memory is noted. It ends well (exit code 0) where

- every request was answered, refused with Retry-After, or left by its client;
- a moment later nothing runs or waits, no KV block is in use, and no connection is open;
- the server's memory in the last third is at most 5% above what it was after the first;
- SIGTERM ends it with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..kernels.errors import UserError

COMMAND = "from lowbit.quantize.cli import main; main()"
GROWTH = 1.05  # of the memory, from the first third's end to the last third
SLOW_SECONDS = 0.02  # between two lines that a slow client reads
HALF_OPEN = 8
_HEADER = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
HALVES = (b"", _HEADER, _HEADER + b"content-length: 100\r\n\r\n{")
SETTLE_SECONDS = 30.0
START_SECONDS = 600.0


@dataclass
class Tally:
    """ends: how many requests ended how. wrong: what should not have come, in words. tokens: of
    whole answers. half_open: connections without a whole request that the server has ended."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    half_open: int = 0


@dataclass(frozen=True)
class Load:
    """clients: that ask one after another, at once. seconds: after which they ask no more;
    requests: the same, of all clients together. prompt, new: the largest numbers of tokens."""

    clients: int
    seconds: float
    seed: int = 0
    requests: int | None = None
    prompt: int = 120
    new: int = 48


async def put_under(url: str, load: Load) -> Tally:
    """Let them ask, until all have their answers."""
    try:
        import httpx2
    except ImportError as e:
        raise UserError("the soak needs httpx2: pip install 'lowbit[evals]'") from e
    tally, end = Tally(), time.monotonic() + load.seconds
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=load.clients)
    async with httpx2.AsyncClient(base_url=url, timeout=300.0, limits=limits) as http:
        halves = [
            asyncio.create_task(_half_open(url, HALVES[number % len(HALVES)], tally))
            for number in range(HALF_OPEN)
        ]
        clients = [
            _client(http, load, random.Random(load.seed * 100_003 + number), end, tally)
            for number in range(load.clients)
        ]
        await asyncio.gather(*clients)
        for half in halves:
            half.cancel()
        await asyncio.gather(*halves, return_exceptions=True)
    return tally


async def _client(http: Any, load: Load, rng: random.Random, end: float, tally: Tally) -> None:
    while time.monotonic() < end:
        if load.requests is not None and tally.ends["begun"] >= load.requests:
            return
        body = {
            "prompt": [rng.randrange(3, 250) for _ in range(rng.randint(1, load.prompt))],
            "max_tokens": rng.randint(1, load.new),
            "ignore_eos": True,
            "seed": rng.randrange(1 << 30),
        }
        kind = rng.choices(("whole", "stream", "leaves", "slow"), (4, 4, 1, 1))[0]
        tally.ends["begun"] += 1
        try:
            await asyncio.wait_for(_ask(http, body, kind, rng, tally), 300)
        except Exception as e:
            tally.wrong.append(f"{kind}: {type(e).__name__}: {e}")
            return


async def _ask(
    http: Any, body: dict[str, Any], kind: str, rng: random.Random, tally: Tally
) -> None:
    if kind == "whole":
        answer = await http.post("/v1/completions", json=body)
        if _refused(answer, tally):
            return
        _whole(answer.json()["usage"]["completion_tokens"], body, tally)
        return
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    leave_after = rng.randint(1, 20) if kind == "leaves" else None
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
        if _refused(answer, tally):
            return
        number, lines = 0, [""]
        async for line in answer.aiter_lines():
            lines = [*lines[-4:], line] if line else lines
            number += 1
            if number == leave_after:
                tally.ends["left"] += 1
                return
            if kind == "slow":
                await asyncio.sleep(SLOW_SECONDS)
    if lines[-1] != "data: [DONE]":
        tally.wrong.append(f"{kind}: a stream ended with {lines[-1][:200]}")
        return
    _whole(json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"], body, tally)


def _whole(tokens: int, body: dict[str, Any], tally: Tally) -> None:
    tally.ends["answered"] += 1
    tally.tokens += tokens
    if tokens != body["max_tokens"]:
        tally.wrong.append(f"{tokens} tokens came, {body['max_tokens']} were asked for")


def _refused(answer: Any, tally: Tally) -> bool:
    if answer.status_code == 200:
        return False
    if answer.status_code == 503 and "retry-after" in answer.headers:
        tally.ends["refused"] += 1
    else:
        tally.wrong.append(f"status {answer.status_code}: {answer.text[:200]}")
    return True


async def _half_open(url: str, said: bytes, tally: Tally) -> None:
    """A connection that never says all of its request, again and again."""
    parts = urlsplit(url)
    while True:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(said)
            with contextlib.suppress(ConnectionError):
                await reader.read()  # until its end
            tally.half_open += 1
        finally:
            writer.close()


def gauges(text: str) -> dict[str, float]:
    """vLLM's gauges by name, out of what /metrics says."""
    found = re.findall(r"^vllm:(num_requests_\w+|kv_cache_usage_perc){.*} (\S+)$", text, re.M)
    return {name: float(value) for name, value in found}


@dataclass
class Server:
    """`quantize serve` in a process of its own."""

    process: subprocess.Popen[str]
    url: str

    @classmethod
    def start(cls, model: Path, log: Path, options: list[str]) -> Server:
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "serve", str(model), "--port", "0", *options],
                stderr=out, text=True,
            )  # fmt: skip
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and process.poll() is None:
            events = [json.loads(x) for x in log.read_text().splitlines() if x.startswith("{")]
            named = {event["event"]: event for event in events}
            if "ready" in named:
                return cls(process, named["listening"]["address"])
            time.sleep(0.1)
        process.kill()
        raise UserError(f"the server did not start; {log} says why")

    @property
    def resident(self) -> int:
        """Bytes of memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def descriptors(self) -> int:
        """Files and connections that it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


async def soak(server: Server, load: Load) -> dict[str, Any]:
    """What came of it, and what was wrong."""
    import httpx2

    memory: list[int] = []
    descriptors, began = server.descriptors, time.monotonic()

    async def watch() -> None:
        while True:
            memory.append(server.resident)
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    tally = await put_under(server.url, load)
    seconds = time.monotonic() - began
    watching.cancel()
    async with httpx2.AsyncClient(base_url=server.url) as http:
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            left = gauges((await http.get("/metrics")).text)
            left["connections"] = max(0, server.descriptors - descriptors - 1)  # this one
            if not any(left.values()):
                break
            if time.monotonic() > end:
                tally.wrong.append(f"still there after {SETTLE_SECONDS:g} s: {left}")
                break
            await asyncio.sleep(0.1)
    third = len(memory) // 3
    early, late = max(memory[: third + 1]), max(memory[2 * third :])
    if late > GROWTH * early:
        tally.wrong.append(f"memory grew from {early:,} to {late:,} bytes")
    return {
        "seconds": round(seconds, 1), "clients": load.clients, "seed": load.seed,
        "requests": dict(tally.ends), "tokens": tally.tokens, "half_open_ended": tally.half_open,
        "resident_mb": {"begin": memory[0] // 10**6, "first_third": early // 10**6,
                        "last_third": late // 10**6},
        "left": left, "wrong": tally.wrong,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lowbit.evals.server_soak")
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("server_soak.log"))
    asked = parser.parse_args()
    server = Server.start(asked.model, asked.log, [])
    try:
        load = Load(asked.clients, asked.seconds, asked.seed, asked.requests)
        told = asyncio.run(soak(server, load))
    finally:
        code = server.stop()
    if code != 0:
        told["wrong"].append(f"the server ended with {code}")
    sys.stdout.write(json.dumps(told, indent=2) + "\n")
    sys.exit(1 if told["wrong"] else 0)


if __name__ == "__main__":
    main()
