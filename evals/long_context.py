"""What formats of the KV cache do over long contexts: a needle found again, perplexity by position.

    python -m lowbit.evals.long_context MODEL [--kv model,int8,int4] [--lengths 512,2048]

Needle: a sentence with a number stands at some depth in a text, which ends with the sentence's
beginning; right is who goes on with the number (five digits, so that luck finds none). It runs in
our runtime, on the quantized cache itself. Perplexity by position: windows of the longest length
through the reference model with the format's values (as `quantize eval --kv`), scored in parts of
the window: where a cache loses over distance, later parts lose more than earlier ones.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calib.text import load_text, load_tokenizer, tokenize
from ..kernels.device import resolve_device
from ..kernels.errors import UserError
from .estimate import ratio_estimate
from .perplexity import Scorer, log_probabilities, negative_log_likelihood
from .report import plain
from .windows import Window, Windowing, cut_windows

NEEDLE = " The number of the harbour master is"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PARTS = 4  # of a window
ROOM = 16  # tokens beside the text: the number, twice


class Haystack(NamedTuple):
    """prompt: token ids; answer: the number that has to follow."""

    length: int
    depth: float
    prompt: list[int]
    answer: str


class Found(NamedTuple):
    """Of the haystacks of one length and depth: how many, and in how many the needle was found."""

    length: int
    depth: float
    tries: int
    found: int


class Part(NamedTuple):
    """Perplexity of the positions from `begin` to before `end` of all windows, and the mean NLL in
    nats with its standard error."""

    begin: int
    end: int
    perplexity: float
    nll: float
    nll_stderr: float | None


@dataclass(frozen=True)
class LongContext:
    """Of one format of the cache."""

    kv: str
    needles: list[Found]
    parts: list[Part]


def haystack(
    tokens: Sequence[int],
    encode: Callable[[str], list[int]],
    length: int,
    depth: float,
    draw: random.Random,
) -> Haystack:
    """A prompt of `length` tokens with a needle at `depth` of its text. UserError where the text
    is too short, or the length has no room for the needle twice."""
    number = str(draw.randrange(10000, 100000))
    needle, question = encode(f"{NEEDLE} {number}."), encode(NEEDLE)
    filler = length - len(needle) - len(question)
    if filler < 1 or len(tokens) < filler:
        raise UserError(
            f"a haystack of {length} tokens needs {filler} of a text, which has {len(tokens)}; "
            "give a longer text, or lengths beyond the needle's"
        )
    begin = draw.randint(0, len(tokens) - filler)
    text = list(tokens[begin : begin + filler])
    at = round(depth * filler)
    return Haystack(length, depth, text[:at] + needle + text[at:] + question, number)


def find_needles(llm: Any, haystacks: Sequence[Haystack]) -> list[Found]:
    """How often an LLM goes on with the number, by length and depth."""
    from ..runtime import SamplingParams

    params = SamplingParams(max_tokens=ROOM // 2, temperature=0.0)
    prompts: Any = [{"prompt_token_ids": h.prompt} for h in haystacks]
    outputs = llm.generate(prompts, params)
    tally: dict[tuple[int, float], list[bool]] = {}
    for stack, output in zip(haystacks, outputs, strict=True):
        right = output.outputs[0].text.strip().startswith(stack.answer)
        tally.setdefault((stack.length, stack.depth), []).append(right)
    return [Found(*at, len(found), sum(found)) for at, found in tally.items()]


def by_position(scorer: Scorer, windows: Sequence[Window], parts: int = PARTS) -> list[Part]:
    """The perplexity of each part of windows of one length."""
    length = len(windows[0].ids)
    edges = [length * i // parts for i in range(parts + 1)]
    sums: list[list[float]] = [[] for _ in range(parts)]
    counts: list[list[int]] = [[] for _ in range(parts)]
    for window in windows:
        nll = negative_log_likelihood(log_probabilities(scorer, window), window)
        first = window.first_scored
        for i, (begin, end) in enumerate(zip(edges, edges[1:], strict=False)):
            cut = nll[max(begin - first, 0) : end - first]
            sums[i].append(cut.sum().item())
            counts[i].append(cut.numel())
    found = [ratio_estimate(s, c) for s, c in zip(sums, counts, strict=True)]
    return [
        Part(begin, end, math.exp(e.mean), e.mean, e.stderr)
        for begin, end, e in zip(edges, edges[1:], found, strict=False)
    ]


def measure(
    model: Path, formats: Sequence[str], lengths: Sequence[int], text: str, tries: int,
    windows: int, device: str, dtype: str, seed: int = 0,
) -> list[LongContext]:  # fmt: skip
    """Each format on the same haystacks and the same windows."""
    tokenizer = load_tokenizer(model)
    tokens: Tensor = tokenize(load_text(text, "evaluation", tokenizer).text, tokenizer)
    draw = random.Random(seed)

    def encode(words: str) -> list[int]:
        return tokenizer(words, add_special_tokens=False)["input_ids"]

    stacks = [
        haystack(tokens.tolist(), encode, length, depth, draw)
        for length in lengths for depth in DEPTHS for _ in range(tries)
    ]  # fmt: skip
    longest = max(lengths)
    cut = cut_windows(tokens, Windowing(longest, longest, windows=windows), None)
    return [_measured(model, kv, stacks, cut, resolve_device(device), dtype) for kv in formats]


def _measured(
    model: Path, kv: str, stacks: Sequence[Haystack], windows: Sequence[Window],
    device: torch.device, dtype: str,
) -> LongContext:  # fmt: skip
    from ..runtime import LLM
    from .scorer import load_scorer

    longest = max(len(s.prompt) for s in stacks) + ROOM
    llm = LLM(model, device, dtype, kv_cache_dtype=kv, max_model_len=longest, max_num_seqs=4)
    needles = find_needles(llm, stacks)
    del llm
    return LongContext(kv, needles, by_position(load_scorer(model, dtype, device, kv), windows))


def table(found: Sequence[LongContext]) -> str:
    """Markdown: a row a format."""
    first = found[0]
    lengths = list(dict.fromkeys(n.length for n in first.needles))
    headings = [f"needles of {n} tokens" for n in lengths]
    headings += [f"perplexity at {p.begin} to {p.end}" for p in first.parts]
    lines = [f"| KV cache | {' | '.join(headings)} |", "|---" * (len(headings) + 1) + "|"]
    for one in found:
        cells = []
        for length in lengths:
            own = [n for n in one.needles if n.length == length]
            cells.append(f"{sum(n.found for n in own)} of {sum(n.tries for n in own)}")
        cells += [f"{p.perplexity:.3f}" for p in one.parts]
        lines.append(f"| {one.kv} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    described = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=described)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kv", default="model,int8,fp8_dynamic,int4")
    parser.add_argument("--lengths", default="512,1024")
    parser.add_argument("--text", default="pydoc")
    parser.add_argument("--tries", type=int, default=2, help="of each length and depth")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    try:
        lengths = [int(n) for n in args.lengths.split(",")]
        found = measure(
            args.model, args.kv.split(","), lengths, args.text, args.tries, args.windows,
            args.device, args.dtype,
        )  # fmt: skip
    except (UserError, ValueError) as e:
        parser.exit(2, f"{e}\n")
    told = json.dumps([plain(one) for one in found], indent=2) + "\n"
    sys.stdout.write(told if args.json else table(found))


if __name__ == "__main__":
    main()
