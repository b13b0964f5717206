"""Who runs paged attention, and torch's CPU kernel against the definition."""

from __future__ import annotations

import pytest
import torch
from lowbit.kernels.attention_ops import (
    attention_problem,
    choose_attention,
    paged_attention,
    paged_attention_reference,
)
from lowbit.kernels.errors import UserError
from lowbit.kernels.kv_quant import KVFormat, rotate_heads
from lowbit.kernels.paged_kv import new_pair

from .attention_cases import Sequences, batch_of, options, stored_forms

FLAGS = ["plain", "window", "sinks", "alibi", "window-sinks-alibi"]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def sequences(lengths, queries, **changes) -> Sequences:
    return Sequences(lengths, queries, **{"dtype": torch.float32, "poison": False, **changes})


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [([40, 7, 33, 90], [1, 1, 1, 1]), ([40, 7, 0, 30], [3, 7, 1, 30]), ([50], [40]), ([], []),
     ([20, 20], [20, 20])],
    ids=str,
)  # fmt: skip
def test_the_cpu_kernel_is_the_definition(lengths, queries, flags, dtype):
    s = sequences(lengths, queries, dtype=dtype)
    o = options(6, 32, *flags.split("-"))
    got = paged_attention(s.q, s.keys, s.values, s.batch, o, "sdpa_cpu")
    expected = paged_attention_reference(s.q.double(), s.keys, s.values, s.batch, o)
    assert got.out.dtype == dtype and got.out.shape == expected.out.shape
    error = (got.out - expected.out).norm()
    assert error <= TOLERANCE[dtype] * expected.out.norm(), error
    torch.testing.assert_close(got.lse, expected.lse, atol=TOLERANCE[dtype] * 4, rtol=1e-4)


@pytest.mark.parametrize("form", [*stored_forms(32), "k3v2"])
def test_the_cpu_kernel_reads_every_form(form):
    fmt = stored_forms(32)
    k3, v2 = (KVFormat("int", bits, False, "channels", 16) for bits in (3, 2))
    forms = (k3, v2) if form == "k3v2" else (fmt[form], fmt[form])
    s = sequences([20, 37], [1, 2], forms=forms)
    got = paged_attention(s.q, s.keys, s.values, s.batch, options(6, 32), "sdpa_cpu")
    expected = paged_attention_reference(s.q, s.keys, s.values, s.batch, options(6, 32))
    torch.testing.assert_close(got.out, expected.out, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["int8", "int4_rotated"])
def test_rotated_queries_are_turned_only_where_keys_are(form):
    fmt = stored_forms(32)[form]
    s = sequences([20, 7], [1, 1], forms=(fmt, None))
    expected = paged_attention_reference(s.q, s.keys, s.values, s.batch, options(6, 32)).out
    rotated = options(6, 32)._replace(rotated_queries=True)
    q = rotate_heads(s.q) if form == "int4_rotated" else s.q
    for kernel in ("sdpa_cpu", "reference"):
        got = paged_attention(q, s.keys, s.values, s.batch, rotated, kernel)
        torch.testing.assert_close(got.out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_of_the_cpu_kernel_is_the_same_in_any_batch(dtype):
    """But for the last bits, in which products of the CPU's library may differ: by where operands
    lie in memory, and by the number of threads."""
    s = sequences([300, 519, 40, 290], [1, 1, 1, 1], dtype=dtype)
    o = options(6, 32)
    together = paged_attention(s.q, s.keys, s.values, s.batch, o, "sdpa_cpu")
    for seq, length in enumerate(s.lengths):
        alone = batch_of([length], [1], s.tables[seq : seq + 1], "cpu")
        one = paged_attention(s.q[seq : seq + 1], s.keys, s.values, alone, o, "sdpa_cpu")
        close = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(one.out[0], together.out[seq], rtol=close, atol=close / 10)


@pytest.mark.parametrize("queries", [(1, 1, 1), (5, 1, 3)], ids=["decode", "chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_values_in_one_memory_are_read_alike(dtype, queries):
    s = Sequences((40, 33, 7), queries, dtype=dtype, poison=False)
    keys, values = new_pair(*s.keys.codes.shape, dtype)
    keys.codes.copy_(s.keys.codes)
    values.codes.copy_(s.values.codes)
    expected = paged_attention(s.q, s.keys, s.values, s.batch, options(6, 32), "sdpa_cpu")
    batch = batch_of(s.lengths, s.queries, s.tables, "cpu")  # knows nothing of the pools before
    got = paged_attention(s.q, keys, values, batch, options(6, 32), "sdpa_cpu")
    assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse)


def test_what_follows_from_the_batch_is_made_once():
    s = sequences([300, 40], [1, 1])
    paged_attention(s.q, s.keys, s.values, s.batch, options(6, 32), "sdpa_cpu")
    made = dict(s.batch.derived)
    paged_attention(s.q, s.keys, s.values, s.batch, options(6, 32), "sdpa_cpu")
    assert s.batch.derived == made and len(made) == 1


def test_each_kernel_says_what_it_does_not_take():
    s = sequences([5], [1])
    problem = attention_problem(s.q, s.keys, s.values, s.batch, options(6, 32))
    choice = choose_attention(problem)
    assert choice.candidate.name == "sdpa_cpu"
    assert choice.declined == {"triton": "runs on cuda, not cpu"}
    capped = choose_attention(problem._replace(softcap=True))
    assert capped.candidate.name == "reference"
    assert capped.declined["sdpa_cpu"] == "has no softcap"
    assert capped.declined["chunks"] == "is for batch_invariant"
    pinned = choose_attention(problem._replace(batch_invariant=True))
    assert pinned.candidate.name == "chunks"
    assert pinned.declined["sdpa_cpu"] == "its sums depend on the batch"

    def declined(kernel: str, **changes) -> str:
        with pytest.raises(UserError) as e:
            choose_attention(problem._replace(**changes), kernel)
        return str(e.value)

    cuda = {"device": "cuda"}
    assert "runs on cpu, not cuda" in declined("sdpa_cpu", **cuda)
    wide = problem.values._replace(head_dim=16)
    assert "one head size, not 32 and 16" in declined("sdpa_cpu", values=wide)
    three = problem.keys._replace(fmt=KVFormat("int", 3, True, "channels", 32))
    assert "unpacks keys of 4 or 8 bits, not 3" in declined("triton", keys=three, **cuda)
    grouped = problem.values._replace(fmt=KVFormat("int", 4, False, "tokens", 16))
    assert "each token of values, not for groups" in declined("triton", values=grouped, **cuda)
    big = problem.keys._replace(head_dim=512)
    assert "keys of 8 to 256 channels, not 512" in declined("triton", keys=big, **cuda)
    half = {"dtype": torch.float16, **cuda}
    assert "keys in the dtype of the queries, not torch.float32" in declined("triton", **half)
    assert "int3 32 channels a scale, 2 heads of 32, blocks of 16" in declined(
        "triton", keys=three, **cuda
    )
