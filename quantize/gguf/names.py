"""Tensor names and the two transforms of llama.cpp's `llama` architecture, both ways.

Hugging Face rotates the two halves of a head against each other, llama.cpp neighbouring pairs: so
the rows of q_proj and k_proj are interleaved. That moves whole rows, hence is exact on rows that
are already quantized. Llama 3's stretched frequencies become a tensor of divisors.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_BACK = {v: k for k, v in OUTER.items()}
INNER_BACK = {v: k for k, v in INNER.items()}
ROPE_FREQS = "rope_freqs.weight"


def to_gguf(module: str) -> str | None:
    """Hugging Face module name ("model.layers.0.mlp.up_proj") to GGUF's ("blk.0.ffn_up")."""
    if module in OUTER:
        return OUTER[module]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if match and match[2] in INNER:
        return f"blk.{match[1]}.{INNER[match[2]]}"
    return None


def to_hf(name: str) -> str | None:
    """GGUF name without its .weight or .bias to the Hugging Face module name."""
    if name in OUTER_BACK:
        return OUTER_BACK[name]
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if match and match[2] in INNER_BACK:
        return f"model.layers.{match[1]}.{INNER_BACK[match[2]]}"
    return None


def rotated_heads(module: str, heads: int, kv_heads: int) -> int | None:
    """Heads along the rows of `module` when RoPE turns them (q_proj, k_proj), else None."""
    if module.endswith(".q_proj"):
        return heads
    return kv_heads if module.endswith(".k_proj") else None


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Hugging Face's row order to llama.cpp's: [heads * head_dim, ...], halves become pairs."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def deinterleave(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `interleave`."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def llama3_divisors(
    head_dim: int, theta: float, factor: float, low: float, high: float, original_context: int
) -> Tensor:
    """What Llama 3's rope scaling divides each frequency by: float32 [head_dim // 2].

    1 for wavelengths under original_context / high, `factor` above original_context / low, and in
    between the reciprocal of the linear blend (in original_context / wavelength) of both.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = original_context * frequency / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - blend) / factor + blend)).to(torch.float32)
