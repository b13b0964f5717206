"""Requests as people made them: prompts and answers of a ShareGPT-like file.

A file is a JSON list or JSON lines of {"conversations": [{"from": "human", "value": "..."},
{"from": "gpt", "value": "..."}, ...]}, of {"messages": [{"role": "user", "content": "..."}, ...]},
or of {"prompt": "...", "completion": "..."}. The first turn of a person and the answer to it count;
the answer's tokens are how much is asked for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ...kernels.errors import UserError
from .load import Lengths, Load, LoadPlan, with_arrivals

LARGEST = 2 << 30  # bytes of a file
SHORTEST = 4  # tokens of a prompt or an answer: less is no request
ENTRY = '{"conversations": [...]}, {"messages": [...]} or {"prompt": "...", "completion": "..."}'
Encode = Callable[[str], Sequence[int]]


class Exchange(NamedTuple):
    """prompt: token ids; output: tokens of the answer."""

    prompt: tuple[int, ...]
    output: int


def read_exchanges(path: Path, encode: Encode, longest: int) -> list[Exchange]:
    """Those of a file whose prompt and answer have at least SHORTEST tokens each and at most
    `longest` together, in its order. UserError for what is no such file, or holds none."""
    if not path.is_file():
        raise UserError(f"no such file of conversations: {path}")
    if path.stat().st_size > LARGEST:
        raise UserError(f"{path} is larger than {LARGEST >> 30} GiB; take a part of it")
    found = []
    for number, entry in enumerate(_entries(path), 1):
        turn = _first_turn(entry)
        if turn is None:
            raise UserError(f"{path}, entry {number} is none of {ENTRY}")
        prompt, output = tuple(encode(turn[0])), len(encode(turn[1]))
        if min(len(prompt), output) >= SHORTEST and len(prompt) + output <= longest:
            found.append(Exchange(prompt, output))
    if not found:
        raise UserError(f"{path} holds no exchange of {SHORTEST} tokens or more within {longest}")
    return found


def plan_of(exchanges: Sequence[Exchange], plan: LoadPlan) -> LoadPlan:
    """The plan with the lengths that the file's exchanges have."""
    prompts = [len(e.prompt) for e in exchanges]
    outputs = [e.output for e in exchanges]
    return replace(
        plan,
        prompt=Lengths(min(prompts), max(prompts)),
        output=Lengths(min(outputs), max(outputs)),
        shared_prefix=0,
    )


def draw_exchanges(plan: LoadPlan, exchanges: Sequence[Exchange], run: int) -> Load:
    """A load of exchanges drawn at random, none twice before all have come."""
    draw = random.Random(f"{plan.seed} {run}")
    asked: list[tuple[tuple[int, ...], int]] = []
    while len(asked) < plan.requests:
        count = min(plan.requests - len(asked), len(exchanges))
        asked += [(e.prompt, e.output) for e in draw.sample(list(exchanges), count)]
    return with_arrivals(asked, plan, draw)


def _entries(path: Path) -> Iterator[Any]:
    text = path.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("["):
            yield from json.loads(text)
            return
        for line in text.splitlines():
            if line.strip():
                yield json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is neither a JSON list nor JSON lines: {e}") from e


def _first_turn(entry: Any) -> tuple[str, str] | None:
    """What a person said first and the answer; "" and "" where there is none, None where `entry`
    is something else."""
    if not isinstance(entry, dict):
        return None
    if isinstance(entry.get("prompt"), str):
        return entry["prompt"], str(entry.get("completion", ""))
    turns = entry.get("conversations", entry.get("messages"))
    if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
        return None
    said = [
        (str(t.get("from", t.get("role"))), str(t.get("value", t.get("content", ""))))
        for t in turns
    ]
    for (who, text), (other, answer) in zip(said, said[1:], strict=False):
        if who in ("human", "user") and other in ("gpt", "assistant", "chatgpt", "bing"):
            return text, answer
    return "", ""


def _text(turn: dict[str, Any], name: str, other: str) -> str:
    return str(turn.get(name, turn.get(other, "")))
