"""The architectures that export writes and import reads, each a declaration.

An architecture is a choice of what several share (shared_parts.py) and what is its own.
"""

from __future__ import annotations

from ...kernels.errors import UserError
from .architecture import Architecture, Setting, Slot
from .shared_parts import (
    ATTENTION,
    ATTN_SOFTCAP,
    COMMON,
    EXPERT_SIZE,
    EXPERTS,
    FINAL_SOFTCAP,
    GEMMA_NORMS,
    GPT2,
    HEAD_DIM,
    HEAD_NORMS,
    INTERLEAVED,
    KV_HEADS,
    LAYER_EPS,
    MLP,
    NORMS,
    OLMO2_NORMS,
    OUTER,
    PHI3,
    QWEN_EXPERTS,
    SHARED_EXPERT,
    SHARED_SIZE,
    SIZES,
    STARCODER2_MLP,
    VOCAB,
    WINDOW,
    experts,
)

SILU = {"hidden_act": "silu"}
EVERY_LAYER_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
LLAMA_ROPES = ("default", "linear", "yarn", "llama3")

LLAMA = Architecture(
    name="llama",
    classes=("LlamaForCausalLM", "MistralForCausalLM"),
    model_type="llama",
    outer=OUTER,
    layer={**NORMS, **INTERLEAVED, **MLP},
    settings=(*COMMON, *HEAD_DIM, VOCAB),
    bias_settings=("attention_bias", "mlp_bias"),
    fixed=SILU,
    ropes=LLAMA_ROPES,
    rope_dimensions=True,
)
MIXTRAL = Architecture(
    name="llama",
    classes=("MixtralForCausalLM",),
    model_type="mixtral",
    outer=OUTER,
    layer={
        **NORMS, **INTERLEAVED, **experts("block_sparse_moe", "w1", "w3", "w2", "ffn"),
    },
    settings=(*COMMON, *HEAD_DIM, *EXPERTS, VOCAB),
    config_names={"num_experts": "num_local_experts"},
    fixed=SILU,
    ropes=LLAMA_ROPES,
    rope_dimensions=True,
)  # fmt: skip
GRANITE = Architecture(
    name="granite",
    classes=("GraniteForCausalLM",),
    model_type="granite",
    outer=OUTER,
    layer={**NORMS, **INTERLEAVED, **MLP},
    settings=(
        *COMMON,
        VOCAB,
        Setting("attention.scale", "attention_multiplier", float),
        Setting("embedding_scale", "embedding_multiplier", float),
        Setting("residual_scale", "residual_multiplier", float),
        Setting("logit_scale", "logits_scaling", float),
    ),
    bias_settings=("attention_bias", "mlp_bias"),
    fixed=SILU,
    ropes=LLAMA_ROPES,
    rope_dimensions=True,
)
QWEN2 = Architecture(
    name="qwen2",
    classes=("Qwen2ForCausalLM",),
    model_type="qwen2",
    outer=OUTER,
    layer={**NORMS, **ATTENTION, **MLP},
    settings=COMMON,
    fixed=SILU,
)
QWEN3 = Architecture(
    name="qwen3",
    classes=("Qwen3ForCausalLM",),
    model_type="qwen3",
    outer=OUTER,
    layer={**NORMS, **ATTENTION, **HEAD_NORMS, **MLP},
    settings=(*COMMON, *HEAD_DIM),
    bias_settings=("attention_bias",),
    fixed=SILU,
)
QWEN2MOE = Architecture(
    name="qwen2moe",
    classes=("Qwen2MoeForCausalLM",),
    model_type="qwen2_moe",
    outer=OUTER,
    layer={**NORMS, **ATTENTION, **QWEN_EXPERTS, **SHARED_EXPERT},
    settings=(*COMMON, *EXPERTS, EXPERT_SIZE, SHARED_SIZE),
    fixed={**SILU, **EVERY_LAYER_SPARSE, "norm_topk_prob": False},
    always_output=True,
)
QWEN3MOE = Architecture(
    name="qwen3moe",
    classes=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    outer=OUTER,
    layer={**NORMS, **ATTENTION, **HEAD_NORMS, **QWEN_EXPERTS},
    settings=(*COMMON, *HEAD_DIM, *EXPERTS, EXPERT_SIZE),
    bias_settings=("attention_bias",),
    fixed={**SILU, **EVERY_LAYER_SPARSE, "norm_topk_prob": True},
)
GEMMA2 = Architecture(
    name="gemma2",
    classes=("Gemma2ForCausalLM",),
    model_type="gemma2",
    outer=OUTER,
    layer={**GEMMA_NORMS, **ATTENTION, **MLP},
    settings=(*COMMON, *HEAD_DIM, WINDOW, ATTN_SOFTCAP, FINAL_SOFTCAP),
    bias_settings=("attention_bias",),
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    norm_offset=1.0,
    ropes=("default",),
    theta_key=False,
    window=True,
    window_period=2,
    big_layers=46,
)
GEMMA3 = Architecture(
    name="gemma3",
    classes=("Gemma3ForCausalLM",),
    model_type="gemma3_text",
    outer=OUTER,
    layer={**GEMMA_NORMS, **ATTENTION, **HEAD_NORMS, **MLP},
    settings=(*COMMON, *HEAD_DIM, WINDOW, FINAL_SOFTCAP),
    bias_settings=("attention_bias",),
    fixed={"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None},
    norm_offset=1.0,
    ropes=("default", "linear"),
    window=True,
    window_period=6,
    big_layers=62,
)
PHI3_MODEL = Architecture(
    name="phi3",
    classes=("Phi3ForCausalLM",),
    model_type="phi3",
    outer=OUTER,
    layer={**NORMS, **PHI3},
    settings=(
        *COMMON,
        WINDOW,
        Setting("rope.scaling.original_context_length", "original_max_position_embeddings"),
    ),
    fixed=SILU,
    defaults={"sliding_window": 0},
    ropes=("default", "longrope"),
    rope_dimensions=True,
    partial_rope=True,
)
OLMO2 = Architecture(
    name="olmo2",
    classes=("Olmo2ForCausalLM",),
    model_type="olmo2",
    outer=OUTER,
    layer={**OLMO2_NORMS, **ATTENTION, **MLP},
    settings=COMMON,
    bias_settings=("attention_bias",),
    fixed=SILU,
    always_output=True,
)
STARCODER2 = Architecture(
    name="starcoder2",
    classes=("Starcoder2ForCausalLM",),
    model_type="starcoder2",
    outer=OUTER,
    layer={**NORMS, **ATTENTION, **STARCODER2_MLP},
    settings=(*SIZES, KV_HEADS, LAYER_EPS),
    config_names={"layer_norm_eps": "norm_epsilon"},
    fixed={"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
)
GPT2_MODEL = Architecture(
    name="gpt2",
    classes=("GPT2LMHeadModel",),
    model_type="gpt2",
    outer={
        "transformer.wte": Slot("token_embd", ("vocab", "hidden")),
        "transformer.wpe": Slot("position_embd", ("positions", "hidden")),
        "transformer.ln_f": Slot("output_norm", ("hidden",)),
        "lm_head": Slot("output", ("vocab", "hidden")),
    },
    layer=GPT2,
    layers="transformer.h",
    settings=(*SIZES, LAYER_EPS),
    config_names={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    fixed={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    ropes=(),
    theta_key=False,
)

ARCHITECTURES = (
    LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN2MOE, QWEN3MOE, GEMMA2, GEMMA3, PHI3_MODEL, OLMO2, GRANITE,
    STARCODER2, GPT2_MODEL,
)  # fmt: skip
BY_CLASS = {name: a for a in ARCHITECTURES for name in a.classes}


def architecture_of_class(name: str) -> Architecture:
    """The architecture that computes the Hugging Face class `name`; UserError when none does."""
    if name not in BY_CLASS:
        raise UserError(
            f"GGUF export knows the architectures {', '.join(BY_CLASS)}; this model is a {name}"
        )
    return BY_CLASS[name]


def architecture_of_file(name: str | None, experts: bool) -> Architecture:
    """The architecture of a file by its general.architecture and whether it has experts; UserError
    for one that is not known."""
    found = [a for a in ARCHITECTURES if a.name == name]
    if not found:
        known = ", ".join(dict.fromkeys(a.name for a in ARCHITECTURES))
        raise UserError(f"GGUF import knows the architectures {known}; this file is a {name}")
    return found[1] if len(found) > 1 and experts else found[0]
