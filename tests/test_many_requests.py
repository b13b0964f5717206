"""Many requests, of random lengths, arrivals and ends, through a pool that holds few of them: what
comes of each is what the model says, and nothing is left in the pool.

Every token is checked with transformers' logits for the whole of prompt and output: a greedy one
must be their maximum, a drawn one must be where the cumulative distribution reaches the request's
own random number, both but for rounding.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.runtime import LLM, SamplingParams
from lowbit.runtime.paged_engine import PagedEngine
from lowbit.runtime.request import Request
from lowbit.runtime.sampler import probabilities, sampling_batch
from lowbit.runtime.sampling.philox import as_int64, uniforms
from lowbit.runtime.scheduling.integrity import check_scheduler
from transformers import AutoModelForCausalLM

from .runtime_models import FAMILIES, VOCAB, save_tiny
from .test_speculation import always

BLOCKS, SEATS, BUDGET = 14, 8, 40
CLOSE = 2e-3  # of logits, and of probabilities


def random_request(llm: LLM, dice: random.Random, prompts: list[list[int]]) -> Request:
    """Often with the beginning of one shortly before it."""
    known = dice.choice(prompts[-6:]) if prompts and dice.random() < 0.6 else []
    prompt = known[: dice.randint(len(known) // 2, len(known))] + [
        dice.randrange(VOCAB) for _ in range(dice.randint(1, 40))
    ]
    prompt = prompt[:60]
    prompts.append(prompt)
    n = dice.choice([1, 1, 1, 2, 3])
    params = SamplingParams(
        max_tokens=dice.randint(1, 24),
        temperature=dice.choice([0.0, 0.7, 1.3]) if n == 1 else 1.0,
        top_k=dice.choice([0, 0, 20]),
        seed=dice.getrandbits(64),
        n=n,
    )
    return llm._maker.request(prompt, params)


def drive(llm: LLM, count: int, dice: random.Random) -> list[Request]:
    """Let `count` requests come and some of them be cancelled, between steps."""
    engine = llm._engine
    assert isinstance(engine, PagedEngine)
    prompts: list[list[int]] = []
    requests: list[Request] = []
    while len(requests) < count or engine.has_work:
        for _ in range(dice.choice([0, 1, 2, 4, 8])):
            if len(requests) < count:
                requests.append(random_request(llm, dice, prompts))
                engine.add(requests[-1])
        if requests and dice.random() < 0.03:
            engine.abort(dice.choice(requests[-20:]).request_id)
        engine.step()
        if dice.random() < 0.05:
            check_scheduler(engine._scheduler)
    return requests


def check_tokens(hf: Any, request: Request) -> int:
    """How many of the request's tokens are right: all, or this fails."""
    checked = 0
    for continuation in request.continuations:
        output, prompt = continuation.token_ids, request.prompt_token_ids
        if not output:
            continue
        with torch.inference_mode():
            logits = hf(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].double()
        rows, tokens = torch.arange(len(output)), torch.tensor(output)
        if request.params.temperature == 0:
            behind = logits.max(dim=-1).values - logits[rows, tokens]
            assert behind.max() < CLOSE, request.request_id
        else:
            batch = sampling_batch([request.params] * len(output), torch.device("cpu"))
            sums = probabilities(logits, batch).cumsum(dim=-1)
            count = len(output)
            u = uniforms(
                as_int64([request.seed] * count), rows, torch.full((count,), continuation.index)
            )[:, 0]
            below = torch.where(tokens > 0, sums[rows, (tokens - 1).clamp(min=0)], 0.0)
            assert (below - CLOSE <= u).all() and (u <= sums[rows, tokens] + CLOSE).all()
        checked += len(output)
    return checked


@pytest.mark.parametrize(
    ("family", "count", "options"),
    [
        ("qwen2", 200, {}),
        ("gemma3", 60, {}),
        ("gemma3", 60, {"speculate": "lookahead", "swap_memory": 1 << 18}),
        pytest.param("qwen2", 2000, {}, marks=pytest.mark.slow),
        pytest.param("gemma3", 2000, {}, marks=pytest.mark.slow),
        pytest.param("qwen2", 2000, {"speculate": "ngram"}, marks=pytest.mark.slow),
    ],
    ids=lambda v: "-".join(v) or "plain" if isinstance(v, dict) else str(v),
)
def test_random_requests_end_with_an_empty_pool_and_right_tokens(
    family: str, count: int, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / family, FAMILIES[family]())
    wide = LLM(folder, "cpu", "float32", max_num_seqs=1)
    assert isinstance(wide._engine, PagedEngine)
    block = sum(p.nbytes // len(p.codes) for pair in wide._engine._kv.pools for p in pair)
    llm = LLM(
        folder, "cpu", "float32", max_num_seqs=SEATS, max_num_batched_tokens=BUDGET,
        kv_memory=(BLOCKS + 1) * block, **options,
    )  # fmt: skip
    if "speculate" in options:
        always(llm)
    requests = drive(llm, count, random.Random(count))
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    checked = sum(check_tokens(hf, request) for request in requests)
    ends = [c.finish_reason for r in requests for c in r.continuations]
    assert len(requests) == count and set(ends) <= {"stop", "length", "abort"}
    assert ends.count("abort") < len(ends) / 3, "most have run to their end"
    for continuation in (c for r in requests for c in r.continuations):
        if continuation.finish_reason == "length":
            assert len(continuation.token_ids) == continuation.request.max_tokens
    told = llm.metrics()
    assert checked == told.output_tokens > 8 * count
    assert told.preemptions > count / 40 and told.hit_rate is not None and told.hit_rate > 0
    assert (told.running, told.waiting, told.kv_usage) == (0, 0, 0)
    check_scheduler(llm._engine._scheduler)  # type: ignore[union-attr]
