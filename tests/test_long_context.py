"""Needles in haystacks, and perplexity by position: by hand, and on a real engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lowbit.evals.long_context import (
    DEPTHS,
    NEEDLE,
    PARTS,
    by_position,
    find_needles,
    haystack,
    main,
    table,
)
from lowbit.evals.perplexity import perplexity
from lowbit.evals.windows import Windowing, cut_windows
from lowbit.kernels.errors import UserError


def encode(words: str) -> list[int]:
    return list(words.encode())


def decode(ids: list[int]) -> str:
    return bytes(ids).decode()


TEXT = encode("all work and no play makes jack a dull boy. " * 40)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_needle_lies_at_its_depth(depth: float) -> None:
    stack = haystack(TEXT, encode, 300, depth, random.Random(3))
    said = decode(stack.prompt)
    assert len(stack.prompt) == 300 and said.endswith(NEEDLE) and len(stack.answer) == 5
    before, _, after = said.removesuffix(NEEDLE).partition(f"{NEEDLE} {stack.answer}.")
    assert len(before) == pytest.approx(depth * (len(before) + len(after)), abs=1)
    with pytest.raises(UserError, match="a haystack of 60 tokens needs -"):
        haystack(TEXT, encode, 60, depth, random.Random(3))


class Reader:
    """Finds needles in the first `sight` tokens, and answers with something else otherwise."""

    def __init__(self, sight: int) -> None:
        self.sight = sight

    def generate(self, prompts: list[dict[str, list[int]]], params: Any) -> list[Any]:
        def answer(ids: list[int]) -> Any:
            said = decode(ids[: self.sight]).partition(f"{NEEDLE} ")[2][:5]
            return SimpleNamespace(outputs=[SimpleNamespace(text=f" {said or '99999'}. And")])

        return [answer(p["prompt_token_ids"]) for p in prompts]


def test_needles_are_counted_by_length_and_depth() -> None:
    draw = random.Random(0)
    stacks = [haystack(TEXT, encode, n, d, draw) for n in (200, 400) for d in (0.0, 1.0)] * 2
    found = find_needles(Reader(sight=250), stacks)
    assert [(f.length, f.depth, f.tries, f.found) for f in found] == [
        (200, 0.0, 2, 2), (200, 1.0, 2, 2), (400, 0.0, 2, 2), (400, 1.0, 2, 0)]  # fmt: skip


def test_parts_are_the_perplexity_of_their_positions() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 16, (96,))

    def scorer(rows: torch.Tensor) -> torch.Tensor:
        """Surer of each token the earlier it stands."""
        logits = torch.zeros(rows.shape[1], 16)
        nexts = torch.cat([rows[0, 1:], rows[0, :1]])
        logits[torch.arange(len(nexts)), nexts] = torch.linspace(4.0, 0.0, len(nexts))
        return logits

    windows = cut_windows(ids, Windowing(32, 32, windows=3), None)
    parts = by_position(scorer, windows)
    assert [(p.begin, p.end) for p in parts] == [(0, 8), (8, 16), (16, 24), (24, 32)]
    assert [p.nll for p in parts] == sorted(p.nll for p in parts)
    whole = perplexity(scorer, windows)
    total = sum(p.nll * n for p, n in zip(parts, (7, 8, 8, 8), strict=True)) / 31
    assert total == pytest.approx(whole.nll, abs=1e-6), "the window's first token has no score"


def test_formats_side_by_side(
    shallow: Path, story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(shallow), "--kv", "model,int4", "--lengths", "128", "--text", str(story),
               "--tries", "1", "--windows", "1", "--dtype", "float32", "--json"]  # fmt: skip
    main(options)
    plain, int4 = json.loads(capsys.readouterr().out)
    assert (plain["kv"], int4["kv"]) == ("model", "int4")
    assert [n["depth"] for n in plain["needles"]] == list(DEPTHS)
    assert len(plain["parts"]) == PARTS
    assert all(a["nll"] != b["nll"] for a, b in zip(plain["parts"], int4["parts"], strict=True))
    found = [SimpleNamespace(kv=f["kv"], needles=[SimpleNamespace(**n) for n in f["needles"]],
                             parts=[SimpleNamespace(**p) for p in f["parts"]])
             for f in (plain, int4)]  # fmt: skip
    assert "| int4 | " in table(found) and "needles of 128 tokens" in table(found)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        main([str(shallow), "--lengths", "many"])
