"""Sequences that let go of blocks: what is kept, what is seen, and that nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels.attention_ops import AttentionOptions, PagedBatch, paged_attention
from lowbit.kernels.errors import UserError
from lowbit.kernels.paged_kv import new_pool
from lowbit.runtime import LLM, SamplingParams
from lowbit.runtime.eviction import Eviction, block_heat
from lowbit.runtime.paged_engine import BLOCK_SIZE, PagedEngine
from lowbit.runtime.scheduling.integrity import check_scheduler
from transformers import AutoModelForCausalLM

from .runtime_models import FAMILIES, OTHERS, save_tiny

GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
PROMPTS = [
    torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (100, 37, 150)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), FAMILIES["llama"]())


def paged(folder: Path, **options: Any) -> tuple[LLM, PagedEngine]:
    llm = LLM(folder, "cpu", "float32", **options)
    assert isinstance(llm._engine, PagedEngine)
    return llm, llm._engine


def tokens(llm: LLM, prompts: Any = PROMPTS, params: Any = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [c.token_ids for o in outputs for c in o.outputs]


def test_who_is_let_go_of() -> None:
    """Of entries 0 to 9 but 4; entry 2 is the most attended to, entry 3 the least."""
    held, heat = [0, 1, 2, 3, 5, 6, 7, 8, 9], [0.0, 4.0, 9.0, 1.0, 99.0, 3.0, 2.0, 0.0, 0.0, 0.0]
    assert Eviction("window", 5).outdone(held, heat) == [1, 2, 3, 5]
    assert Eviction("h2o", 6).outdone(held, heat) == [3, 5, 6]
    assert Eviction("snapkv", 6).outdone(held, heat) == [3, 5, 6]
    assert Eviction("h2o", 5).outdone(held, [0.0] * 10) == [1, 2, 3, 5], "the older of equal ones"


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_heat_is_the_attention_that_each_block_gets(softcap: float | None) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim, size, length, n = 4, 2, 16, 4, 11, 5
    keys, values = (new_pool(6, kv_heads, size, dim, None, torch.float32) for _ in "kv")
    keys.codes.normal_()
    table = torch.tensor([[3, 1, 4]], dtype=torch.int32)
    q = torch.randn(n, heads, dim)
    options = AttentionOptions(dim**-0.5, softcap=softcap)
    batch = PagedBatch(table, torch.tensor([length]), torch.tensor([0, n]), n, length)
    lse = paged_attention(q, keys, values, batch, options).lse
    k = keys.codes[table[0].long()].transpose(0, 1).flatten(1, 2)[:, :length]
    logits = torch.einsum("nhd,hkd->hnk", q, k.repeat_interleave(2, 0)) * dim**-0.5
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    seen = torch.arange(length) <= torch.arange(length - n, length)[:, None]
    weights = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1).sum((0, 1))
    want = torch.stack([part.sum() for part in weights.split(size)])
    got = block_heat(q, keys, table[0], length, lse, options)
    torch.testing.assert_close(got, want)
    assert got.sum().item() == pytest.approx(n * heads, rel=1e-4)


@pytest.mark.parametrize("method", ["window", "h2o", "snapkv"])
def test_a_budget_that_is_never_reached_changes_nothing(folder: Path, method: str) -> None:
    plain, _ = paged(folder)
    llm, _ = paged(folder, kv_eviction=method, kv_budget=256)
    assert tokens(llm) == tokens(plain)


def test_what_the_window_leaves_is_seen_at_its_own_positions(folder: Path) -> None:
    """Transformers' logits under a mask that says, for each token, which blocks were left when it
    ran: the first of 16 tokens and the newest four."""
    budget, prompt = 5, PROMPTS[0]
    llm, _ = paged(folder, kv_eviction="window", kv_budget=budget * BLOCK_SIZE,
                   max_num_batched_tokens=32)  # fmt: skip
    got = tokens(llm, [prompt])[0]
    ids = prompt + got
    mask = torch.full((len(ids), len(ids)), -torch.inf)
    begin = 0
    while begin < len(ids) - 1:  # steps: chunks of the prompt, then tokens
        end = min(begin + 32, len(prompt)) if begin < len(prompt) else begin + 1
        before = -(-begin // BLOCK_SIZE)
        gone = range(1, max(1, before - (budget - 1)))
        for row in range(begin, end):
            mask[row, : row + 1] = 0
            for block in gone:
                mask[row, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = -torch.inf
        begin = end
    mask[-1] = 0
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = hf(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0]
        whole = hf(torch.tensor([ids])).logits[0]
    rows = range(len(prompt) - 1, len(ids) - 1)
    assert [int(logits[row].argmax()) for row in rows] == got
    assert [int(whole[row].argmax()) for row in rows] != got, "which it does not always see"


@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
@pytest.mark.parametrize("method", ["window", "h2o"])
def test_sequences_run_in_fewer_blocks_than_they_have_tokens(
    folder: Path, method: str, swap: bool
) -> None:
    _, whole = paged(folder)
    block = whole._kv.block_bytes
    llm, engine = paged(
        folder, kv_eviction=method, kv_budget=64, kv_memory=9 * block,
        swap_memory=21 * block if swap else 0, max_num_seqs=4, max_num_batched_tokens=40,
    )  # fmt: skip
    prompts = [p[:90] for p in PROMPTS]
    requests = llm._maker.requests(prompts, SamplingParams(max_tokens=150, ignore_eos=True, seed=1))
    for request in requests:
        engine.add(request)
    most = 0
    while engine.has_work:
        engine.step()
        check_scheduler(engine._scheduler)
        for state in engine._scheduler.roster.running:
            most = max(most, *(sum(b > 0 for b in s.table.blocks[0]) for s in state.sequences))
    assert all(len(r.continuations[0].token_ids) == 150 for r in requests)
    assert most * BLOCK_SIZE <= 64 + 40 + BLOCK_SIZE, "of 240 tokens"
    assert engine.metrics().preemptions > 0 and engine.metrics().kv_usage == 0


def test_snapkv_cuts_the_prompt_and_keeps_what_comes(folder: Path) -> None:
    llm, engine = paged(folder, kv_eviction="snapkv", kv_budget=80)
    request = llm._maker.request(PROMPTS[2], SamplingParams(n=2, max_tokens=40, ignore_eos=True))
    engine.add(request)
    engine.step()
    sequences = engine._scheduler.roster.running[0].sequences
    held = [[i for i, b in enumerate(s.table.blocks[0]) if b] for s in sequences]
    assert len(held) == 2 and held[0] == held[1] and len(held[0]) == 5
    assert held[0][0] == 0 and held[0][-3:] == [7, 8, 9]
    while engine.has_work:
        engine.step()
        check_scheduler(engine._scheduler)
    assert all(len(c.token_ids) == 40 for c in request.continuations)


def test_nothing_is_taken_over_from_a_prompt_whose_blocks_have_seen_less(folder: Path) -> None:
    llm, engine = paged(folder, kv_eviction="window", kv_budget=64, max_num_batched_tokens=32)
    first = tokens(llm, [PROMPTS[2]])
    assert tokens(llm, [PROMPTS[2]]) == first
    assert engine._scheduler.blocks.prefix is None and llm.metrics().hit_rate == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_eviction": "random", "kv_budget": 64}, "kv_eviction must be one of window, h2o"),
        ({"kv_eviction": "h2o"}, "kv_budget must be at least 64 tokens with kv_eviction='h2o'"),
        ({"kv_eviction": "h2o", "kv_budget": 63}, "kv_budget must be at least 64 .* got 63"),
        ({"kv_budget": 64}, "kv_eviction must be one of .* got None"),
        ({"kv_eviction": "h2o", "kv_budget": 64, "speculate": "ngram"}, "does not go with spec"),
    ],
    ids=lambda v: "" if isinstance(v, str) else "-".join(v),
)
def test_bad_options_are_refused(folder: Path, options: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        LLM(folder, "cpu", "float32", **options)


def test_the_other_engine_evicts_nothing(tmp_path: Path) -> None:
    bloom = save_tiny(tmp_path / "bloom", OTHERS["bloom"]())
    with pytest.raises(UserError, match="kv_eviction needs the paged engine"):
        LLM(bloom, "cpu", "float32", kv_eviction="window", kv_budget=64)
