"""Checkpoint layouts of every scheme: twins, and what compressed-tensors reads from them."""

from __future__ import annotations

import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.quantize.checkpoint.compress import (
    compress,
    compress_input_scale,
    decompress,
    decompress_input_scale,
)
from lowbit.quantize.checkpoint.ct_config import args_to_spec, format_of, spec_to_args
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.quantized import Quantized
from lowbit.quantize.spec import PRESETS, Block, LayerScheme, QuantSpec
from torch import Tensor

FORMATS = {
    "W4A16": "pack-quantized",
    "W8A16": "pack-quantized",
    "W8A8": "int-quantized",
    "W8A8_STATIC": "int-quantized",
    "W4A8": "int-quantized",
    "FP8": "float-quantized",
    "FP8_DYNAMIC": "float-quantized",
    "FP8_BLOCK": "float-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
    "NVFP4": "nvfp4-pack-quantized",
    "MXFP4A16": "mxfp4-pack-quantized",
    "MXFP4": "mxfp4-pack-quantized",
    "MXFP8A16": "mxfp8-quantized",
    "MXFP8": "mxfp8-quantized",
}
FLOATS = [name for name, scheme in PRESETS.items() if scheme.weights.type == "float"]


def weight(rows: int = 48, columns: int = 256, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator) * 0.05
    w[3] = 0
    w[:, 17] *= 20
    return w


def stored(scheme: LayerScheme, w: Tensor) -> tuple[Quantized, dict[str, Tensor]]:
    q = rtn_quantize(w, scheme.weights, torch.bfloat16)
    return q, compress("m", q, scheme)


def same(a: Tensor, b: Tensor) -> bool:
    as_bytes = lambda t: t.contiguous().view(torch.uint8)  # noqa: E731
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


@pytest.mark.parametrize("name", PRESETS)
def test_decompress_undoes_compress(name: str) -> None:
    scheme = PRESETS[name]
    q, tensors = stored(scheme, weight())
    back = decompress("m", tensors, tensors.__getitem__, scheme.weights)
    for field in ("codes", "scale", "zero_point", "global_scale"):
        ours, theirs = getattr(q, field), getattr(back, field)
        assert (ours is None) == (theirs is None), field
        assert ours is None or same(ours, theirs), field
    assert back.spec == q.spec


def test_blocks_that_are_cut() -> None:
    spec = QuantSpec(8, "float", Block(128, 128))
    scheme = LayerScheme(spec, PRESETS["FP8_BLOCK"].input_activations)
    q, tensors = stored(scheme, weight(200, 300))
    assert tensors["m.weight_scale"].shape == (2, 3)
    back = decompress("m", tensors, tensors.__getitem__, spec)
    assert torch.equal(back.dequantize(), q.dequantize())
    assert (q.dequantize() - weight(200, 300)).abs().max() <= weight().abs().max() / 16


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_those_of_compressed_tensors(name: str) -> None:
    """Its own inference from the scheme, which vLLM and llm-compressor follow, agrees."""
    assert format_of(PRESETS[name]) == FORMATS[name]
    formats = pytest.importorskip("compressed_tensors.compressors.format")
    assert formats.infer_module_format(torch.nn.Linear, ct_scheme(name)).value == FORMATS[name]


def ct_scheme(name: str):
    """The preset as compressed-tensors' QuantizationScheme, through what config.json would hold."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = PRESETS[name]
    args = {"weights": scheme.weights, "input_activations": scheme.input_activations}
    return quantization.QuantizationScheme(
        targets=["Linear"],
        **{k: quantization.QuantizationArgs(**spec_to_args(s)) for k, s in args.items() if s},
    )


@pytest.mark.parametrize("name", PRESETS)
def test_specs_round_trip_through_the_config(name: str) -> None:
    scheme = PRESETS[name]
    for spec in (scheme.weights, scheme.input_activations):
        assert spec is None or args_to_spec(spec_to_args(spec)) == spec


@pytest.mark.parametrize("name", ["W8A8", "W4A8", *FLOATS])
def test_presets_mean_what_compressed_tensors_means(name: str) -> None:
    quant_scheme = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    theirs = quant_scheme.preset_name_to_scheme(name, ["Linear"])
    ours = ct_scheme(name)
    for side in ("weights", "input_activations"):
        a, b = getattr(ours, side), getattr(theirs, side)
        assert (a is None) == (b is None), side
        drop = {"observer", "zp_dtype"}
        assert a is None or a.model_dump(exclude=drop) == b.model_dump(exclude=drop), side


@pytest.mark.parametrize("name", FORMATS)
def test_compressed_tensors_decompresses_to_our_values(name: str) -> None:
    """Bit for bit in float32, or in bfloat16 where that is all that it computes in."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    scheme = PRESETS[name]
    q = rtn_quantize(weight(), scheme.weights, torch.float32)
    tensors = {n.removeprefix("m."): t for n, t in compress("m", q, scheme).items()}
    reader = compressors.BaseCompressor.get_value_from_registry(format_of(scheme))
    theirs = reader.decompress(tensors, ct_scheme(name))["weight"]
    assert theirs.dtype == (
        torch.bfloat16 if scheme.weights.scale_dtype != "model" else torch.float32
    )
    assert torch.equal(q.dequantize(theirs.dtype), theirs)


