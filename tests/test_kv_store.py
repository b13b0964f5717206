"""Turn and store: the definition against transformers, the Triton kernel against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.kernels.kv_quant import KVFormat
from lowbit.kernels.kv_store_ops import (
    HeadNorm,
    NewTokens,
    StoreOptions,
    StoreProblem,
    choose_store,
    kv_store,
    kv_store_reference,
)
from lowbit.kernels.paged_kv import BlockPool, gather_blocks, new_pair, new_pool
from lowbit.kernels.rotary import Rotary, rotary_table, rotate_positions
from lowbit.kernels.triton_ops import kv_store as triton_store

from .attention_cases import stored_forms
from .far_apart import far_apart

pytestmark = pytest.mark.usefixtures("nan_outputs")


def table(rotary_dim: int, interleaved: bool = False) -> Rotary:
    inverse = 1.0 / 100 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return rotary_table(inverse, 64, 1.0, interleaved)


class Stored:
    """q, k and v of new tokens, and two pools to store them in."""

    def __init__(
        self, forms: tuple[KVFormat | None, KVFormat | None], tokens: int = 5, heads: int = 4,
        kv_heads: int = 2, head_dim: int = 32, value_dim: int = 32,
        dtype: torch.dtype = torch.float16, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(3)
        shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
        self.q, self.k, self.v = (
            (torch.randn(tokens, *shape, generator=g) * 2 + 0.3).to(device, dtype)
            for shape in shapes
        )
        slots = torch.randperm(32, generator=g)[:tokens]
        slots[1:2] = -1
        positions = torch.randint(0, 64, (tokens,), generator=g)
        self.tokens = NewTokens(positions.to(device), slots.to(device))
        self.norm = HeadNorm(*(torch.rand(2, head_dim, generator=g) + 0.5).to(device, dtype), 1e-5)
        self._forms, self._sizes = forms, (head_dim, value_dim)
        self._kv_heads, self._dtype, self._device = kv_heads, dtype, device

    def pools(self) -> list[BlockPool]:
        scale = torch.tensor([0.04])
        return [
            new_pool(4, self._kv_heads, 8, size, fmt, self._dtype, self._device, scale)
            for fmt, size in zip(self._forms, self._sizes, strict=True)
        ]

    def compare(self, options: StoreOptions) -> None:
        """The kernel's codes, scales and queries against the definition's."""
        got, expected = self.pools(), self.pools()
        q = triton_store.kv_store(self.q, self.k, self.v, *got, self.tokens, options)
        reference = kv_store_reference(self.q, self.k, self.v, *expected, self.tokens, options)
        torch.testing.assert_close(q, reference, atol=2e-3, rtol=2e-3)
        every = torch.arange(4, device=self._device)[None]
        for ours, theirs in zip(got, expected, strict=True):
            if ours.scale is not None:
                torch.testing.assert_close(ours.scale, theirs.scale, atol=0, rtol=1e-3)
            a, b = (gather_blocks(pool, every, torch.float32) for pool in (ours, theirs))
            # sums in another order may move a value across the border of two codes
            assert (a - b).norm() <= 4e-3 * b.norm(), (a - b).norm() / b.norm()
            unequal = (ours.codes != theirs.codes).float().mean()
            assert unequal < 0.02, unequal


@pytest.mark.parametrize("stored", stored_forms(32))
def test_every_stored_form(stored, kernel_device):
    fmt = stored_forms(32)[stored]
    s = Stored((fmt, fmt), device=kernel_device)
    s.compare(StoreOptions())
    s.compare(StoreOptions(_on(table(32), kernel_device), s.norm, rotate_queries=True))


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary_dim", [32, 8], ids=["whole", "partial"])
@pytest.mark.parametrize("form", ["dense", "int8", "int4"])
def test_rotary_forms(form, rotary_dim, interleaved, kernel_device):
    fmt = stored_forms(32)[form]
    s = Stored((fmt, fmt), tokens=11, device=kernel_device)
    s.compare(StoreOptions(_on(table(rotary_dim, interleaved), kernel_device)))


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "key", "value"),
    [(64, 64, "int4_rotated", "int4_rotated"), (80, 80, "int8", "int4"), (96, 64, "fp8", "int8"),
     (256, 128, "int4_rotated", "int4_g16")],
)  # fmt: skip
def test_head_sizes(head_dim, value_dim, key, value, kernel_device):
    forms = (stored_forms(head_dim)[key], stored_forms(value_dim)[value])
    s = Stored(forms, 3, 3, 1, head_dim, value_dim, device=kernel_device)
    s.compare(StoreOptions(_on(table(head_dim), kernel_device)))


def test_rows_with_strides_and_no_tokens(kernel_device):
    s = Stored((None, None), device=kernel_device)
    fused = torch.cat([s.q, s.k, s.v], 1)
    s.q, s.k, s.v = fused.split([4, 2, 2], 1)
    s.compare(StoreOptions(_on(table(32), kernel_device)))
    none = Stored((None, None), tokens=0, device=kernel_device)
    out = triton_store.kv_store(none.q, none.k, none.v, *none.pools(), none.tokens, StoreOptions())
    assert out.shape == (0, 4, 32)


def test_tokens_and_blocks_beyond_two_to_the_31_elements(kernel_device):
    s = Stored((None, None), tokens=3, device=kernel_device)
    near, far = s.pools(), s.pools()
    expected = triton_store.kv_store(s.q, s.k, s.v, *near, s.tokens, StoreOptions())
    keys = replace(far[0], codes=far_apart(far[0].codes))
    got = triton_store.kv_store(far_apart(s.q), s.k, far_apart(s.v), keys, far[1], s.tokens,
                                StoreOptions())  # fmt: skip
    assert torch.equal(got, expected)
    assert torch.equal(keys.codes, near[0].codes) and torch.equal(far[1].codes, near[1].codes)


def test_slots_of_minus_one_are_left_as_they_are(kernel_device):
    s = Stored((None, None), device=kernel_device)
    for store in (triton_store.kv_store, kv_store_reference):
        pools = s.pools()
        for pool in pools:
            pool.codes.fill_(7)
        store(s.q, s.k, s.v, *pools, s.tokens, StoreOptions())
        for pool in pools:
            assert int((pool.codes == 7).all(-1).sum()) == (32 - 4) * 2


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_the_table_is_transformers_embedding(name):
    if name == "llama":
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    else:
        from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb
    rotary = table(16, interleaved=name == "gptj")
    x = torch.randn(1, 3, 7, 16)
    positions = torch.tensor([0, 5, 1, 63, 7, 8, 9])
    cos, sin = (t[positions] for t in rotary[:2])
    if name == "llama":
        cos, sin = (torch.cat([t, t], -1)[None] for t in (cos, sin))
    else:
        cos, sin = (t.repeat_interleave(2, -1)[None] for t in (cos, sin))
    expected = apply_rotary_pos_emb(x, x, cos, sin)[0][0].transpose(0, 1)
    torch.testing.assert_close(rotate_positions(x[0].transpose(0, 1), rotary, positions), expected)


@pytest.mark.parametrize("rope_type", ["llama3", "linear", "yarn"])
def test_scaled_frequencies_make_transformers_tables(rope_type):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {
        "rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    kept = parameters if rope_type == "llama3" else {
        key: value for key, value in parameters.items() if "freq" not in key
    }  # fmt: skip
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=kept,
                         max_position_embeddings=128)  # fmt: skip
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1), torch.arange(128)[None])
    ours = rotary_table(embedding.inv_freq, 128, embedding.attention_scaling)
    torch.testing.assert_close(ours.cos, cos[0, :, :8])
    torch.testing.assert_close(ours.sin, sin[0, :, :8])


def test_who_runs():
    s = Stored((stored_forms(32)["int4"], None))
    keys, values = (pool.form for pool in s.pools())
    problem = StoreProblem(keys, values, torch.float16, "cpu")
    assert choose_store(problem).candidate.name == "reference"
    grouped = keys._replace(fmt=KVFormat("int", 4, False, "tokens", 8))
    with pytest.raises(UserError, match="not with scales over groups of tokens"):
        choose_store(problem._replace(keys=grouped))
    cuda = problem._replace(device="cuda")
    assert choose_store(cuda).candidate.name == "triton"
    odd = keys._replace(head_dim=96, fmt=KVFormat("int", 4, True, "channels", 32))
    with pytest.raises(UserError, match="powers of two and divide 48, not 32"):
        choose_store(cuda._replace(keys=odd), "triton")
    turned = keys._replace(head_dim=96, fmt=KVFormat("int", 4, True, "channels", 96, 1.0, True))
    with pytest.raises(UserError, match="4-bit keys of a power of two of channels, not 96"):
        choose_store(cuda._replace(keys=turned), "triton")
    assert kv_store(s.q, s.k, s.v, *s.pools(), s.tokens, StoreOptions()).equal(s.q)


def test_what_does_not_fit_is_named(kernel_device):
    s = Stored((stored_forms(32)["int8"], None), device=kernel_device)
    keys, values = s.pools()

    def refused(match: str, k=s.k, keys=keys, tokens=s.tokens, rotary=None):
        with pytest.raises(ValueError, match=match):
            triton_store.kv_store(s.q, k, s.v, keys, values, tokens, StoreOptions(rotary))

    refused(r"k has shape \(5, 1, 32\), not \(5, 2, 32\)", k=s.k[:, :1])
    refused("k is float32, not float16", k=s.k.float())
    refused("keys have no scale", keys=replace(keys, scale=None))
    refused(r"slots has shape \(4\)?", tokens=replace(s.tokens, slots=s.tokens.slots[:4]))
    refused("slots is int32", tokens=replace(s.tokens, slots=s.tokens.slots.int()))
    refused("the rotary table turns 64 channels, heads have 32", rotary=table(64))
    refused("sin has shape", rotary=Rotary(table(32).cos, table(32).sin[:3]))


def _on(rotary: Rotary, device: torch.device) -> Rotary:
    return rotary._replace(cos=rotary.cos.to(device), sin=rotary.sin.to(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("paired", [False, True], ids=["apart", "paired"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("rotary_dim", "interleaved", "normed"),
    [(32, False, False), (32, False, True), (16, False, False), (32, True, True), (0, False, True)],
)
def test_the_cpu_kernel_stores_what_the_definition_does(
    dtype, together, paired, rotary_dim, interleaved, normed
) -> None:
    case = Stored((None, None), tokens=7, dtype=dtype)
    if together:  # as parts of one product
        whole = torch.cat([case.q, case.k, case.v], 1)
        case.q, case.k, case.v = whole.split([4, 2, 2], 1)
    rotary = table(rotary_dim, interleaved) if rotary_dim else None
    options = StoreOptions(rotary, case.norm if normed else None, rotate_queries=True)
    kernel = choose_store(StoreProblem(*(p.form for p in case.pools()), dtype, "cpu")).candidate
    assert kernel.name == "torch_cpu"
    got, expected = case.pools(), case.pools()
    if paired:
        got = list(new_pair(4, 2, 8, 32, dtype))
    for _ in range(2):  # as two layers do, which share what the step's tokens have in common
        q = kernel.run(case.q, case.k, case.v, *got, case.tokens, options)
    reference = kv_store_reference(case.q, case.k, case.v, *expected, case.tokens, options)
    assert q.dtype == dtype
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-3}
    torch.testing.assert_close(q, reference, **close)
    for ours, theirs in zip(got, expected, strict=True):
        assert bool(theirs.codes.any())
        torch.testing.assert_close(ours.codes, theirs.codes, **close)
