"""Latent attention: the definition against attention whose projections are not absorbed, kernels
against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.kernels.kv_quant import KVFormat
from lowbit.kernels.mla_ops import LatentProblem, choose_mla, mla_decode, mla_decode_reference
from lowbit.kernels.triton_ops import mla_decode as triton_mla
from lowbit.kernels.triton_ops.launch import Warps

from .attention_cases import Sequences, batch_of
from .far_apart import far_apart

pytestmark = pytest.mark.usefixtures("nan_outputs")
RANK, ROTATED = 32, 16
FORMS = {
    "dense": None,
    "int8": KVFormat("int", 8, True, "channels", RANK + ROTATED),
    "fp8": KVFormat("float", 8, True, "channels", RANK + ROTATED),
    "int8_static": KVFormat("int", 8, True, "static"),
}


def latents(lengths, queries, heads=5, form="dense", **changes) -> Sequences:
    return Sequences(lengths, queries, heads, 1, RANK + ROTATED, (FORMS[form], None), **changes)


def test_the_definition_is_attention_with_up_projections():
    """Keys W_k c beside the rotated key, values W_v c: absorbed into queries and output."""
    g = torch.Generator().manual_seed(0)
    s = latents([9], [2], dtype=torch.float32, poison=False)
    w_k, w_v = (torch.randn(5, 24, RANK, generator=g).double() for _ in range(2))
    q_plain, q_rotated = torch.randn(2, 5, 24, generator=g).double(), s.q[..., RANK:].double()
    absorbed = torch.cat([torch.einsum("thd,hdr->thr", q_plain, w_k), q_rotated], -1)
    got = mla_decode_reference(absorbed, s.keys, RANK, s.batch, 0.2)
    entries = s.keys.codes[s.tables[0].long(), 0].flatten(0, 1)[:9].double()
    k = torch.einsum("lr,hdr->hld", entries[:, :RANK], w_k)
    logits = torch.einsum("thd,hld->htl", q_plain, k)
    logits += torch.einsum("thd,ld->htl", q_rotated, entries[:, RANK:])
    logits = (logits * 0.2).masked_fill(~torch.ones(2, 9, dtype=torch.bool).tril(7), -torch.inf)
    v = torch.einsum("lr,hdr->hld", entries[:, :RANK], w_v)
    expected = logits.softmax(-1) @ v
    out = torch.einsum("thr,hdr->htd", got.out, w_v)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("lengths", "queries", "heads"),
    [([70, 3, 0], [1, 1, 1], 5), ([40, 9], [4, 2], 5), ([30], [1], 40), ([], [], 5)],
    ids=str,
)
def test_kernels_are_the_definition(lengths, queries, heads, form, kernel_device):
    s = latents(lengths, queries, heads, form, device=kernel_device)
    got = triton_mla.mla_decode(s.q, s.keys, RANK, s.batch, 0.15)
    check(got, mla_decode_reference(s.q.double(), s.keys, RANK, s.batch, 0.15), 1e-3)
    s = latents(lengths, queries, heads, form, dtype=torch.float32, poison=False)
    got = mla_decode(s.q, s.keys, RANK, s.batch, 0.15, "sdpa_cpu")
    check(got, mla_decode_reference(s.q.double(), s.keys, RANK, s.batch, 0.15), 2e-6)


def check(got, expected, tolerance: float) -> None:
    assert got.out.shape == expected.out.shape
    error = (got.out - expected.out).norm()
    assert error <= tolerance * expected.out.norm(), error
    torch.testing.assert_close(got.lse, expected.lse, atol=4e-3, rtol=1e-4)


def test_a_row_is_the_same_bits_in_any_batch(kernel_device):
    tiles = triton_mla.LatentTiles(16, 32, 64, Warps())
    s = latents([66, 150], [3, 1], 3, "int8", device=kernel_device)
    together = triton_mla.mla_decode(s.q, s.keys, RANK, s.batch, 0.2, tiles)
    for token in range(3):
        alone = batch_of([64 + token], [1], s.tables[:1], kernel_device)
        one = triton_mla.mla_decode(s.q[token : token + 1], s.keys, RANK, alone, 0.2, tiles)
        assert torch.equal(one.out[0], together.out[token])


@pytest.mark.parametrize("form", ["dense", "int8"])
def test_blocks_beyond_two_to_the_31_elements(form, kernel_device):
    """int8 entries are read as words of four: blocks lie 2^31 words apart from first to last."""
    s = latents([70], [1], 3, form, device=kernel_device)
    expected = triton_mla.mla_decode(s.q, s.keys, RANK, s.batch, 0.2)
    far = far_apart(s.keys.codes, (1 << 29) * (4 if form == "int8" else 1))
    got = triton_mla.mla_decode(s.q, replace(s.keys, codes=far), RANK, s.batch, 0.2)
    assert torch.equal(got.out, expected.out)


def test_what_does_not_fit_is_named(kernel_device):
    s = latents([20], [1], device=kernel_device)
    with pytest.raises(ValueError, match="rank is 48, entries are of 48"):
        triton_mla.mla_decode(s.q, s.keys, 48, s.batch, 1.0)
    with pytest.raises(ValueError, match=r"q has shape \(1, 5, 32\), not \(any, any, 48\)"):
        triton_mla.mla_decode(s.q[..., :32], s.keys, RANK, s.batch, 1.0)
    two = Sequences([20], [1], 4, 2, 48, device=kernel_device)
    with pytest.raises(ValueError, match="cache has 2 heads, not 1"):
        triton_mla.mla_decode(two.q, two.keys, RANK, two.batch, 1.0)


def test_who_runs():
    s = latents([5], [1])
    problem = LatentProblem(s.keys.form, RANK, 5, torch.float16, "cpu")
    assert choose_mla(problem).candidate.name == "sdpa_cpu"
    cuda = problem._replace(device="cuda")
    assert choose_mla(cuda).candidate.name == "triton"
    four = problem.cache._replace(fmt=KVFormat("int", 4, True, "channels", 48))
    for changes, reason in (
        ({"cache": four}, "8-bit entries with one scale each"),
        (
            {"cache": problem.cache._replace(fmt=FORMS["int8"]), "rank": 30},
            "a multiple of 4, not 30",
        ),
        ({"rank": 1024}, "latents of at most 512, not 1024"),
        ({"dtype": torch.float32}, "16-bit floats, not torch.float32"),
    ):
        with pytest.raises(UserError, match=reason):
            choose_mla(cuda._replace(**changes), "triton")