@pytest.mark.parametrize("name", FLOATS)
def test_codes_are_those_that_compressed_tensors_makes(name: str) -> None:
    """Its quantizer with our plain-range scales gives our bytes."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    scheme, w = PRESETS[name], weight()
    q = rtn_quantize(w, scheme.weights, torch.float32)
    ours = {n.removeprefix("m."): t for n, t in compress("m", q, scheme).items()}
    writer = compressors.BaseCompressor.get_value_from_registry(format_of(scheme))
    given = {"weight": w, "weight_scale": ours["weight_scale"].float()}
    if scheme.weights.scale_dtype == "e8m0":
        given["weight_scale"] = q.float_scale()
    if q.global_scale is not None:
        given["weight_global_scale"] = q.global_scale
    theirs = writer.compress(given, ct_scheme(name))
    codes = "weight_packed" if "weight_packed" in ours else "weight"
    for leaf in (codes, "weight_scale"):
        if leaf == "weight_scale" or codes == "weight":
            assert torch.equal(ours[leaf].float(), theirs[leaf].float()), leaf
        else:  # a nibble of -0 may be one of 0
            plain = lambda t: decompress("m", ["m.weight_packed"], {  # noqa: E731
                "m.weight_packed": t, "m.weight_scale": ours["weight_scale"],
                "m.weight_global_scale": ours.get("weight_global_scale"),
            }.__getitem__, scheme.weights).codes.float()  # fmt: skip
            assert torch.equal(plain(ours[leaf]), plain(theirs[leaf]))


def test_a_tensors_scale_is_stored_as_one_number() -> None:
    _, tensors = stored(PRESETS["FP8"], weight())
    assert tensors["m.weight_scale"].shape == (1,)
    assert tensors["m.weight"].dtype == torch.float8_e4m3fn


def test_input_scales() -> None:
    for name, leaf in (("FP8", "input_scale"), ("NVFP4", "input_global_scale")):
        spec = PRESETS[name].input_activations
        assert spec is not None
        tensors = compress_input_scale("m", spec, torch.tensor(2.5))
        assert list(tensors) == [f"m.{leaf}"] and tensors[f"m.{leaf}"].shape == (1,)
        back = decompress_input_scale("m", tensors, tensors.__getitem__, spec)
        assert back is not None and back.tolist() == [2.5]
        for bad in (0.0, -1.0, float("nan"), float("inf")):
            tensors[f"m.{leaf}"] = torch.tensor([bad])
            with pytest.raises(UserError, match="positive number"):
                decompress_input_scale("m", tensors, tensors.__getitem__, spec)
        with pytest.raises(UserError, match=f"m.{leaf} is missing"):
            decompress_input_scale("m", {}, {}.__getitem__, spec)
    token = PRESETS["W8A8"].input_activations
    assert token is not None
    assert decompress_input_scale("m", {}, {}.__getitem__, token) is None


def not_a_number(scale: Tensor) -> Tensor:
    return torch.full_like(scale.view(torch.uint8), 127).view(scale.dtype)


DAMAGE = {
    "NaN among E4M3 scales": ("NVFP4", "weight_scale", not_a_number, "finite"),
    "no E8M0 number": ("MXFP4", "weight_scale", lambda t: t.fill_(255), "finite"),
    "a global scale of zero": ("NVFP4", "weight_global_scale", torch.zeros_like, "positive"),
    "E8M0 as floats": ("MXFP8", "weight_scale", Tensor.float, "uint8"),
    "scale cut": ("FP8_BLOCK", "weight_scale", lambda t: t[:, :1], r"\(1, 2\)"),
    "codes of another format": ("FP8", "weight", lambda t: t.view(torch.int8), "float8_e4m3fn"),
    "packed floats cut": ("NVFP4", "weight_packed", lambda t: t[:, :-3], "do not divide"),
    "more scales than one": ("FP8", "weight_scale", lambda t: t.expand(48, 1), r"take \(1, 1\)"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_tensors_are_refused(what: str) -> None:
    name, leaf, change, named = DAMAGE[what]
    _, tensors = stored(PRESETS[name], weight())
    tensors[f"m.{leaf}"] = change(tensors[f"m.{leaf}"])
    with pytest.raises(UserError, match=named):
        decompress("m", tensors, tensors.__getitem__, PRESETS[name].weights)
