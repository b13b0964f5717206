"""One decoder for the Llama-like families, over blocks of keys and values.

All tokens of a step, of whatever requests, are rows of one matrix [tokens, hidden]: only attention
knows whose they are. The weights are those of Hugging Face's modules, packed or dense, wherever a
loader has put them; linears that read one input become one product (Projection), residuals are
added where the next norm reads them, and rotary embedding, head norms and the store of keys and
values are one op.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.attention_ops import AttentionOptions, PagedBatch
from ...kernels.errors import UserError
from ...kernels.kv_store_ops import HeadNorm, NewTokens, StoreOptions, kv_store
from ...kernels.norm_ops import Gate, gated_mul, rms_norm
from ...kernels.paged_kv import BlockPool
from ...kernels.plain_linear import COMPILED
from ...kernels.rotary import Rotary
from ..attending import attend_blocks
from ..linear import has_own_threads
from .families import FAMILIES, Family, decline_decoder
from .projection import Linear, PlainLinear, Projection, in_place, output_head
from .taped import TapedLayers, decline_layers, takes_batches

GATES: dict[str, Gate] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


class KVPools(NamedTuple):
    """One layer's keys and values."""

    keys: BlockPool
    values: BlockPool


class Norm(NamedTuple):
    """weight: [n], as it multiplies."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: nn.Module, offset: float) -> Norm:
        eps: Any = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
        weight: Any = module.weight
        return cls(weight if offset == 0 else weight.float() + offset, float(eps))

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps).out


class GatedMlp(NamedTuple):
    """down(act(gate(x)) * up(x))."""

    gate_up: Projection
    gate: Gate
    down: Linear


class Decoder:
    """A loaded transformers model of a family in FAMILIES, as the engine runs it.

    model: transformers' module, whose linears may be packed; those of floats become views or parts
    of what runs here. max_len: positions that the rotary tables hold. batch_invariant: of the
    linears of floats; packed ones are what they were made to be. windows: the sliding windows
    of its layers (None: all keys are seen), which are the kinds of layers; kinds: of each layer its
    number there. compiled: on a CPU, take its layers as one compiled tape (taped.py) where they can
    be. UserError, with the reason, for what `decline_decoder` declines.
    """

    def __init__(
        self, model: Any, max_len: int, batch_invariant: bool = False, compiled: bool = True
    ) -> None:
        config = model.config
        if reason := decline_decoder(config):
            raise UserError(f"the decoder {reason}")
        self._own_threads = has_own_threads(model)
        family, base = FAMILIES[config.model_type], model.model
        self._embed = base.embed_tokens
        self._embed_scale = _embedding_scale(base.embed_tokens, config, family)
        ropes = _rotary_tables(base.rotary_emb, config, max_len, self._embed.weight.device)
        self.layers = [
            DecoderLayer(layer, config, family, ropes[_kind(config, index)], batch_invariant)
            for index, layer in enumerate(base.layers)
        ]
        self.windows = tuple(dict.fromkeys(layer.sliding_window for layer in self.layers))
        self.kinds = [self.windows.index(layer.sliding_window) for layer in self.layers]
        self._norm = Norm.of(base.norm, family.norm_offset)
        self._head = output_head(model, batch_invariant)
        head = self._head
        self._wide_head = isinstance(head, PlainLinear) and head.kernel is COMPILED
        self._logits_scale = 1 / getattr(config, "logits_scaling", 1.0)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._compiled = compiled
        self._tape: tuple[Sequence[KVPools], TapedLayers | None] | None = None

    def __call__(
        self,
        token_ids: Tensor,
        pools: Sequence[KVPools],
        batches: Sequence[PagedBatch],
        new: Sequence[NewTokens],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [rows, hidden] behind the last norm, of the tokens `rows` (int64; all where
        None). token_ids: int64 [tokens]. The pools, one a layer, are written to; batches, new: one
        for each of `windows`."""
        stream = self._embed(token_ids)
        if self._embed_scale is not None:
            stream = stream * self._embed_scale
        tape = self._tape_over(pools) if self._compiled and takes_batches(batches) else None
        if tape is not None:
            dtype = stream.dtype
            stream = tape(stream.float() if dtype != torch.float32 else stream, batches, new)
            stream = stream if rows is None else stream[rows]
            hidden = _norm_of_sum(stream, None, self._norm)[0]
            return hidden if self._wide_head else hidden.to(dtype)
        update: Tensor | None = None
        for layer, kind, pool in zip(self.layers, self.kinds, pools, strict=True):
            stream, update = layer(stream, update, pool, batches[kind], new[kind])
        if rows is not None:
            stream, update = stream[rows], None if update is None else update[rows]
        return _norm_of_sum(stream, update, self._norm)[0]

    @torch.inference_mode()
    def prepare(self, pools: Sequence[KVPools]) -> None:
        """Compile what steps over `pools` need, so that no request waits for it."""
        if self._compiled and self._tape_over(pools) is not None:
            weight = self._embed.weight
            self.logits(torch.zeros(1, weight.shape[1], dtype=weight.dtype))

    def threads(self, pools: Sequence[KVPools]) -> AbstractContextManager[None]:
        """In which its steps over `pools` are best run, with what surrounds them: torch is left one
        thread where a team runs the layers, or linears of them, whose cores its spinning ones would
        take."""
        taped = self._compiled and self._tape_over(pools) is not None
        if not taped and not self._own_threads:
            return nullcontext()
        from ...kernels.tape.team import alone

        return alone()

    def _tape_over(self, pools: Sequence[KVPools]) -> TapedLayers | None:
        """The layers' tape, made when these pools are met first; None where there is none."""
        if self._tape is None or self._tape[0] is not pools:
            declined = decline_layers(self.layers, pools)
            tape = None if declined else TapedLayers(self.layers, self.kinds, pools)
            self._tape = pools, tape
        return self._tape[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] of hidden states [rows, hidden]."""
        logits = self._head(hidden)
        if self._logits_scale != 1:
            logits = logits * self._logits_scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


class DecoderLayer:
    """Attention and MLP on the residual stream. kv_heads, head_dim: of what its pools hold."""

    def __init__(
        self, layer: Any, config: Any, family: Family, rotary: Rotary, batch_invariant: bool
    ) -> None:
        attention = layer.self_attn
        self.head_dim: int = attention.head_dim
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        apart = ("q_proj", "k_proj", "v_proj")
        self.qkv = Projection.in_module(attention, "qkv_proj", apart, batch_invariant)
        self.out = in_place(attention, "o_proj", batch_invariant)
        self.wide_norms, head_norm = _query_key_norms(attention, family, self.head_dim)
        self.store = StoreOptions(rotary, head_norm, rotate_queries=True)
        self.attend = AttentionOptions(
            scale=attention.scaling,
            sliding_window=getattr(
                attention, "sliding_window", getattr(config, "sliding_window", None)
            ),
            softcap=getattr(config, "attn_logit_softcapping", None),
            rotated_queries=True,
            wants_lse=False,
        )
        self.sliding_window = self.attend.sliding_window
        self.mlp = _mlp(layer.mlp, config, batch_invariant)
        self._experts: Any = None if self.mlp else layer.mlp
        self.norms = [
            None if name is None else Norm.of(getattr(layer, name), family.norm_offset)
            for name in family[:4]
        ]
        self.multiplier = getattr(config, "residual_multiplier", 1.0)

    def __call__(
        self,
        stream: Tensor,
        update: Tensor | None,
        pools: KVPools,
        batch: PagedBatch,
        new: NewTokens,
    ) -> tuple[Tensor, Tensor | None]:
        """The stream [tokens, hidden] before this layer's last update, and that update, None where
        the stream has it already. update: the one of the layer before."""
        attention_norm, attention_out, mlp_norm, mlp_out = self.norms
        x, stream = _norm_of_sum(stream, update, attention_norm)
        x = self._attention(x, pools, batch, new)
        stream, update = self._onto(stream, x, self.out, attention_out)
        x, stream = _norm_of_sum(stream, update, mlp_norm)
        if self.mlp is None:
            return self._onto(stream, x, self._mixture, mlp_out)
        return self._onto(
            stream, gated_mul(self.mlp.gate_up(x), self.mlp.gate), self.mlp.down, mlp_out
        )

    def _mixture(self, x: Tensor) -> Tensor:
        return self._experts(x.unsqueeze(0)).squeeze(0)

    def _attention(self, x: Tensor, pools: KVPools, batch: PagedBatch, new: NewTokens) -> Tensor:
        q, k, v = self.qkv.parts(x, (self.heads, self.kv_heads, self.kv_heads), self.head_dim)
        if self.wide_norms is not None:
            q, k = (
                norm(y.flatten(1)).view_as(y)
                for norm, y in zip(self.wide_norms, (q, k), strict=True)
            )
        q = kv_store(q, k, v, pools.keys, pools.values, new, self.store)
        return attend_blocks(q, pools.keys, pools.values, batch, self.attend).flatten(1)

    def _onto(
        self, stream: Tensor, x: Tensor, linear: Linear, norm: Norm | None
    ) -> tuple[Tensor, Tensor | None]:
        """The stream and its update linear(x); the sum and None where the linear adds them."""
        if norm is None and self.multiplier == 1 and isinstance(linear, PlainLinear):
            whole = linear.onto(stream, x)
            if whole is not None:
                return whole, None
        update = linear(x)
        if norm is not None:
            update = norm(update)
        return stream, update if self.multiplier == 1 else update * self.multiplier


def _norm_of_sum(stream: Tensor, update: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """The norm (None: none) of stream + update, and that sum."""
    if norm is None:
        stream = stream if update is None else stream + update
        return stream, stream
    if update is None:
        return norm(stream), stream
    return rms_norm(update, norm.weight, norm.eps, stream)


def _mlp(module: Any, config: Any, batch_invariant: bool) -> GatedMlp | None:
    """A dense MLP; None for a mixture of experts, which its own module runs."""
    if hasattr(module, "experts"):
        return None
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in GATES:
        raise UserError(f"the decoder has no activation '{name}' (known: {', '.join(GATES)})")
    apart = ("gate_proj", "up_proj")
    gate_up = Projection.in_module(module, "gate_up_proj", apart, batch_invariant)
    return GatedMlp(gate_up, GATES[name], in_place(module, "down_proj", batch_invariant))


def _query_key_norms(
    attention: Any, family: Family, head_dim: int
) -> tuple[tuple[Norm, Norm] | None, HeadNorm | None]:
    """Norms of queries and keys over all heads (OLMo 2), or over each (Qwen 3, Gemma 3)."""
    if not hasattr(attention, "q_norm"):
        return None, None
    q, k = (Norm.of(n, family.norm_offset) for n in (attention.q_norm, attention.k_norm))
    if len(q.weight) == head_dim:
        return None, HeadNorm(q.weight, k.weight, q.eps)
    return (q, k), None


def _embedding_scale(module: Any, config: Any, family: Family) -> float | None:
    """What embeddings are multiplied with after their module, in its dtype."""
    if family.scaled_embedding:
        if hasattr(module, "embed_scale"):
            return None  # the module does it
        return float(torch.tensor(config.hidden_size**0.5, dtype=module.weight.dtype))
    multiplier = getattr(config, "embedding_multiplier", 1.0)
    return None if multiplier == 1 else multiplier


def _kind(config: Any, index: int) -> str | None:
    """What tells the rotary embeddings of layers apart; None where there is one for all."""
    by_kind = any(isinstance(p, dict) for p in (config.rope_parameters or {}).values())
    return config.layer_types[index] if by_kind else None


def _rotary_tables(
    module: Any, config: Any, max_len: int, device: torch.device
) -> dict[str | None, Rotary]:
    """For each kind of layer the cosines and sines of its own rotary module, in float32."""
    positions = torch.arange(max_len, device=device)[None]
    like = torch.empty(1, dtype=torch.float32, device=device)
    tables: dict[str | None, Rotary] = {}
    for kind in {_kind(config, index) for index in range(config.num_hidden_layers)}:
        cos, sin = module(like, positions, *([] if kind is None else [kind]))
        half = cos.shape[-1] // 2
        tables[kind] = Rotary(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
    return tables
