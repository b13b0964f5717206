"""Continuous batching over blocks changes no token: in chunks, preempted, from the prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.runtime import LLM, SamplingParams
from lowbit.runtime.kv_pools import kv_memory_within
from lowbit.runtime.paged_engine import BLOCK_SIZE, PagedEngine

from .runtime_models import FAMILIES, OTHERS, save_tiny

SHARED = "All prompts begin with these words, which fill several blocks. "
PROMPTS = [SHARED + end for end in ("One.", "Another one, a bit longer than it.", "", "Last")]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request, tmp_path_factory) -> Path:
    """Of one kind of layers, and of two, one of them with a window of 8."""
    return save_tiny(tmp_path_factory.mktemp(request.param), FAMILIES[request.param]())


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """What each prompt gives with the other engine, which runs transformers' own modules."""
    llm = LLM(folder, "cpu", "float32", engine="contiguous", max_num_seqs=1)
    return tokens(llm)


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def paged(folder: Path, **options: Any) -> LLM:
    return LLM(folder, "cpu", "float32", engine="paged", **options)


def engine(llm: LLM) -> PagedEngine:
    assert isinstance(llm._engine, PagedEngine)
    return llm._engine


def a_block(llm: LLM) -> int:
    """Bytes of one block of all layers."""
    pools = engine(llm)._kv.pools
    return sum(p.nbytes // len(p.codes) for pair in pools for p in pair)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 33},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_steps_are_made(folder: Path, alone, options) -> None:
    assert tokens(paged(folder, **options)) == alone


def test_preempted_requests_give_the_same_tokens(folder: Path, alone) -> None:
    whole = paged(folder)
    longest = max(len(whole.tokenizer(p)["input_ids"]) for p in PROMPTS) + GREEDY.max_tokens
    room = -(-longest // BLOCK_SIZE) + 2
    llm = paged(folder, kv_memory=a_block(whole) * (room + 1), enable_prefix_caching=False)
    assert tokens(llm) == alone
    stats = engine(llm).scheduler_stats
    assert stats.preemptions > 0 and stats.running == stats.waiting == 0
    assert stats.kv.blocks_in_use == 0


def test_what_prompts_share_is_computed_once(folder: Path, alone) -> None:
    llm = paged(folder)
    assert tokens(llm) == alone
    first = llm.stats.prefill_tokens
    assert engine(llm).scheduler_stats.tokens.cached > 0
    assert tokens(llm) == alone
    assert llm.stats.prefill_tokens - first < first


def test_seeded_draws_do_not_depend_on_the_batch(folder: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
    assert tokens(paged(folder), params) == tokens(paged(folder, max_num_seqs=1), params)


@pytest.mark.parametrize("kv", ["int8", "fp8_dynamic", "int4_hadamard"])
def test_quantized_keys_and_values_are_those_of_the_other_engine(folder: Path, kv: str) -> None:
    one = LLM(folder, "cpu", "float32", engine="contiguous", kv_cache_dtype=kv)
    other = paged(folder, kv_cache_dtype=kv)
    params = SamplingParams(max_tokens=1, temperature=0)
    assert tokens(other, params) == tokens(one, params)  # the prompt's are dense in the other


def test_a_stream_that_is_left_frees_its_blocks(folder: Path) -> None:
    llm = paged(folder, enable_prefix_caching=False)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert engine(llm).scheduler_stats.running == 1
    stream.close()
    assert tokens(llm, SamplingParams(max_tokens=1)), "a later call frees them"
    assert engine(llm).scheduler_stats.kv.blocks_in_use == 0


def test_a_request_that_never_fits_is_refused_with_the_numbers(folder: Path, alone) -> None:
    llm = paged(folder, kv_memory=3 * a_block(paged(folder)))
    with pytest.raises(UserError, match=r"can never fit: .* KV blocks.* and there are 2"):
        tokens(llm)
    short = llm.generate("ab", SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    assert len(short[0].outputs[0].token_ids) == 2, "others go on after a refusal"


def test_too_little_memory_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="holds no more than one block"):
        paged(folder, kv_memory=1)


def test_more_memory_than_there_is_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"kv_memory asks for 1,125,899.* are free: ask for less"):
        paged(folder, kv_memory=1 << 50)


def test_a_share_of_a_gpus_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    assert kv_memory_within(0.9, gpu) == 500, "of 900 bytes 400 are in use"
    for share, device, words in [
        (0.4, gpu, "leaves nothing for keys and values: 400 are in use"),
        (1.5, gpu, "above 0 and at most 1, got 1.5"),
        (0.9, torch.device("cpu"), "the model is on cpu: take kv_memory"),
    ]:
        with pytest.raises(UserError, match=words):
            kv_memory_within(share, device)
    with pytest.raises(UserError, match="give one of them"):
        paged(folder, kv_memory=1 << 20, gpu_memory_utilization=0.5)
    with pytest.raises(UserError, match="take kv_memory"):
        paged(folder, gpu_memory_utilization=0.5)


def test_the_urgent_come_first_where_that_is_asked(folder: Path, alone) -> None:
    """One seat: the third prompt ends first, and every prompt's tokens are its own."""
    for policy, order in (("fcfs", [0, 1, 2, 3]), ("priority", [2, 1, 3, 0])):
        llm = paged(folder, max_num_seqs=1, scheduling_policy=policy)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, priority=[9, 0, -5, 0])
        assert [o.outputs[0].token_ids for o in outputs] == alone
        started = [o.metrics.queue_seconds for o in outputs]
        assert sorted(range(4), key=started.__getitem__) == order, policy
    with pytest.raises(UserError, match="4 prompts need as many priorities, got 1"):
        llm.generate(PROMPTS, GREEDY, priority=[1])
    with pytest.raises(UserError, match="policy must be one of fcfs, priority, got 'edf'"):
        paged(folder, scheduling_policy="edf")


def test_engines_are_named_with_the_reason(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "bloom", OTHERS["bloom"]())
    llm = LLM(folder, "cpu", "float32")
    assert llm.engine == "contiguous" and "not bloom" in (llm.engine_declined or "")
    with pytest.raises(
        UserError, match="the paged engine runs .*, not bloom, and .* has positions"
    ):
        paged(folder)
    with pytest.raises(UserError, match="engine must be one of auto, paged, contiguous"):
        LLM(folder, engine="fast")
