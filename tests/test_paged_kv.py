"""KV pools: what is written is what kv_quant says, and sizes are checked."""

from __future__ import annotations

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.kernels.kv_quant import KVFormat, fake_quantize_kv
from lowbit.kernels.paged_kv import gather_blocks, new_pool, write_slots

from .attention_cases import stored_forms


@pytest.mark.parametrize("form", stored_forms(32))
def test_a_pool_gives_back_what_the_cache_would(form):
    fmt = stored_forms(32)[form]
    x = torch.randn(10, 3, 32, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([0.02])
    pool = new_pool(4, 3, 8, 32, fmt, torch.float32, static_scale=scale)
    slots = torch.tensor([24, 25, 3, 31, 0, 9, 10, 30, 17, 5])
    write_slots(pool, x, slots)
    stored = gather_blocks(pool, torch.arange(4)[None], torch.float32)[0, :, slots]
    expected = x if fmt is None else fake_quantize_kv(x.transpose(0, 1)[None], fmt, scale)[0]
    assert torch.equal(stored, x.transpose(0, 1) if fmt is None else expected)
    assert pool.form.head_dim == 32 and pool.block_size == 8 and pool.kv_heads == 3


@pytest.mark.parametrize("form", stored_forms(32))
def test_no_tokens_are_written_and_no_blocks_read(form):
    pool = new_pool(2, 3, 8, 32, stored_forms(32)[form], torch.float32,
                    static_scale=torch.tensor([1.0]))  # fmt: skip
    write_slots(pool, torch.zeros(0, 3, 32), torch.zeros(0, dtype=torch.int64))
    assert int(pool.codes.float().count_nonzero()) == 0
    none = torch.zeros(2, 0, dtype=torch.int32)
    assert gather_blocks(pool, none, torch.float32).shape == (2, 3, 0, 32)


def test_slots_of_minus_one_are_not_written():
    pool = new_pool(2, 1, 4, 8, None, torch.float32)
    write_slots(pool, torch.ones(3, 1, 8), torch.tensor([-1, 2, -1]))
    assert pool.codes.sum() == 8 and bool((pool.codes[0, 0, 2] == 1).all())


def test_a_pool_that_cannot_be_is_refused():
    with pytest.raises(UserError, match="multiple of 8 channels, got 20"):
        new_pool(1, 1, 4, 20, KVFormat("int", 8, True, "channels", 20), torch.float16)
    with pytest.raises(UserError, match="groups of 24 channels do not divide a head of 64"):
        new_pool(1, 1, 4, 64, KVFormat("int", 4, True, "channels", 24), torch.float16)
    with pytest.raises(UserError, match="groups of 32 tokens do not divide a block of 16"):
        new_pool(1, 1, 16, 64, KVFormat("int", 4, True, "tokens", 32), torch.float16)
    with pytest.raises(UserError, match="static scales needs them"):
        new_pool(1, 1, 16, 64, KVFormat("int", 8, True, "static"), torch.float16)
    by_tokens = new_pool(1, 1, 16, 64, KVFormat("int", 4, True, "tokens", 16), torch.float16)
    with pytest.raises(UserError, match="cannot be written a token at a time"):
        write_slots(by_tokens, torch.zeros(1, 1, 64), torch.tensor([0]))


def test_bytes_of_a_pool_are_those_of_its_codes_and_scales():
    fmt = KVFormat("int", 4, False, "channels", 64)
    assert new_pool(2, 3, 16, 64, fmt, torch.float16).nbytes == 2 * 3 * 16 * (32 + 2 + 2)
