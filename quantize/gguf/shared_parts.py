"""The settings and tensors that several architectures share, from which each makes its choice."""

from __future__ import annotations

from .architecture import Setting, Slot

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


def experts(block: str, gate: str, up: str, down: str, inner: str) -> dict[str, Slot]:
    """A router and the experts' linears, `block` being what the module of both is called."""
    return {
        f"{block}.gate": Slot("ffn_gate_inp", ("experts", "hidden")),
        f"{block}.experts.E.{gate}": Slot("ffn_gate_exps", (inner, "hidden"), expert=True),
        f"{block}.experts.E.{up}": Slot("ffn_up_exps", (inner, "hidden"), expert=True),
        f"{block}.experts.E.{down}": Slot("ffn_down_exps", ("hidden", inner), expert=True),
    }


QWEN_EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj", "expert_ffn")
SHARED_EXPERT = {
    "mlp.shared_expert.gate_proj": Slot("ffn_gate_shexp", ("shared_ffn", "hidden")),
    "mlp.shared_expert.up_proj": Slot("ffn_up_shexp", ("shared_ffn", "hidden")),
    "mlp.shared_expert.down_proj": Slot("ffn_down_shexp", ("hidden", "shared_ffn")),
    "mlp.shared_expert_gate": Slot("ffn_gate_inp_shexp", ("one", "hidden")),
}
