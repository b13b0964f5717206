"""What goes to host memory and comes back is what an undisturbed request has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.runtime import LLM, SamplingParams
from lowbit.runtime.kv_pools import PagedKV
from lowbit.runtime.paged_engine import BLOCK_SIZE, PagedEngine
from lowbit.runtime.scheduling import BlockCopy
from lowbit.runtime.scheduling.integrity import check_scheduler

from .runtime_models import FAMILIES, save_tiny

PROMPTS = [f"{i}: " + "a text that fills several blocks " * (i % 3 + 1) for i in range(6)]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=24, temperature=1.2, seed=3, n=2, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request, tmp_path_factory) -> Path:
    """Of one kind of layers, and of two, one of them with a window of 8."""
    return save_tiny(tmp_path_factory.mktemp(request.param), FAMILIES[request.param]())


def kv_of(llm: LLM) -> PagedKV:
    assert isinstance(llm._engine, PagedEngine)
    return llm._engine._kv


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [c.token_ids for o in outputs for c in o.outputs]


@pytest.mark.parametrize("host_blocks", [1, 4, 40], ids="{} host blocks".format)
@pytest.mark.parametrize("kv", ["model", "int8_token"])
def test_swapped_requests_give_the_tokens_of_undisturbed_ones(
    folder: Path, kv: str, host_blocks: int
) -> None:
    """Also where host memory has no room for all that are preempted."""
    if kv != "model" and "gemma3" in folder.name:
        pytest.skip("one kind of layers is enough for codes")
    whole = LLM(folder, "cpu", "float32", kv_cache_dtype=kv)
    block = kv_of(whole).block_bytes
    longest = max(len(whole.tokenizer(p)["input_ids"]) for p in PROMPTS) + 24  # type: ignore[misc]
    room = 2 * -(-longest // BLOCK_SIZE) + 2
    llm = LLM(
        folder, "cpu", "float32", kv_cache_dtype=kv, kv_memory=block * (room + 1),
        swap_memory=block * (host_blocks + 1), enable_prefix_caching=host_blocks == 40,
    )  # fmt: skip
    for params in (GREEDY, DRAWN):
        assert tokens(llm, params) == tokens(whole, params)
    told = llm.metrics()
    assert told.preemptions >= told.swaps and told.preemptions > 0
    assert (told.swaps > 0) == (host_blocks > 1) and told.kv_usage == 0
    assert isinstance(llm._engine, PagedEngine)
    check_scheduler(llm._engine._scheduler)


def test_copies_of_one_kind_leave_the_others_alone(folder: Path) -> None:
    llm = LLM(folder, "cpu", "float32", kv_memory=1 << 20, swap_memory=1 << 19)
    kv = kv_of(llm)
    for pool in (pool for pools in (*kv.pools, *kv.host) for pool in pools):
        pool.codes.copy_(torch.arange(len(pool.codes)).view(-1, 1, 1, 1).expand_as(pool.codes))
    kv.copy([
        BlockCopy(0, "out", 3, 5), BlockCopy(0, "out", 4, 6), BlockCopy(0, "device", 7, 3),
        BlockCopy(0, "in", 5, 9),
    ])  # fmt: skip

    def held(pools: object, layer: int, block: int) -> set[float]:
        return set(pools[layer].values.codes[block].unique().tolist())  # type: ignore[index]

    assert held(kv.host, 0, 5) == {3} and held(kv.host, 0, 6) == {4}
    assert held(kv.pools, 0, 3) == {7} and held(kv.pools, 0, 9) == {3}
    if len(set(kv._kinds)) > 1:
        other = next(i for i, kind in enumerate(kv._kinds) if kind)
        assert held(kv.host, other, 5) == {5} and held(kv.pools, other, 9) == {9}


def test_host_memory_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="swap_memory must be from 0 to the .* bytes that are free"):
        LLM(folder, "cpu", "float32", swap_memory=1 << 50)
    with pytest.raises(UserError, match="swap_memory, 1 bytes, holds no block of 16 tokens"):
        LLM(folder, "cpu", "float32", swap_memory=1)
