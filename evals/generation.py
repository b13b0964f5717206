"""What greedy continuations tell: loops that a model falls into, and where it leaves its base.

Divergence is measured on a text that is given; here the model goes on from what it has said itself,
where one other token changes all that follows. Measured in our runtime, in one dtype for all.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..kernels.errors import UserError

NGRAM = 4  # tokens whose repetition is counted
LONGEST_LOOP = 32  # tokens that are said over and over
TIMES = 3  # how often, at the end, to be a loop
SAMPLES = 4  # texts that are kept
PROMPT_TOKENS = 48
SPACING = 8  # prompts' lengths from one to the next, at most


@dataclass(frozen=True)
class GenerationPlan:
    """prompts: token ids; new_tokens: at most, for each."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int = 64

    def __post_init__(self) -> None:
        if not self.prompts or self.new_tokens < NGRAM:
            raise UserError(
                f"generation needs a prompt and at least {NGRAM} new tokens, got "
                f"{len(self.prompts)} and {self.new_tokens}"
            )


class Sample(NamedTuple):
    """A prompt and what the base and the model make of it; base: None of the base itself."""

    prompt: str
    base: str | None
    text: str


class Generation(NamedTuple):
    """Of the continuations of `prompts` prompts. repetition: the share of their runs of four tokens
    that stood before in the same continuation; loops: continuations that end by saying the same
    over and over. Against the base, None of itself: same: continuations that are its own;
    first_difference: the median place of the first token that is not, among the others (None where
    there are none); differences: that place of each, None where it is the same."""

    prompts: int
    new_tokens: int
    repetition: float
    loops: int
    same: int | None
    first_difference: float | None
    differences: list[int | None] | None
    samples: list[Sample]


def cut_prompts(tokens: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """So many prompts, at even distances in a text. UserError where it is too short."""
    every = len(tokens) // max(count, 1)
    if count < 1 or every < PROMPT_TOKENS:
        raise UserError(
            f"the text has {len(tokens)} tokens, too few for {count} prompts of {PROMPT_TOKENS}"
        )
    return tuple(tuple(tokens[i * every :][:PROMPT_TOKENS]) for i in range(count))


def repetition(token_ids: Sequence[int]) -> float:
    """The share of runs of NGRAM tokens that stood before; 0 of fewer tokens."""
    runs = [tuple(token_ids[i : i + NGRAM]) for i in range(len(token_ids) - NGRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def ends_in_a_loop(token_ids: Sequence[int]) -> bool:
    """Whether the same tokens, at most LONGEST_LOOP, stand TIMES times at the end."""
    ids = list(token_ids)
    for length in range(1, min(LONGEST_LOOP, len(ids) // TIMES) + 1):
        if ids[-length * TIMES :] == ids[-length:] * TIMES:
            return True
    return False


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The place of the first token that differs, or that one has and the other has not."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return i
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def generation_of(
    plan: GenerationPlan,
    answers: Sequence[Sequence[int]],
    base: Sequence[Sequence[int]] | None,
    decode: Any,
) -> Generation:
    """Of a model's continuations and its base's. decode: token ids to text."""
    pairs = None if base is None else list(zip(answers, base, strict=True))
    places = None if pairs is None else [first_difference(a, b) for a, b in pairs]
    apart = [] if places is None else [p for p in places if p is not None]
    return Generation(
        prompts=len(plan.prompts),
        new_tokens=plan.new_tokens,
        repetition=statistics.fmean(map(repetition, answers)),
        loops=sum(map(ends_in_a_loop, answers)),
        same=None if places is None else places.count(None),
        first_difference=statistics.median(apart) if apart else None,
        differences=places,
        samples=[
            Sample(decode(prompt), None if base is None else decode(base[i]), decode(answers[i]))
            for i, prompt in enumerate(plan.prompts[:SAMPLES])
        ],
    )


def measure_generation(
    models: Mapping[str, Path],
    plan: GenerationPlan,
    base: str | None,
    dtype: str,
    device: str | torch.device,
    caches: Mapping[str, str],
) -> dict[str, Generation]:
    """Of each model, one after the other. caches: the format of its KV cache, by name."""
    answers: dict[str, list[list[int]]] = {}
    decode: Any = None
    for name, folder in models.items():
        answers[name], tokenizer = _continued(folder, plan, dtype, device, caches.get(name, "auto"))
        decode = decode or tokenizer.decode
    theirs = None if base is None else answers[base]
    return {
        name: generation_of(plan, own, None if name == base else theirs, decode)
        for name, own in answers.items()
    }


def _continued(
    folder: Path, plan: GenerationPlan, dtype: str, device: str | torch.device, kv: str
) -> tuple[list[list[int]], Any]:
    """The greedy continuations by a model, and its tokenizer."""
    from ..runtime import LLM, SamplingParams

    longest = PROMPT_TOKENS + plan.new_tokens
    llm = LLM(folder, device, dtype, kv_cache_dtype=kv, max_model_len=longest)
    params = SamplingParams(max_tokens=plan.new_tokens, temperature=0.0)
    prompts: Any = [{"prompt_token_ids": list(p)} for p in plan.prompts]
    outputs = llm.generate(prompts, params)
    tokenizer = llm.tokenizer
    del llm
    gc.collect()
    return [list(o.outputs[0].token_ids) for o in outputs], tokenizer
