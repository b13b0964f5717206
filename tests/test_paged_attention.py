"""Paged attention: the definition against torch's own, the Triton kernel against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lowbit.kernels.attention_ops import AttentionOptions, attend, paged_attention_reference
from lowbit.kernels.triton_ops.launch import Warps
from lowbit.kernels.triton_ops.paged_attention import AttentionTiles, paged_attention

from .attention_cases import Sequences, batch_of, options, stored_forms
from .far_apart import far_apart

pytestmark = pytest.mark.usefixtures("nan_outputs")
FLAGS = ["plain", "window", "softcap", "sinks", "alibi", "window-softcap-sinks-alibi"]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}


def compare(s: Sequences, o: AttentionOptions, form, dtype=torch.float16, tiles=None):
    """`paged_attention` of s against the definition in float64."""
    got = paged_attention(s.q, s.keys, s.values, s.batch, o, form, tiles)
    expected = paged_attention_reference(s.q.double(), s.keys, s.values, s.batch, o)
    assert got.out.dtype == s.q.dtype
    error = (got.out - expected.out).norm() / expected.out.norm()
    assert error < TOLERANCE[dtype], f"out: relative RMS {error:.2e}"
    torch.testing.assert_close(got.lse, expected.lse, atol=4e-3, rtol=1e-4)


def test_the_definition_is_torchs_attention():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 9, 24, generator=g, dtype=torch.float64) for n in (3, 9, 3))
    q, k, v = torch.randn(5, 4, 24, generator=g).double(), k[:2], v[:2].repeat(1, 1, 1)
    v = torch.randn(2, 9, 16, generator=g).double()
    got = attend(q, k, v, AttentionOptions(0.3))
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(got.out, expected[0].transpose(0, 1))


def test_the_definition_by_hand():
    """One head of one channel: keys 1 and 2, the logits 0.5 and 1; each flag changes them so."""
    q, k, v = torch.ones(1, 1, 1).double(), torch.tensor([[[1.0], [2.0]]]), torch.eye(2)[None]

    def weights(**flags) -> torch.Tensor:
        return attend(q, k, v, AttentionOptions(0.5, **flags)).out[0, 0]

    logits = torch.tensor([0.5, 1.0]).double()
    torch.testing.assert_close(weights(), logits.softmax(0))
    torch.testing.assert_close(weights(sliding_window=1), torch.tensor([0.0, 1.0]).double())
    capped = torch.tanh(logits / 0.7) * 0.7
    torch.testing.assert_close(weights(softcap=0.7), capped.softmax(0))
    lowered = logits - torch.tensor([0.25, 0.0])
    torch.testing.assert_close(weights(alibi_slopes=torch.tensor([0.25])), lowered.softmax(0))
    with_sink = torch.tensor([0.5, 1.0, 2.0]).double().softmax(0)[:2]
    torch.testing.assert_close(weights(sinks=torch.tensor([2.0])), with_sink)
    lse = attend(q, k, v, AttentionOptions(0.5, sinks=torch.tensor([2.0]))).lse
    torch.testing.assert_close(lse[0, 0], torch.tensor([0.5, 1.0, 2.0]).logsumexp(0))


@pytest.mark.parametrize("form", ["split", "whole"])
@pytest.mark.parametrize("stored", stored_forms(32))
def test_every_stored_form(stored, form, kernel_device):
    fmt = stored_forms(32)[stored]
    s = Sequences([37, 3], [2, 1], heads=4, forms=(fmt, fmt), device=kernel_device)
    compare(s, options(4, 32), form)


@pytest.mark.parametrize("form", ["split", "whole"])
@pytest.mark.parametrize("flags", FLAGS)
def test_flags(flags, form, kernel_device):
    k, v = stored_forms(32)["int8_static"], stored_forms(32)["int4_rotated"]
    s = Sequences([70, 9], [3, 1], heads=4, forms=(k, v), device=kernel_device)
    compare(s, options(4, 32, *flags.split("-"), device=kernel_device), form)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim", "block_size"),
    [(1, 1, 64, 64, 16), (3, 1, 80, 80, 8), (4, 4, 96, 96, 32), (20, 1, 128, 64, 16),
     (2, 1, 192, 128, 24), (2, 2, 256, 256, 16)],
)  # fmt: skip
def test_shapes(heads, kv_heads, head_dim, value_dim, block_size, kernel_device):
    fmt = stored_forms(value_dim)["int4_rotated"]
    s = Sequences([41], [1], heads, kv_heads, head_dim, (None, fmt), block_size, value_dim,
                  device=kernel_device)  # fmt: skip
    compare(s, options(heads, head_dim), "split")
    compare(s, options(heads, head_dim), "whole")


def test_long_prompts_beside_short_ones(kernel_device):
    """Tiles find their sequences: of many tokens, of none, of one."""
    s = Sequences([90, 5, 31, 0, 64], [60, 0, 31, 0, 1], heads=3, kv_heads=1, head_dim=16,
                  device=kernel_device)  # fmt: skip
    compare(s, options(3, 16), "whole")
    compare(s, options(3, 16), None)


def test_float32(kernel_device):
    s = Sequences([37, 20], [1, 1], heads=2, head_dim=16, dtype=torch.float32,
                  device=kernel_device)  # fmt: skip
    compare(s, options(2, 16), "split", torch.float32)


TILES = AttentionTiles(16, 32, 64, Warps())


def test_contexts_of_several_splits(kernel_device):
    form = stored_forms(16)["int8"]
    s = Sequences([190, 65, 40], [1, 1, 1], heads=1, kv_heads=1, head_dim=16,
                  forms=(form, form), device=kernel_device)  # fmt: skip
    for flag in ("sinks", "window"):
        compare(s, options(1, 16, flag, device=kernel_device), "split", tiles=TILES)


@pytest.mark.parametrize("form", ["int8", "int4_rotated"])
def test_a_row_is_the_same_bits_in_any_batch(form, kernel_device):
    """Alone, beside longer ones, one token at a time or several at once."""
    fmt = stored_forms(32)[form]
    s = Sequences([66, 150, 7], [4, 1, 1], heads=2, kv_heads=1, head_dim=32, forms=(fmt, fmt),
                  device=kernel_device)  # fmt: skip
    o = options(2, 32)
    together = paged_attention(s.q, s.keys, s.values, s.batch, o, "split", TILES)
    for token in range(4):
        alone = batch_of([63 + token], [1], s.tables[:1], kernel_device)
        one = paged_attention(s.q[token : token + 1], s.keys, s.values, alone, o, "split", TILES)
        assert torch.equal(one.out[0], together.out[token])
        assert torch.equal(one.lse[0], together.lse[token])


def test_a_batch_invariant_prompt_takes_the_form_of_single_tokens(kernel_device):
    s = Sequences([40], [24], heads=2, kv_heads=1, head_dim=16, device=kernel_device)
    o = options(2, 16)
    whole = replace(s.batch, batch_invariant=True)
    assert s.batch.max_query_len * 2 > 16, "as many rows as have a form of their own otherwise"
    together = paged_attention(s.q, s.keys, s.values, whole, o)
    for token in (0, 7, 23):
        alone = batch_of([17 + token], [1], s.tables[:1], kernel_device)
        alone = replace(alone, batch_invariant=True)
        one = paged_attention(s.q[token : token + 1], s.keys, s.values, alone, o)
        assert torch.equal(one.out[0], together.out[token])


def test_rotated_queries_are_taken_as_they_are(kernel_device):
    from lowbit.kernels.kv_quant import rotate_heads

    form = stored_forms(32)["int4_rotated"]
    s = Sequences([20], [1], heads=2, forms=(form, None), device=kernel_device)
    o = options(2, 32)
    plain = paged_attention(s.q, s.keys, s.values, s.batch, o, "split")
    turned = rotate_heads(s.q.float()).to(s.q.dtype)
    rotated = o._replace(rotated_queries=True)
    assert torch.equal(
        paged_attention(turned, s.keys, s.values, s.batch, rotated, "split").out, plain.out
    )
    again = paged_attention_reference(turned.double(), s.keys, s.values, s.batch, rotated)
    torch.testing.assert_close(again.out, plain.out.double(), atol=2e-3, rtol=2e-3)


def test_padded_rows_are_zero(kernel_device):
    s = Sequences([0, 5], [1, 1], heads=2, head_dim=16, device=kernel_device)
    for form in ("split", "whole"):
        got = paged_attention(s.q, s.keys, s.values, s.batch, options(2, 16), form)
        assert bool((got.out[0] == 0).all()) and bool((got.lse[0] == -torch.inf).all())
        assert bool(got.out[1].isfinite().all())


def test_nothing_to_do(kernel_device):
    s = Sequences([], [], heads=2, head_dim=16, device=kernel_device)
    for form in ("split", "whole"):
        got = paged_attention(s.q, s.keys, s.values, s.batch, options(2, 16), form)
        assert got.out.shape == (0, 2, 16) and got.lse.shape == (0, 2)


def test_queries_and_pools_with_strides(kernel_device):
    """q as a part of fused projections, a layer's pool as a part of all layers'."""
    s = Sequences([37, 5], [1, 1], heads=4, head_dim=16, device=kernel_device)
    o = options(4, 16)
    expected = paged_attention(s.q, s.keys, s.values, s.batch, o)
    fused = torch.full((2, 10, 16), torch.nan, dtype=s.q.dtype, device=kernel_device)
    fused[:, 3:7] = s.q
    layers = torch.full((*s.keys.codes.shape[:1], 3, *s.keys.codes.shape[1:]), torch.nan,
                        dtype=s.q.dtype, device=kernel_device)  # fmt: skip
    layers[:, 1] = s.keys.codes
    keys = replace(s.keys, codes=layers[:, 1])
    got = paged_attention(fused[:, 3:7], keys, s.values, s.batch, o)
    assert torch.equal(got.out, expected.out)


@pytest.mark.parametrize("form", ["dense", "int8"])
def test_blocks_beyond_two_to_the_31_elements(form, kernel_device):
    """Codes are read as words of four: their blocks lie 2^31 words apart from first to last."""
    fmt = stored_forms(16)[form]
    s = Sequences([70], [1], heads=1, kv_heads=1, head_dim=16, forms=(fmt, fmt),
                  device=kernel_device)  # fmt: skip
    o = options(1, 16)
    expected = paged_attention(s.q, s.keys, s.values, s.batch, o)
    far = far_apart(s.keys.codes, (1 << 29) * (4 if fmt else 1))
    got = paged_attention(s.q, replace(s.keys, codes=far), s.values, s.batch, o)
    assert torch.equal(got.out, expected.out)


def test_bfloat16_queries_of_any_size_beside_codes(kernel_device):
    """They are multiplied as float16, whose range is smaller: rows are scaled into it first."""
    fmt = stored_forms(32)["int8"]
    s = Sequences([40], [1], heads=2, kv_heads=1, dtype=torch.bfloat16, forms=(fmt, fmt),
                  device=kernel_device)  # fmt: skip
    for size in (1e-30, 1.0, 2.0**90):
        o = options(2, 32)._replace(scale=32**-0.5 / size)
        q = s.q * size
        got = paged_attention(q, s.keys, s.values, s.batch, o, "split")
        expected = paged_attention_reference(q.double(), s.keys, s.values, s.batch, o)
        error = (got.out - expected.out).norm() / expected.out.norm()
        assert error < 2 * TOLERANCE[torch.bfloat16], f"{size}: {error}"


def test_what_does_not_fit_is_named_before_launch(kernel_device):
    form = stored_forms(16)["int8"]
    s = Sequences([20], [1], heads=4, head_dim=16, forms=(form, form), device=kernel_device)

    def refused(match: str, q=s.q, keys=s.keys, values=s.values, batch=s.batch, sinks=None):
        o = AttentionOptions(1.0, sinks=sinks)
        with pytest.raises(ValueError, match=match):
            paged_attention(q, keys, values, batch, o)

    refused(r"q has shape \(1, 64\), not \(any, any, any\)", q=s.q.flatten(1))
    refused("q has heads of 8, keys of 16", q=s.q[..., :8])
    refused("3 query heads do not share 2 kv heads", q=s.q[:, :3])
    refused("keys is int8, not uint8", keys=replace(s.keys, codes=s.keys.codes.view(torch.int8)))
    odd = s.keys.codes.new_empty(5, 2, 16, 18)[..., :16]
    refused("codes of keys must lie at multiples of 4 bytes", keys=replace(s.keys, codes=odd))
    refused("keys have no scale", keys=replace(s.keys, scale=None))
    refused("scale of values has shape", values=replace(s.values, scale=s.values.scale[:, :1]))
    fewer = replace(s.values, codes=s.values.codes[:2], scale=s.values.scale[:2])
    refused(r"blocks of keys are \(5, 2, 16\), those of values \(2, 2, 16\)", values=fewer)
    refused("block_tables is int64", batch=replace(s.batch, block_tables=s.tables.long()))
    refused(r"context_lens has shape \(0,\), not \(1\)",
            batch=replace(s.batch, context_lens=s.batch.context_lens[:0]))  # fmt: skip
    refused("max_context_len is 99", batch=replace(s.batch, max_context_len=99))
    refused(r"sinks has shape \(3,\), not \(4\)", sinks=torch.ones(3))
