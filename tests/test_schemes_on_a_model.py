"""Checkpoints of every scheme: transformers with compressed-tensors, our runtime, our evals agree.

Activations of the schemes that store their scales have one that cuts nothing off or a lot, so that
a reader that leaves it out is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.evals.scorer import load_scorer
from lowbit.evals.size import size_report
from lowbit.kernels.compiled import prefers_compiled
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.spec import PRESETS
from lowbit.runtime import LLM
from transformers import AutoModelForCausalLM, LlamaConfig

from .command import Commands
from .moe_models import EXPERTS
from .moe_models import FAMILIES as MIXTURES
from .runtime_models import VOCAB, quantize_folder, save_tiny

SCHEMES = [
    "W8A8", "W8A8_STATIC", "W4A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4",
    "MXFP4A16", "MXFP8", "MXFP8A16",
]  # fmt: skip
IDS = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    return save_tiny(tmp_path_factory.mktemp("schemes") / "original", config)


@pytest.fixture(scope="module")
def checkpoint(original: Path) -> Callable[[str], Path]:
    def make(scheme: str) -> Path:
        out = original.parent / scheme
        return out if out.exists() else quantize_folder(original, out, scheme)

    return make


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def by_transformers(folder: Path) -> Any:
    """The float32 model. compressed-tensors 0.20.1 dequantizes formats with 8-bit scales to
    bfloat16, which transformers then cannot multiply with float32 inputs: it is cast back."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.hf_quantizer.compressor.decompress_model(model)
    return torch.nn.Module.float(model)


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.inference_mode()
def test_transformers_loads_it_and_computes_our_logits(scheme, original, checkpoint) -> None:
    pytest.importorskip("compressed_tensors", reason="the package that is compared with")
    theirs = by_transformers(checkpoint(scheme))
    want = theirs(IDS).logits[0]
    ours = load_scorer(checkpoint(scheme))
    if PRESETS[scheme].weights.scale_dtype == "e4m3":  # exact here, rounded to bfloat16 there
        for name in Checkpoint(checkpoint(scheme)).schemes:
            weight = ours.model.get_submodule(name).weight
            weight.data = weight.data.bfloat16().float()
    got = ours(IDS)
    changed = rms(load_scorer(original)(IDS) - want)
    assert rms(got - want) < 1e-3 * changed
    if PRESETS[scheme].input_activations is not None:
        for module in theirs.modules():
            module.quantization_enabled = False
        weights_only = theirs(IDS).logits[0]
        assert rms(got - weights_only) > 0.05 * changed, "activations were left as they are"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_runtime_computes_the_logits_of_the_evals(scheme, original, checkpoint) -> None:
    folder = checkpoint(scheme)
    want = load_scorer(folder)(IDS)
    changed = rms(load_scorer(original)(IDS) - want)
    floats = PRESETS[scheme].weights.type == "float"
    llm = LLM(folder, dtype="float32", linear_kernel="dense" if floats else "dequant")
    assert rms(llm.logits(IDS)[0] - want) < 1e-4 * changed


@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_that_are_chosen(scheme, original, checkpoint) -> None:
    """Sums of whole numbers round otherwise than sums of floats, by a last bit; now and then that
    turns the rounding of an input further on, which the next layers make more of."""
    llm = LLM(checkpoint(scheme), dtype="float32")
    floats = PRESETS[scheme].weights.type == "float"
    kernels = {r.kernel for r in llm.linear_report()}
    if scheme.startswith("W8A8") and torch.cpu._is_vnni_supported():
        expected = "w8a8_cpu"
    elif floats:
        expected = "dense"
    else:
        expected = "int16_cpu" if prefers_compiled() else "dequant"
    assert kernels == {expected}
    if expected in ("w8a8_cpu", "int16_cpu"):
        want = load_scorer(checkpoint(scheme))(IDS)
        changed = rms(load_scorer(original)(IDS) - want)
        assert rms(llm.logits(IDS)[0] - want) < 0.5 * changed


@pytest.mark.parametrize("scheme", ["NVFP4", "MXFP8", "FP8_BLOCK"])
def test_packed_floats_equal_dense_ones(scheme, checkpoint) -> None:
    dense = LLM(checkpoint(scheme), dtype="float32")
    packed = LLM(checkpoint(scheme), dtype="float32", linear_kernel="dequant")
    torch.testing.assert_close(packed.logits(IDS), dense.logits(IDS), rtol=1e-5, atol=1e-5)
    sizes = [sum(r.nbytes for r in llm.linear_report()) for llm in (packed, dense)]
    assert sizes[0] < 0.3 * sizes[1]


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [("NVFP4A16", 4.5), ("MXFP4A16", 4.25), ("MXFP8A16", 8.25), ("FP8", 8), ("W8A8", 8)],
)
def test_bits_a_weight(scheme, bits, checkpoint) -> None:
    """The float32 scales of this model's rows and tensors are a little more."""
    assert size_report(checkpoint(scheme)).quantized_bits_per_weight == pytest.approx(
        bits, rel=0.04
    )


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC"])
def test_experts_see_quantized_inputs_too(scheme, command: Commands, tmp_path: Path) -> None:
    """Fused by transformers, they are taken apart to be measured."""
    source = save_tiny(tmp_path / "moe", MIXTURES["qwen3_moe"]())
    out = tmp_path / scheme
    assert command("run", source, "-o", out, "--method", "rtn", "--scheme", scheme).code == 0
    want = load_scorer(out)(IDS)
    llm = LLM(out, dtype="float32", linear_kernel="dense" if scheme[0] == "F" else "dequant")
    torch.testing.assert_close(llm.logits(IDS)[0], want, atol=1e-4, rtol=1e-4)
    assert sum(".experts." in r.module for r in llm.linear_report()) == 2 * EXPERTS * 3
