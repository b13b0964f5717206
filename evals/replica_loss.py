"""What clients see of a replica that is killed while they ask.

    python -m lowbit.evals.replica_loss MODEL [--replicas 2] [--seconds 30] [--clients 32]

starts `quantize serve MODEL --replicas N` on a free port of this machine. Clients ask one after
another, half of the requests as streams; after a third of the time one replica's process gets
SIGKILL. It ends well (exit code 0) where

- every request without a stream was answered whole;
- every stream was whole too, or, begun before the kill, ended with an error that its client got;
- all replicas run again within two minutes, and SIGTERM ends the server with 0 and its processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..kernels.errors import UserError
from .server_soak import Server

BACK_SECONDS = 120.0
REPLICA = b"ray::ServeReplica"


@dataclass(frozen=True)
class Load:
    """clients: that ask one after another, for so many seconds. prompt, new: tokens at most."""

    clients: int = 32
    seconds: float = 30.0
    seed: int = 0
    prompt: int = 100
    new: int = 150


@dataclass
class Seen:
    """ends: how many requests ended how. longest: seconds of the slowest whole answer. wrong: what
    should not have come, in words."""

    ends: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    wrong: list[str] = field(default_factory=list)


def replica_processes(server: int) -> list[int]:
    """The replicas' among the processes that `server` has started."""
    found: dict[int, tuple[int, bytes]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = int(stat[1]), (folder / "cmdline").read_bytes()
            except OSError:  # it has just ended
                continue

    def started(pid: int) -> bool:
        while pid in found and pid != server:
            pid = found[pid][0]
        return pid == server

    return sorted(p for p, (_, line) in found.items() if line.startswith(REPLICA) and started(p))


async def lose(server: Server, load: Load, replicas: int) -> dict[str, Any]:
    """What came of it, and what was wrong."""
    try:
        import httpx2
    except ImportError as e:
        raise UserError("this needs httpx2: pip install 'lowbit[evals]'") from e
    seen, killed = Seen(), asyncio.Event()
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=load.clients)
    async with httpx2.AsyncClient(base_url=server.url, timeout=300.0, limits=limits) as http:
        end = time.monotonic() + load.seconds
        clients = [
            asyncio.create_task(
                _client(http, load, random.Random(load.seed * 100_003 + n), end, killed, seen)
            )
            for n in range(load.clients)
        ]
        await asyncio.sleep(load.seconds / 3)
        victim = replica_processes(server.process.pid)[0]
        os.kill(victim, signal.SIGKILL)
        killed.set()
        back = await _back(http, replicas, seen)
        await asyncio.gather(*clients)
    return {
        "replicas": replicas, "clients": load.clients, "seconds": load.seconds, "seed": load.seed,
        "requests": dict(seen.ends),
        "all_replicas_again_after_s": back, "longest_answer_s": round(seen.longest, 2),
        "wrong": seen.wrong,
    }  # fmt: skip


async def _client(
    http: Any, load: Load, rng: random.Random, end: float, killed: asyncio.Event, seen: Seen
) -> None:
    while time.monotonic() < end:
        body = {
            "prompt": [rng.randrange(3, 250) for _ in range(rng.randint(1, load.prompt))],
            "max_tokens": rng.randint(1, load.new),
            "ignore_eos": True,
        }
        seen.ends["begun"] += 1
        began, before = time.monotonic(), not killed.is_set()
        ask = _stream if rng.random() < 0.5 else _whole
        try:
            kind = await asyncio.wait_for(ask(http, body), 300)
        except Exception as e:
            seen.wrong.append(f"{type(e).__name__}: {e}")
            continue
        if kind == "stream broken off, told so" and not (before and killed.is_set()):
            seen.wrong.append("a stream was broken off that had not run at the kill")
        seen.ends[kind] += 1
        if kind.startswith("whole"):
            seen.longest = max(seen.longest, time.monotonic() - began)


async def _whole(http: Any, body: dict[str, Any]) -> str:
    answer = await http.post("/v1/completions", json=body)
    if answer.status_code != 200:
        raise ValueError(f"status {answer.status_code}: {answer.text[:200]}")
    _check(answer.json(), body)
    return "whole answer"


async def _stream(http: Any, body: dict[str, Any]) -> str:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {(await answer.aread())[:200]}")
        lines = [line async for line in answer.aiter_lines() if line]
    if lines[-1] != "data: [DONE]":
        raise ValueError(f"a stream ended with {lines[-1][:200]}")
    last = json.loads(lines[-2].removeprefix("data: "))
    if last.get("error", {}).get("code") == "replica_lost":
        return "stream broken off, told so"
    _check(last, body)
    return "whole stream"


def _check(told: dict[str, Any], body: dict[str, Any]) -> None:
    if told.get("usage", {}).get("completion_tokens") != body["max_tokens"]:
        raise ValueError(f"{told} is no answer of {body['max_tokens']} tokens")


async def _back(http: Any, replicas: int, seen: Seen) -> float | None:
    """Seconds until all replicas run again, after that they were fewer."""
    began, fewer = time.monotonic(), False
    while time.monotonic() - began < BACK_SECONDS:
        told = (await http.get("/ready")).json()
        running = told.get("replicas", 0)
        if fewer and running == replicas:
            return round(time.monotonic() - began, 1)
        fewer = fewer or running < replicas
        await asyncio.sleep(0.1)
    seen.wrong.append(f"{replicas} replicas did not run again within {BACK_SECONDS:g} s")
    return None


def measure(model: Path, log: Path, load: Load, replicas: int = 2) -> dict[str, Any]:
    """The whole run; "wrong" of the result says what was."""
    server = Server.start(model, log, ["--replicas", str(replicas), "--max-queue", "256"])
    try:
        told = asyncio.run(lose(server, load, replicas))
        processes = replica_processes(server.process.pid)
    finally:
        code = server.stop()
    if code != 0:
        told["wrong"].append(f"the server ended with {code}")
    if left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
        told["wrong"].append(f"processes {left} are left")
    events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    told["asked_again"] = sum(1 for event in events if event.get("retries"))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lowbit.evals.replica_loss")
    parser.add_argument("model", type=Path)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("replica_loss.log"))
    asked = parser.parse_args()
    load = Load(asked.clients, asked.seconds, asked.seed)
    told = measure(asked.model, asked.log, load, asked.replicas)
    sys.stdout.write(json.dumps(told, indent=2) + "\n")
    sys.exit(1 if told["wrong"] else 0)


if __name__ == "__main__":
    main()
