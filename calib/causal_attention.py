"""Causal attention for calibration's forward passes in bfloat16 on a CPU, where torch's own takes
a third of a layer's time.

transformers' models call it by the name that `use_causal_blocks` gives them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .float32_products import float32_products

NAME = "lowbit_causal_blocks"
BLOCK = 64  # queries whose scores are held at once
SCORES_AT_ONCE = 1 << 20  # float32 values: 4 MiB, which stay in the cache and in malloc's arena


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v where a token sees itself and those before it.

    q is bfloat16 [rows, heads, seq, head_dim], k and v are [rows, kv_heads, seq, head_dim] with
    heads a multiple of kv_heads; returns q's shape. Scores are exact products of bfloat16 values
    summed in float32, and so is their softmax; what it gives is rounded to bfloat16 before the
    product with v, as in torch's own attention.
    """
    rows, heads, seq, width = q.shape
    kv_heads = k.shape[1]
    per_kv = heads // kv_heads
    q = q.reshape(rows * kv_heads, per_kv, seq, width)
    k, v = (t.reshape(rows * kv_heads, seq, -1) for t in (k, v))
    out = q.new_empty(rows * kv_heads, per_kv, seq, v.shape[-1])
    at_once = max(1, SCORES_AT_ONCE // (per_kv * BLOCK * seq))
    for i in range(0, len(q), at_once):
        part = slice(i, i + at_once)
        _attend(q[part], k[part], v[part], out[part], scale)
    return out.view(rows, heads, seq, -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> None:
    pairs, per_kv, seq, width = q.shape
    keys = k.float().transpose(1, 2)
    later = torch.full((BLOCK, BLOCK), float("-inf"), device=q.device).triu(1)
    for first in range(0, seq, BLOCK):
        end = min(seq, first + BLOCK)
        queries = q[:, :, first:end].reshape(pairs, -1, width).float()
        with float32_products("bf16"):
            scores = torch.bmm(queries, keys[:, :, :end]).mul_(scale)
        block = scores.view(pairs, per_kv, end - first, end)
        block[..., first:] += later[: end - first, : end - first]
        weights = scores.softmax(-1).to(v.dtype)
        out[:, :, first:end] = torch.bmm(weights, v[:, :end]).view(*block.shape[:3], -1)


def use_causal_blocks(model: Any) -> None:
    """Let a transformers model that would use torch's attention use `causal_attention` where all a
    call asks for is causal attention of bfloat16 on a CPU, and torch's for all else."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, _forward)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions: query [rows, heads, seq, head_dim] -> [rows, seq,
    heads, head_dim]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = (
        causal
        and attention_mask is None
        and not dropout
        and query.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and query.shape[2] == key.shape[2]
        and not torch.is_grad_enabled()
        and kwargs.get("position_bias") is None
    )
    if plain:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = causal_attention(query, key, value, scale)
        return out.transpose(1, 2).contiguous(), None
    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
    )
    return out, None
