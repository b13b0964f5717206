"""The ops of a tape against the ops that define them, in memory full of what must not be used."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lowbit.kernels.activations import quantize_activation
from lowbit.kernels.attention_ops import paged_attention_reference
from lowbit.kernels.compiled import decline_compiled
from lowbit.kernels.kv_store_ops import HeadNorm, NewTokens, StoreOptions, kv_store_reference
from lowbit.kernels.linear_int16 import INT8_TOKENS
from lowbit.kernels.norm_ops import Gate, gated_mul_reference, rms_norm_reference
from lowbit.kernels.paged_kv import new_pool
from lowbit.kernels.rotary import rotary_table
from torch import Tensor

from .attention_cases import Sequences, options
from .tapes import needs_tape, run_ops, shared_walker

pytestmark = needs_tape
if decline_compiled() is None:
    from lowbit.kernels.tape import memory, ops, program, tiles
    from lowbit.kernels.tape.program import Op, Register, float_bits
    from numba import njit

GATES: dict[Gate, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
M_PERTURB = -6  # of glibc's mallopt: what fills memory that is allocated


@pytest.fixture(autouse=True)
def huge_scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that ops allocate is full of 3.4e38, as floats, at first."""
    monkeypatch.setattr(program, "walker", shared_walker)
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_PERTURB, 0x80)
    yield
    libc.mallopt(M_PERTURB, 0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unset(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


class Quantized:
    """Where an op puts the codes of rows, their scales and sums."""

    def __init__(self, rows: int, padded: int, group: int) -> None:
        self.group = group
        self.codes = torch.full((rows, padded), -7, dtype=torch.int16)
        self.scales = unset(rows, padded // group)
        self.sums = torch.full((rows, padded // group), -7, dtype=torch.int32)

    @property
    def registers(self) -> dict[str, Tensor]:
        return {"CODES": self.codes, "SCALES": self.scales, "SUMS": self.sums}

    def compare(self, expected: Tensor) -> None:
        """Codes times scales are `expected` [rows, columns] to half a step, and 0 beyond it."""
        codes = self.codes.unflatten(1, (-1, self.group)).double()
        assert torch.equal(codes.sum(2), self.sums.double())
        columns = expected.shape[1]
        assert not self.codes[:, columns:].any()
        error = (codes * self.scales.unsqueeze(2)).flatten(1)[:, :columns] - expected
        step = self.scales.repeat_interleave(self.group, 1)[:, :columns]
        assert (error.abs() <= 0.51 * step + 4e-7 * expected.abs()).all()


@pytest.mark.parametrize("columns", [8, 13, 64, 200])
def test_norm(columns: int) -> None:
    """Of a part of wider rows, written elsewhere, in place, or added to what is there."""
    x, weight = normal(5, columns + 6) * 3, normal(columns, seed=1)
    part = slice(4, 4 + columns)
    expected = rms_norm_reference(x[:, part].double(), weight.double(), 1e-5).out.float()

    def norm(target: str, begin: int, row: int, onto: int, factor: float) -> list[int]:
        return [
            Op.NORM, Register.WIDE, 4, columns + 6, columns, weight.data_ptr(), float_bits(1e-5),
            Register[target], begin, row, onto, float_bits(factor),
        ]  # fmt: skip

    out = unset(6, columns + 3)
    run_ops([norm("UPDATE", 2, columns + 3, 0, 0.0)], ROWS=5, WIDE=x, UPDATE=out)
    torch.testing.assert_close(out[:5, 2 : 2 + columns], expected, atol=1e-6, rtol=1e-6)
    assert out.isnan().sum() == 5 * 3 + columns + 3, "nothing beside it"
    stream = normal(5, columns, seed=2)
    summed = stream.clone()
    run_ops([norm("STREAM", 0, columns, 1, 0.4)], ROWS=5, WIDE=x, STREAM=summed)
    torch.testing.assert_close(summed, stream + 0.4 * expected, atol=2e-6, rtol=2e-6)
    before = x.clone()
    run_ops([norm("WIDE", 4, columns + 6, 0, 0.0)], ROWS=5, WIDE=x)
    torch.testing.assert_close(x[:, part], expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(x[:, :4], before[:, :4]) and torch.equal(x[:, -2:], before[:, -2:])


@pytest.mark.parametrize(("columns", "padded", "group"), [(64, 64, 32), (100, 128, 64), (8, 8, 8)])
@pytest.mark.parametrize("by_token", [0, 1])
def test_norm_and_quantize(columns: int, padded: int, group: int, by_token: int) -> None:
    x, weight = normal(5, columns), normal(columns, seed=1)
    made = Quantized(5, padded, group)
    op = [
        Op.NORM_QUANTIZE, Register.STREAM, columns, weight.data_ptr(), float_bits(1e-6), padded,
        group, by_token,
    ]  # fmt: skip
    run_ops([op], ROWS=5, STREAM=x, **made.registers)
    made.compare(rms_norm_reference(x.double(), weight.double(), 1e-6).out)
    highest = 128 if by_token else 32767
    assert (highest - 1 <= made.codes.abs().amax()) and (made.codes.abs().amax() <= highest)


def test_int8_a_token_is_the_definition_exactly() -> None:
    x = normal(9, 72)
    x[1], x[2], x[3] = 0, x[2] * 1e30, x[3] * 1e-30
    x[4], x[5] = x[4] * 1e-42, x[5].bfloat16().float()
    x[6] = torch.arange(72) - 36.5  # ties
    x[7, :4] = torch.tensor([127.5, -127.5, 126.5, 0.5])
    x[7, 4:] = 0
    made = Quantized(9, 96, 32)
    op = [Op.QUANTIZE, Register.STREAM, 72, 96, 32, 1]
    run_ops([op], ROWS=9, STREAM=x, **made.registers)
    codes, scales = quantize_activation(x, INT8_TOKENS, None)
    assert torch.equal(made.codes[:, :72].float(), codes)
    assert torch.equal(made.scales, scales.expand(9, 3))
    assert torch.equal(made.sums, made.codes.view(9, 3, 32).sum(2, dtype=torch.int32))


@pytest.mark.parametrize("size", [1e30, 1.0, 1e-30, 1e-34, 0.0])
def test_inputs_of_16_bits_keep_their_size(size: float) -> None:
    x = normal(3, 100) * size
    made = Quantized(3, 128, 64)
    run_ops([[Op.QUANTIZE, Register.STREAM, 100, 128, 64, 0]], ROWS=3, STREAM=x, **made.registers)
    made.compare(x.double())


@pytest.mark.parametrize("gate", GATES)
def test_gated_activation(gate: Gate) -> None:
    x = normal(7, 2 * 44) * 4
    x[1, :9] = torch.tensor([0, -0.0, 100, -100, 1e30, -1e30, 1e-30, 88, -88])
    x[2, 3], x[3, 5] = torch.nan, torch.inf
    expected = gated_mul_reference(x.double(), gate).float()
    out = unset(8, 44)
    run_ops([[Op.GATE, 44, GATES[gate]]], ROWS=7, WIDE=x, INNER=out)
    torch.testing.assert_close(out[:7], expected, atol=2e-6, rtol=2e-6, equal_nan=True)
    assert out[7].isnan().all()
    for group, by_token in ((16, 0), (16, 1), (24, 0), (48, 0)):
        made = Quantized(7, 48, group)
        op = [Op.GATE_QUANTIZE, 44, GATES[gate], 48, group, by_token]
        run_ops([op], ROWS=7, WIDE=x, **made.registers)
        finite = expected.isfinite()
        for r in range(7):
            if finite[r].all():
                got = made.codes[r].view(-1, group).double() * made.scales[r].unsqueeze(1)
                step = made.scales[r].repeat_interleave(group)[:44]
                error = (got.flatten()[:44] - expected[r]).abs()
                assert (error <= 0.51 * step + 4e-6 + 2e-6 * expected[r].abs()).all()
            else:
                assert made.scales[r].isnan().any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim", "normed"),
    [(4, 2, 16, 16, False), (3, 1, 24, 16, True), (2, 2, 64, 64, True), (4, 1, 8, 8, False)],
)
def test_store(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    rows, total = 9, heads + 2 * kv_heads
    qkv = normal(rows, total, head_dim) * 2
    slots = torch.randperm(4 * 16, generator=torch.Generator().manual_seed(1))[:rows]
    slots[2] = -1
    tokens = NewTokens(torch.randint(0, 50, (rows,)), slots)
    inverse = 1.0 / 100 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    rotary = rotary_table(inverse, 50)
    weights = normal(2, head_dim, seed=2)
    norm = HeadNorm(weights[0], weights[1], 1e-5) if normed else None
    pools, expected = ([new_pool(4, kv_heads, 16, head_dim, None, dtype) for _ in "kv"]
                       for _ in range(2))  # fmt: skip
    for pool in (*pools, *expected):
        pool.codes.fill_(torch.nan)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    turned = kv_store_reference(
        q.double(), k.double(), v, expected[0], expected[1], tokens, StoreOptions(rotary, norm)
    )
    given = qkv.clone()
    norms = (*(w.data_ptr() for w in weights), float_bits(1e-5)) if normed else (0, 0, 0)
    op = [
        Op.STORE, 0, heads, kv_heads, head_dim, rotary.cos.data_ptr(), rotary.sin.data_ptr(),
        rotary.cos.shape[1], *norms, *(pool.codes.data_ptr() for pool in pools), 16,
    ]  # fmt: skip
    run_ops([op], dtype, ROWS=rows, WIDE=given, POSITIONS=tokens.positions, SLOTS=slots)
    torch.testing.assert_close(given[:, :heads], turned.float(), atol=3e-6, rtol=3e-6)
    assert torch.equal(given[:, heads + kv_heads :], v)
    step = 2 * max(torch.finfo(dtype).eps, 2e-6)
    torch.testing.assert_close(
        pools[0].codes, expected[0].codes, atol=step, rtol=step, equal_nan=True
    )
    stored = expected[1].codes.isfinite()
    assert torch.equal(pools[1].codes[stored], expected[1].codes[stored])
    assert pools[1].codes[~stored].isnan().all()


def attend(s: Sequences, heads: int, flags: str) -> tuple[Tensor, Tensor]:
    """What the op gives, and the definition in float64."""
    o = options(heads, s.keys.head_dim, *flags.split("-"))
    rows, kv_heads, dim = len(s.q), s.keys.kv_heads, s.keys.head_dim
    qkv = torch.cat([s.q.float(), unset(rows, 2 * kv_heads, dim)], 1)
    out = unset(rows + 1, heads, dim)
    op = [
        Op.ATTEND, 0, heads, kv_heads, dim, s.keys.codes.data_ptr(), s.values.codes.data_ptr(),
        s.block_size, o.sliding_window or 0, float_bits(o.scale), float_bits(o.softcap or 0.0),
    ]  # fmt: skip
    run_ops(
        [op], s.keys.codes.dtype, ROWS=rows, SEQUENCES=len(s.lengths), STARTS=s.batch.cu_seqlens_q,
        LENGTHS=s.batch.context_lens, TABLES=s.tables, TABLE_ROW=s.tables.shape[1], WIDE=qkv,
        INNER=out,
    )  # fmt: skip
    assert out[rows:].isnan().all()
    expected = paged_attention_reference(s.q.double(), s.keys, s.values, s.batch, o).out
    return out[:rows], expected.float()


@pytest.mark.parametrize("flags", ["plain", "window", "softcap", "window-softcap"])
@pytest.mark.parametrize("shared", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64])
def test_attention(head_dim: int, shared: int, flags: str) -> None:
    """Of decode, prefill and pieces of it, over one and many blocks; a padded row is 0."""
    lengths, queries = [140, 7, 0, 40, 16, 33], [1, 7, 1, 30, 16, 9]
    s = Sequences(lengths, queries, 2 * shared, 2, head_dim, dtype=torch.float32)
    got, expected = attend(s, 2 * shared, flags)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)
    assert not got[8].any()


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_over_every_dtype(dtype: torch.dtype, block_size: int) -> None:
    s = Sequences([70, 3, 300], [5, 1, 1], 6, 2, 40, block_size=block_size, dtype=dtype)
    got, expected = attend(s, 6, "window")
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def test_attention_of_logits_far_apart() -> None:
    """The largest comes last, so that what was summed before is worth nothing, or first."""
    for order in (1, -1):
        s = Sequences([70], [2], 2, 1, 16, dtype=torch.float32, poison=False)
        slots = s.slots(0, 0, 70)
        sizes = torch.linspace(-60 * order, 60 * order, 70)[:, None].expand(70, 16)
        s.keys.codes[slots // 16, 0, slots % 16] = sizes
        s.q.fill_(2.0)
        got, expected = attend(s, 2, "plain")
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def calls() -> tuple[Any, Any]:
    """exp32 of each of (x, out); shares_of_keys of (logits, begin, end, state float32 [3])."""
    share, exp32 = tiles.shares_of_keys(), ops.exp32

    @njit
    def exps(x, out):  # type: ignore[no-untyped-def]
        for i in range(len(x)):
            out[i] = exp32(x[i])

    @njit
    def shares(logits, begin, end, state):  # type: ignore[no-untyped-def]
        at = state.ctypes.data
        share((logits.ctypes.data, begin, end, at, at + 4, at + 8))

    return exps, shares


def test_exponentials(calls: tuple[Any, Any]) -> None:
    """Of gates over the whole range, of attention's keys below the largest."""
    x = torch.cat([torch.linspace(-87.2, 88, 40001), torch.tensor([-0.0, 0.0, 1e-30, -1e-30])])
    got = torch.empty_like(x)
    calls[0](x.numpy(), got.numpy())
    assert ((got.double() / x.double().exp() - 1).abs() < 3e-7).all()
    calls[0](np.float32([-88, -np.inf, -1e30]), got.numpy())
    assert not got[:3].any()
    below = torch.linspace(-87.2, 0, 1600).view(100, 16)
    shares = below.clone()
    for line in shares:
        calls[1](line.numpy(), 0, 16, np.float32([0, 0, np.nan]))
    assert ((shares.double() / below.double().exp() - 1).abs() < 3e-7).all()


def test_shares_of_keys_that_are_seen(calls: tuple[Any, Any]) -> None:
    for begin, end in ((0, 16), (3, 9), (-5, 4), (0, 0), (9, 40), (-3, -1)):
        logits, state = normal(16), np.float32([-np.inf, 0, np.nan])
        logits[end if 0 <= end < 16 else 0] = 50.0 if end < 16 else 1.0
        seen = (torch.arange(16) >= begin) & (torch.arange(16) < end)
        shares = logits.clone()
        calls[1](shares.numpy(), begin, end, state)
        most = logits[seen].max() if seen.any() else torch.tensor(-torch.inf)
        expected = torch.where(seen, (logits - most).exp(), 0.0)
        torch.testing.assert_close(shares, expected, atol=0, rtol=1e-6)
        assert state[0] == most and state[2] == 1 - float(seen.any())
        np.testing.assert_allclose(state[1], expected.sum(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_torchs_for_all_ties(dtype: torch.dtype) -> None:
    """Halfway between any two neighbours, just below and above, and of numbers beyond the range."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[every.isfinite()]
    up = every.to(dtype).view(torch.int16).add(1).view(dtype).float()
    middle = ((every.double() + up.double()) / 2).float()
    middle = torch.cat([middle, torch.tensor([65520.0, 65519.9, 3.4e38, -3.4e38])])
    limits = torch.tensor([-torch.inf, torch.inf])
    around = [torch.nextafter(middle, limit) for limit in limits]
    x = torch.cat([every, middle, *around, limits, torch.tensor([torch.nan])])
    out = torch.zeros(len(x), dtype=dtype)
    copy = memory.copy_narrow(str(dtype).removeprefix("torch."))
    njit(lambda x, address: copy(x, address))(x.numpy(), out.data_ptr())
    torch.testing.assert_close(out, x.to(dtype), atol=0, rtol=0, equal_nan=True)
    assert torch.equal(out.signbit()[~x.isnan()], x.signbit()[~x.isnan()])
