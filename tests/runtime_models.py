"""Tiny random models, their tokenizer, and quantized checkpoints of them, made on the spot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lowbit.kernels.affine import quantize_affine
from lowbit.kernels.elements import int_elements
from lowbit.quantize.activations import input_scale_of_peak
from lowbit.quantize.checkpoint.compress import compress, compress_input_scale
from lowbit.quantize.checkpoint.ct_config import config_from_schemes
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.passes.rtn import rtn_quantize
from lowbit.quantize.quantized import Quantized
from lowbit.quantize.spec import LayerScheme, scheme_from_name
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

BOS, EOS, PAD, VOCAB = 256, 257, 258, 272
INPUT_PEAK = 4.0
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"

_SPECIAL = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide enough that greedy text does not repeat one token
    **_SPECIAL,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_OPT = {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.3}
_WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_GROUPED),
    "qwen3": lambda: Qwen3Config(**_GROUPED, head_dim=16),
    "mistral": lambda: MistralConfig(**_GROUPED, sliding_window=8),
    "gemma3": lambda: Gemma3TextConfig(**_GROUPED, head_dim=16, **_WINDOW),
    "phi3": lambda: Phi3Config(**_GROUPED),
    "opt": lambda: OPTConfig(**_OPT),
    "gpt_neox": lambda: GPTNeoXConfig(**_SIZES),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "bloom": lambda: BloomConfig(  # no position ids: ALiBi from the attention mask
        vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.3, **_SPECIAL
    ),
    "lfm2": lambda: Lfm2Config(  # state of convolutions beside keys and values
        **_GROUPED, layer_types=["conv", "full_attention"], block_multiple_of=16
    ),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, then <s>, </s> and <pad>; ids above are never produced by text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def save_tiny(folder: Path, config: Any, seed: int = 0, tokenizer: bool = True) -> Path:
    """A random float32 model of `config` as a Hugging Face folder."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def round_to_nearest(w: Tensor, scheme: LayerScheme) -> Quantized:
    """The weight [out, in] on the grid between each group's smallest and largest value."""
    spec = scheme.weights
    if spec.type == "float":
        return rtn_quantize(w, spec, torch.float32)
    codes_of = int_elements(spec.num_bits)
    qmin, qmax = int(codes_of.lowest), int(codes_of.highest)
    groups = w.view(w.shape[0], spec.groups(w.shape[1]), -1)
    zero_point = None
    if spec.symmetric:
        scale = groups.abs().amax(-1) / qmax
    else:
        low = groups.amin(-1).clamp(max=0)
        scale = (groups.amax(-1).clamp(min=0) - low) / (qmax - qmin)
        zero_point = (qmin - low / scale).round().clamp(qmin, qmax).to(torch.int8)
    return Quantized(quantize_affine(w, scale, zero_point, spec.num_bits), scale, zero_point, spec)


def quantize_folder(
    source: Path,
    out: Path,
    scheme: str = "W4A16",
    group_size: int | None = 32,
    mixed: dict[str, str] | None = None,
) -> Path:
    """A compressed-tensors checkpoint of `source`, round to nearest, output head left alone.

    mixed: schemes for the modules whose names end so. Where inputs have a stored scale, it is made
    for a largest magnitude of INPUT_PEAK.
    """
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(source)
    schemes: dict[str, LayerScheme] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module is model.get_output_embeddings():
            continue
        chosen = next((s for end, s in (mixed or {}).items() if name.endswith(end)), scheme)
        grouped = chosen.startswith("W") and chosen[:3] != "W8A"
        scheme_here = scheme_from_name(chosen, group_size if grouped else None)
        weight = tensors.pop(f"{name}.weight")
        tensors |= compress(name, round_to_nearest(weight, scheme_here), scheme_here)
        inputs = scheme_here.input_activations
        if inputs and (scale := input_scale_of_peak(torch.tensor(INPUT_PEAK), inputs)) is not None:
            tensors |= compress_input_scale(name, inputs, scale)
        schemes[name] = scheme_here
    config["quantization_config"] = config_from_schemes(schemes, ["lm_head", "embed_out"], "0")
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def fake_quantized(source: Path, quantized: Path) -> Any:
    """transformers' own float32 model of `source` with the dequantized weights of `quantized`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    checkpoint = Checkpoint(quantized)
    for name in checkpoint.schemes:
        model.get_submodule(name).weight.data = checkpoint.dense_weight(name)
    return model


def hf_greedy(model: Any, token_ids: list[int], n: int) -> list[int]:
    """transformers' greedy continuation of exactly n tokens, or up to the end of the sequence."""
    ids = torch.tensor([token_ids])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n
    )
    return out[0, len(token_ids) :].tolist()


def with_config(folder: Path, **changes: Any) -> Path:
    """Write `changes` into the folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder
