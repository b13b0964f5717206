"""Whole checkpoints of one tiny Llama in every layout, for tests that break them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from lowbit.quantize.checkpoint.kv_config import with_kv_cache
from lowbit.quantize.checkpoint.layouts import LAYOUTS
from lowbit.quantize.checkpoint.manifest import write_manifest
from lowbit.quantize.checkpoint.raw import raw_tensors, write_shards
from lowbit.quantize.kv_names import kv_spec_from_name
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.spec import LayerScheme, scheme_from_name
from safetensors.torch import load_file, save_file

from .models import change_json, change_tensors, deep_llama
from .published_layouts import (
    awq_tensors,
    gptq_quantization,
    gptq_tensors,
    grid_of,
    write_checkpoint,
)
from .runtime_models import FAMILIES, quantize_folder, save_tiny

AWQ_CONFIG = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip


def base_model(folder: Path) -> Path:
    """The original: two layers, a chat template and a generation config beside them."""
    return deep_llama(folder, layers=2)


def gptq(version: int, symmetric: bool = True, shuffled: bool = False) -> Callable[..., Path]:
    def make(base: Path, out: Path) -> Path:
        quantization = gptq_quantization(
            4, 32, symmetric, desc_act=shuffled,
            checkpoint_format="gptq" if version == 1 else "gptq_v2",
        )  # fmt: skip
        write_checkpoint(
            base, out, quantization, lambda w: grid_of(w, 4, 32, symmetric, shuffled=shuffled),
            lambda module, grid: gptq_tensors(module, grid, 4, version),
        )  # fmt: skip
        return out

    return make


def awq(base: Path, out: Path) -> Path:
    write_checkpoint(base, out, AWQ_CONFIG, lambda w: grid_of(w, 4, 32, False), awq_tensors)
    return out


def packed(base: Path, out: Path, layout: str, scheme: LayerScheme) -> Path:
    """As lowbit itself writes the layout."""
    shutil.copytree(base, out)
    written = LAYOUTS[layout]
    schemes: dict[str, LayerScheme] = {}
    tensors = load_file(out / "model.safetensors")
    for weight in [n for n in tensors if n.endswith("_proj.weight")]:
        module = weight.removesuffix(".weight")
        scales = written.scale_dtype(torch.float32)
        q = rtn_quantize(tensors.pop(weight), scheme.weights, scales)
        tensors |= written.compress(module, q, scheme)
        schemes[module] = scheme
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = written.config(schemes, ["lm_head"], "0")
    change_json(out / "config.json", lambda c: c.update(quantization_config=config))
    return out


def native(scheme: str, mixed: dict[str, str] | None = None) -> Callable[..., Path]:
    return lambda base, out: quantize_folder(base, out, scheme, mixed=mixed)


def sharded(base: Path, out: Path) -> Path:
    shutil.copytree(base, out)
    (out / "model.safetensors").unlink()
    write_shards(out, raw_tensors(base / "model.safetensors"), 1 << 17)
    return out


def untied(base: Path, out: Path) -> Path:
    """Tied in config.json, with an equal copy of the embedding as head, as some are stored."""
    shutil.copytree(base, out)
    head = {"lm_head.weight": load_file(base / "model.safetensors")["model.embed_tokens.weight"]}
    change_tensors(out, lambda t: t.update(head))
    return out


def cached(base: Path, out: Path) -> Path:
    """W4A16 with a cache of int8 under calibrated scales."""
    quantize_folder(base, out, "W4A16")
    spec = kv_spec_from_name("int8_static")
    change_json(out / "config.json", lambda c: c.update(with_kv_cache(c, spec, "0")))
    scales = {
        f"model.layers.{i}.self_attn.{side}_scale": torch.tensor([0.5 + i])
        for i in range(2)
        for side in "kv"
    }
    change_tensors(out, lambda t: t.update(scales))
    return out


def with_manifest(base: Path, out: Path) -> Path:
    quantize_folder(base, out, "W4A16")
    write_manifest(out)
    return out


def padded(base: Path, out: Path) -> Path:
    """A model of 72 columns, whose 5-bit codes do not fill their last words."""
    settings = FAMILIES["llama"]()
    settings.hidden_size, settings.head_dim = 72, 18
    save_tiny(out.with_name("padded-base"), settings)
    return quantize_folder(out.with_name("padded-base"), out, "W5A16", group_size=24)


def fp8_by_tensor(base: Path, out: Path) -> Path:
    """FP8 with one scale a weight and static scales of inputs, as Hugging Face's layout has them
    beside that of blocks."""
    shutil.copytree(base, out)
    tensors = load_file(out / "model.safetensors")
    for weight in [n for n in tensors if n.endswith("_proj.weight")]:
        module = weight.removesuffix(".weight")
        scale = tensors[weight].abs().max() / 448
        tensors[weight] = (tensors[weight] / scale).to(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale"] = scale.reshape(1)
        tensors[f"{module}.input_scale"] = torch.tensor([4 / 448])
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    change_json(out / "config.json", lambda c: c.update(quantization_config=config))
    return out


def asymmetric_w4a8(base: Path, out: Path) -> Path:
    """Codes of 4 bits with zero-points, a byte each, since inputs are quantized too."""
    scheme = scheme_from_name("W4A8", 32)
    scheme = replace(scheme, weights=replace(scheme.weights, symmetric=False))
    return packed(base, out, "compressed-tensors", scheme)


WHOLE: dict[str, Callable[..., Path]] = {
    "plain": lambda base, out: Path(shutil.copytree(base, out)),
    "sharded": sharded,
    "untied": untied,
    "manifest": with_manifest,
    "w4": native("W4A16"),
    "w4 asymmetric": native("W4A16_ASYM"),
    "w4a8": native("W4A8"),
    "w8a8 static": native("W8A8_STATIC"),
    "fp8 dynamic": native("FP8_DYNAMIC"),
    "mxfp4": native("MXFP4"),
    "mixed": native("W4A16", mixed={"o_proj": "W4A16_ASYM"}),
    "cache": cached,
    "gptq": gptq(1),
    "gptq v2": gptq(2),
    "awq": awq,
    "hf fp8": lambda base, out: packed(base, out, "fp8", scheme_from_name("FP8_BLOCK")),
    "hf fp8 tensors": fp8_by_tensor,
    "w4a8 asymmetric": asymmetric_w4a8,
}
LIMITED: dict[str, Callable[..., Path]] = {  # whole, with a warning or a fault by what they are
    "w3": native("W3A16"),
    "w8": native("W8A16"),
    "fp8": native("FP8"),
    "gptq asymmetric": gptq(1, symmetric=False),
    "gptq act order": gptq(2, shuffled=True),
    "padded": padded,
    "uneven": native("W4A16", mixed={"0.self_attn.k_proj": "W8A16"}),
}
