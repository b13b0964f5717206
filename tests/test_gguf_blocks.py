"""Block types: bytes against llama.cpp's own encoders, values against gguf's decoders."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.calib.shards import Shards
from lowbit.kernels.errors import UserError
from lowbit.quantize.gguf.blocks import CODECS, Codec, codec
from lowbit.quantize.gguf.blocks.base import SLICE
from lowbit.quantize.gguf.blocks.legacy import AffineCodec, SymmetricCodec
from torch import Tensor

from .gguf_models import llama_cpp_blocks, shared_data

ALL = list(CODECS.values())
BLOCKS = [c for c in ALL if c.block > 1]
WEIGHTED = [c for c in BLOCKS if c.uses_importance]
LEGACY = [CODECS[n] for n in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]


def some_of(rows: Tensor, kind: type[Codec]) -> Tensor:
    """Fewer rows for the types that search longest."""
    return rows[::6] if kind.name[:3] in ("IQ1", "IQ2", "IQ3") else rows


def name_of(value: object) -> str:
    return getattr(value, "name", "")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(rows: int = 32, columns: int = 512, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=generator(seed))


def random_importance(columns: int, seed: int = 11) -> Tensor:
    """Over five orders of magnitude, with columns that were never used."""
    importance = normal(1, columns, seed)[0].square() * torch.logspace(-3, 2, columns)
    importance[columns // 5 : columns // 4] = 0
    return importance


ROWS = {
    "random": normal(),
    "weights": (normal(seed=1) * 0.02).to(torch.float16).float(),
    "outliers": normal(seed=2) * torch.where(torch.arange(512) % 37 == 0, 40.0, 1.0),
    "growing": normal(seed=12) * torch.logspace(-6, 2, 512),
    "constant": torch.full((4, 256), 0.37),
    "negative": torch.full((4, 256), -1.25),
    "zero": torch.zeros(4, 256),
    "half zero": torch.cat([normal(8, 256), torch.zeros(8, 256)], 1),
    "one entry": torch.eye(256)[:8],
    "ties": torch.randint(-8, 9, (32, 512), generator=generator(3)) / 2.0,
    "positive": normal(seed=4).abs(),
    "below zero": -normal(seed=4).abs(),
    "large": normal(seed=5) * 1e4,
    "huge": normal(seed=9) * 1e30,  # no model has such weights, and export refuses them
    "tiny": normal(seed=6) * 1e-6,
    "tinier": normal(seed=7) * 1e-30,
    "subnormal": normal(seed=8) * 1e-41,
}


@pytest.fixture(scope="module")
def real() -> Tensor:
    """The weights of a small trained model, in rows of 256."""
    shards = Shards(shared_data() / "stories260k")
    matrices = [shards.get(n).float() for n in shards.names() if "proj" in n]
    flat = torch.cat([m.flatten() for m in matrices])
    return flat[: len(flat) // 256 * 256].view(-1, 256)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", BLOCKS, ids=name_of)
def test_bytes_are_those_of_llama_cpp(kind: type[Codec], rows: str) -> None:
    if rows == "huge" and kind.name[:3] in ("IQ1", "IQ2", "IQ3"):
        pytest.skip("llama.cpp aborts where a sum of squares overflows")
    x = ROWS[rows]
    if not kind.needs_importance:
        assert torch.equal(kind.encode(x), llama_cpp_blocks(x, kind))
    if kind.uses_importance:
        importance = random_importance(x.shape[1])
        assert torch.equal(kind.encode(x, importance), llama_cpp_blocks(x, kind, importance))


@pytest.mark.parametrize("kind", ALL, ids=name_of)
def test_a_trained_model_has_the_bytes_of_llama_cpp(kind: type[Codec], real: Tensor) -> None:
    real = some_of(real, kind)
    for importance in (None, torch.ones(256), random_importance(256)):
        if kind.name == "F32" or (importance is None and kind.needs_importance):
            continue
        expected = llama_cpp_blocks(real, kind, importance)
        assert torch.equal(kind.encode(real, importance), expected)


@pytest.mark.parametrize("kind", BLOCKS, ids=name_of)
@settings(max_examples=15, deadline=None)
@given(
    values=st.lists(st.floats(-6e4, 6e4, width=32), min_size=32, max_size=32),
    exponent=st.integers(-40, 0),
)
def test_any_values_have_the_bytes_of_llama_cpp(
    kind: type[Codec], values: list[float], exponent: int
) -> None:
    x = (torch.tensor(values) * 2.0**exponent).repeat(8).view(1, -1)
    x[0, 100:] *= 0.3
    importance = random_importance(256) if kind.uses_importance else None
    assert torch.equal(kind.encode(x, importance), llama_cpp_blocks(x, kind, importance))


@pytest.mark.parametrize("kind", ALL, ids=name_of)
def test_decoding_is_gguf_s(kind: type[Codec]) -> None:
    """On bytes drawn at random, so that every field takes every value; NaN where gguf has NaN."""
    data = torch.randint(0, 256, (64, 8 * kind.nbytes), generator=generator(9)).to(torch.uint8)
    with np.errstate(all="ignore"):
        number = gguf.GGMLQuantizationType[kind.name]
        expected = torch.from_numpy(np.array(gguf.quants.dequantize(data.numpy(), number)))
    torch.testing.assert_close(kind.decode(data), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ALL, ids=name_of)
def test_rows_are_independent_and_slices_do_not_show(kind: type[Codec]) -> None:
    x = normal(SLICE // 256 + 3, 256)
    importance = random_importance(256)
    encoded = kind.encode(x, importance)
    assert encoded.shape == (x.shape[0], kind.row_bytes(256))
    for row in (0, 1, SLICE // 256, x.shape[0] - 1):
        assert torch.equal(encoded[row : row + 1], kind.encode(x[row : row + 1], importance))
    decoded = kind.decode(encoded)
    assert torch.equal(decoded[-2:], kind.decode(encoded[-2:]))


LIMITS = {
    "Q8_0": 0.006, "Q6_K": 0.02, "Q5_1": 0.04, "Q5_0": 0.05, "Q5_K": 0.04, "Q4_1": 0.08,
    "Q4_0": 0.09, "Q4_K": 0.08, "IQ4_NL": 0.08, "IQ4_XS": 0.08, "MXFP4": 0.13, "Q3_K": 0.16,
    "Q2_K": 0.32, "IQ3_S": 0.2, "IQ3_XXS": 0.25, "IQ2_S": 0.35, "IQ2_XS": 0.4, "IQ2_XXS": 0.45,
    "IQ1_M": 0.6, "IQ1_S": 0.62, "TQ1_0": 1.0, "TQ2_0": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("kind", BLOCKS, ids=name_of)
def test_relative_error_of_normal_weights(kind: type[Codec]) -> None:
    x = normal(16, 1024)
    error = (kind.decode(kind.encode(x, torch.ones(1024))) - x).norm() / x.norm()
    assert LIMITS[kind.name] / 2 < error < LIMITS[kind.name]


@pytest.mark.parametrize("kind", WEIGHTED, ids=name_of)
def test_importance_lowers_the_error_that_it_weighs(kind: type[Codec], real: Tensor) -> None:
    importance = random_importance(256, seed=13)
    real = some_of(real, kind)

    def weighted_error(weights: Tensor) -> float:
        difference = kind.decode(kind.encode(real, weights)) - real
        return (importance * difference.square()).sum().item()

    assert weighted_error(importance) < weighted_error(torch.ones(256))


@pytest.mark.parametrize("kind", [c for c in LEGACY if issubclass(c, SymmetricCodec)], ids=name_of)
def test_pack_keeps_given_levels(kind: type[SymmetricCodec]) -> None:
    levels = torch.randint(kind.low, kind.high + 1, (64, 32), generator=generator(10))
    d = (torch.rand(64, 1, generator=generator(10)) - 0.5).to(torch.float16).float()
    blocks = kind.pack(d, levels.to(torch.int8))
    assert torch.equal(kind.decode(blocks.view(8, -1)).view(64, 32), d * levels)


@pytest.mark.parametrize("kind", [c for c in LEGACY if issubclass(c, AffineCodec)], ids=name_of)
def test_pack_keeps_given_codes(kind: type[AffineCodec]) -> None:
    q = torch.randint(0, kind.high + 1, (64, 32), generator=generator(11))
    d, m = torch.rand(2, 64, 1, generator=generator(11)).to(torch.float16).float()
    blocks = kind.pack(d, m, q.to(torch.int8))
    assert torch.equal(kind.decode(blocks.view(8, -1)).view(64, 32), d * q + m)


def test_unknown_type_is_named() -> None:
    with pytest.raises(UserError, match="Q4_2"):
        codec("Q4_2")
