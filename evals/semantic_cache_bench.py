"""How often a semantic cache answers a paraphrase, and how often a question that needs another
answer.

    python -m lowbit.evals.semantic_cache_bench MODEL [--vectors NAME]

The cache holds 60 questions (semantic_prompts.txt). Sought in it are two paraphrases of each, one
near miss of each, which reads alike and needs another answer, and each question itself in a cache
without it, to which all others are unrelated; and, in a cache of 30 others (semantic_added.txt),
one for each that adds words which matter. At each threshold a table says how many found their
own question's answer, and how many found another's. Of MODEL's vectors there are three tables: as
/v1/embeddings gives them, from the centre as the server compares them, and with the server's rule
about words (near_texts.py). NAME: a sentence-transformers model in place of MODEL's own vectors; it
has no centre.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.errors import UserError
from ..runtime.async_engine import AsyncEngine
from ..runtime.llm import LLM
from ..runtime.server.near_texts import asks_another
from ..runtime.server.text_vectors import SentenceVectors, make_vectors

THRESHOLDS = (0.50, 0.60, 0.70, 0.75, 0.80, 0.85, 0.90, 0.92, 0.95, 0.97, 0.99)
TEXTS, PAIR = 4, 2  # of a group: a question, two paraphrases, a near miss; a question, a longer one
NEVER = -1.0  # a cosine below every threshold


class Rates(NamedTuple):
    """Shares of what was sought. paraphrases: that found their question. wrong: paraphrases that
    found another one. near_misses, unrelated: that found any."""

    threshold: float
    paraphrases: float
    wrong: float
    near_misses: float
    unrelated: float


def prompts(name: str = "semantic_prompts.txt", texts: int = TEXTS) -> list[list[str]]:
    """Groups of so many texts, as the data file has them."""
    text = files("lowbit.evals").joinpath(name).read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    groups = [group.splitlines() for group in "\n".join(lines).strip().split("\n\n")]
    assert all(len(group) == texts for group in groups)
    return groups


def others(groups: Sequence[Sequence[str]]) -> Tensor:
    """bool [groups, texts, groups]: what the texts of each ask is another thing than each question
    by their words."""
    return torch.tensor(
        [[[asks_another(g[0], text) for g in groups] for text in group] for group in groups]
    )


def rates(vectors: Tensor, never: Tensor, thresholds: Sequence[float]) -> list[Rates]:
    """vectors: float32 [groups, TEXTS, d] of length one. never: bool [groups, TEXTS, groups], texts
    that do not get a question's answer however near."""
    cosines = torch.einsum("gtd,hd->gth", vectors, vectors[:, 0]).masked_fill(never, NEVER)
    own = torch.arange(len(vectors))
    nearest, which = cosines[:, 1:3].max(dim=2)
    near_miss = cosines[:, 3].amax(dim=1)
    unrelated = cosines[:, 0].masked_fill(torch.eye(len(vectors), dtype=torch.bool), NEVER).amax(1)
    right = which == own[:, None]
    return [
        Rates(
            threshold, *(
                float(found.float().mean())
                for found in (
                    (nearest >= threshold) & right, (nearest >= threshold) & ~right,
                    near_miss >= threshold, unrelated >= threshold,
                )
            ),
        )
        for threshold in thresholds
    ]  # fmt: skip


def added_rates(vectors: Tensor, never: Tensor, thresholds: Sequence[float]) -> list[float]:
    """The shares of longer questions that found any. vectors, never: as of `rates`, with PAIR texts
    a group."""
    cosines = torch.einsum("gd,hd->gh", vectors[:, 1], vectors[:, 0]).masked_fill(
        never[:, 1], NEVER
    )
    return [float((cosines.amax(dim=1) >= t).float().mean()) for t in thresholds]


def table(title: str, told: Sequence[Rates], added: Sequence[float]) -> str:
    """In Markdown."""
    lines = [
        f"{title}:", "",
        "| threshold | paraphrases right | wrong | near misses hit | words added | unrelated hit |",
        "|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for one, more in zip(told, added, strict=True):
        shares = " | ".join(f"{100 * share:.1f}%" for share in (*one[1:4], more, one[4]))
        lines.append(f"| {one.threshold:.2f} | {shares} |")
    return "\n".join(lines)


async def served_vectors(llm: LLM, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """float32 [texts, hidden size] twice: as /v1/embeddings gives them, and as the cache compares
    them."""
    compared = make_vectors(llm, None)
    async with AsyncEngine(llm) as engine:
        plain = [await engine.embed(await engine.tokenize(text)) for text in texts]
        return torch.stack(plain), torch.stack([await compared.of(t, engine) for t in texts])


def measure(model: Path, name: str | None) -> str:
    groups, pairs = prompts(), prompts("semantic_added.txt", PAIR)
    texts = [text for group in (*groups, *pairs) for text in group]
    if name is None:
        plain, compared = asyncio.run(served_vectors(LLM(model), texts))
        kinds = [("cosines of /v1/embeddings", plain), ("from the centre", compared)]
    else:
        encode = SentenceVectors(name, "cpu").encode
        kinds = [("cosines", torch.stack([encode(text) for text in texts]))]
    rule = others(groups), others(pairs)
    nothing = torch.zeros_like(rule[0]), torch.zeros_like(rule[1])

    def told(title: str, vectors: Tensor, never: tuple[Tensor, Tensor]) -> str:
        grouped, paired = vectors.split([TEXTS * len(groups), PAIR * len(pairs)])
        found = rates(grouped.view(len(groups), TEXTS, -1), never[0], THRESHOLDS)
        added = added_rates(paired.view(len(pairs), PAIR, -1), never[1], THRESHOLDS)
        return table(title, found, added)

    title = f"{kinds[-1][0]}, with the rule about words: what the server does"
    tables = [told(t, v, nothing) for t, v in kinds] + [told(title, kinds[-1][1], rule)]
    whose = model.name if name is None else Path(name).name
    mean = plain_mean(kinds[0][1][: TEXTS * len(groups)].view(len(groups), TEXTS, -1))
    head = (
        f"{whose}: {len(groups)} questions, {2 * len(groups)} paraphrases, {len(groups)} near "
        f"misses, {len(pairs)} with words added; mean cosine of two questions {mean:.3f}"
    )
    return "\n\n".join([head, *tables])


def plain_mean(vectors: Tensor) -> float:
    """Of the cosines of different groups' questions."""
    questions = vectors[:, 0]
    apart = ~torch.eye(len(questions), dtype=torch.bool)
    return float((questions @ questions.T)[apart].mean())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lowbit.evals.semantic_cache_bench")
    parser.add_argument("model", type=Path)
    parser.add_argument("--vectors", help="a sentence-transformers model")
    asked = parser.parse_args()
    try:
        sys.stdout.write(measure(asked.model, asked.vectors) + "\n")
    except UserError as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
