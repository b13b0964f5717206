"""Tiny random mixture-of-experts models, and what their experts are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from .runtime_models import BOS, EOS, PAD, VOCAB

EXPERTS, TOP_K = 8, 2
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "num_experts_per_tok": TOP_K,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_INNER = {**_SIZES, "moe_intermediate_size": 32}
_DEEPSEEK = {
    **_INNER,
    "num_key_value_heads": 4,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,  # the first layer has no experts
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=EXPERTS),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_INNER, num_experts=EXPERTS, shared_expert_intermediate_size=64
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**{**_INNER, "head_dim": 16}, num_experts=EXPERTS),
    "deepseek_v2": lambda: DeepseekV2Config(**_DEEPSEEK),
    "deepseek_v3": lambda: DeepseekV3Config(**_DEEPSEEK, n_group=2, topk_group=2),
    "gpt_oss": lambda: GptOssConfig(**_SIZES, num_local_experts=EXPERTS, head_dim=16),
    "granitemoe": lambda: GraniteMoeConfig(**_SIZES, num_local_experts=EXPERTS),
}
STORED_FUSED = ("gpt_oss", "granitemoe")  # their checkpoints hold 3-D tensors
