"""The architectures that export writes and import reads, each a declaration.

What most of them share stands first; an architecture is a choice of it and what is its own.
"""

from __future__ import annotations

from ...kernels.errors import UserError
from .architecture import Architecture, Setting, Slot

SIZES = (
    Setting("context_length", "max_position_embeddings"),
    Setting("embedding_length", "hidden_size"),
    Setting("block_count", "num_hidden_layers"),
    Setting("feed_forward_length", "intermediate_size"),
    Setting("attention.head_count", "num_attention_heads"),
)
KV_HEADS = Setting("attention.head_count_kv", "num_key_value_heads")
VOCAB = Setting("vocab_size", "vocab_size")
RMS_EPS = Setting("attention.layer_norm_rms_epsilon", "rms_norm_eps", float)
LAYER_EPS = Setting("attention.layer_norm_epsilon", "layer_norm_eps", float)
HEAD_DIM = (
    Setting("attention.key_length", "head_dim", optional=True),
    Setting("attention.value_length", "head_dim", optional=True),
)
EXPERTS = (
    Setting("expert_count", "num_experts"),
    Setting("expert_used_count", "num_experts_per_tok"),
)
EXPERT_SIZE = Setting("expert_feed_forward_length", "moe_intermediate_size")
SHARED_SIZE = Setting("expert_shared_feed_forward_length", "shared_expert_intermediate_size")
WINDOW = Setting("attention.sliding_window", "sliding_window")
ATTN_SOFTCAP = Setting("attn_logit_softcapping", "attn_logit_softcapping", float)
FINAL_SOFTCAP = Setting("final_logit_softcapping", "final_logit_softcapping", float, optional=True)
COMMON = (*SIZES, KV_HEADS, RMS_EPS)

OUTER = {
    "model.embed_tokens": Slot("token_embd", ("vocab", "hidden")),
    "model.norm": Slot("output_norm", ("hidden",)),
    "lm_head": Slot("output", ("vocab", "hidden")),
}
NORMS = {
    "input_layernorm": Slot("attn_norm", ("hidden",)),
    "post_attention_layernorm": Slot("ffn_norm", ("hidden",)),
}
GEMMA_NORMS = {
    "input_layernorm": Slot("attn_norm", ("hidden",)),
    "post_attention_layernorm": Slot("post_attention_norm", ("hidden",)),
    "pre_feedforward_layernorm": Slot("ffn_norm", ("hidden",)),
    "post_feedforward_layernorm": Slot("post_ffw_norm", ("hidden",)),
}
OLMO2_NORMS = {
    "post_attention_layernorm": Slot("post_attention_norm", ("hidden",)),
    "post_feedforward_layernorm": Slot("post_ffw_norm", ("hidden",)),
    "self_attn.q_norm": Slot("attn_q_norm", ("q",)),
    "self_attn.k_norm": Slot("attn_k_norm", ("kv",)),
}
ATTENTION = {
    "self_attn.q_proj": Slot("attn_q", ("q", "hidden")),
    "self_attn.k_proj": Slot("attn_k", ("kv", "hidden")),
    "self_attn.v_proj": Slot("attn_v", ("kv", "hidden")),
    "self_attn.o_proj": Slot("attn_output", ("hidden", "q")),
}
INTERLEAVED = {
    **ATTENTION,
    "self_attn.q_proj": Slot("attn_q", ("q", "hidden"), heads="num_attention_heads"),
    "self_attn.k_proj": Slot("attn_k", ("kv", "hidden"), heads="num_key_value_heads"),
}
HEAD_NORMS = {
    "self_attn.q_norm": Slot("attn_q_norm", ("head",)),
    "self_attn.k_norm": Slot("attn_k_norm", ("head",)),
}
MLP = {
    "mlp.gate_proj": Slot("ffn_gate", ("ffn", "hidden")),
    "mlp.up_proj": Slot("ffn_up", ("ffn", "hidden")),
    "mlp.down_proj": Slot("ffn_down", ("hidden", "ffn")),
}
PHI3 = {
    "self_attn.qkv_proj": Slot("attn_qkv", ("qkv", "hidden")),
    "self_attn.o_proj": Slot("attn_output", ("hidden", "q")),
    "mlp.gate_up_proj": Slot("ffn_up", ("two_ffn", "hidden")),
    "mlp.down_proj": Slot("ffn_down", ("hidden", "ffn")),
}
STARCODER2_MLP = {
    "mlp.c_fc": Slot("ffn_up", ("ffn", "hidden")),
    "mlp.c_proj": Slot("ffn_down", ("hidden", "ffn")),
}
GPT2 = {
    "ln_1": Slot("attn_norm", ("hidden",)),
    "attn.c_attn": Slot("attn_qkv", ("qkv", "hidden"), transposed=True),
    "attn.c_proj": Slot("attn_output", ("hidden", "hidden"), transposed=True),
    "ln_2": Slot("ffn_norm", ("hidden",)),
    "mlp.c_fc": Slot("ffn_up", ("ffn", "hidden"), transposed=True),
    "mlp.c_proj": Slot("ffn_down", ("hidden", "ffn"), transposed=True),
}


def _experts(block: str, gate: str, up: str, down: str, inner: str) -> dict[str, Slot]:
    """A router and the experts' linears, `block` being what the module of both is called."""
    return {
        f"{block}.gate": Slot("ffn_gate_inp", ("experts", "hidden")),
        f"{block}.experts.E.{gate}": Slot("ffn_gate_exps", (inner, "hidden"), expert=True),
        f"{block}.experts.E.{up}": Slot("ffn_up_exps", (inner, "hidden"), expert=True),
        f"{block}.experts.E.{down}": Slot("ffn_down_exps", ("hidden", inner), expert=True),
    }


QWEN_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj", "expert_ffn")
SHARED_EXPERT = {
    "mlp.shared_expert.gate_proj": Slot("ffn_gate_shexp", ("shared_ffn", "hidden")),
    "mlp.shared_expert.up_proj": Slot("ffn_up_shexp", ("shared_ffn", "hidden")),
    "mlp.shared_expert.down_proj": Slot("ffn_down_shexp", ("hidden", "shared_ffn")),
    "mlp.shared_expert_gate": Slot("ffn_gate_inp_shexp", ("one", "hidden")),
}
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
        **NORMS, **INTERLEAVED, **_experts("block_sparse_moe", "w1", "w3", "w2", "ffn"),
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
