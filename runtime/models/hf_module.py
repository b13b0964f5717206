"""Any causal LM of transformers over blocks of keys and values, by its own module.

All tokens of a step are one row of input ids with their positions; only attention knows whose they
are. A module that calls transformers' AttentionInterface gets ours there for the length of a step,
one that calls torch's attention has that call answered. Both store the new keys and values in the
layer's blocks and attend over them. What the module asks of attention (heads, windows, softcaps) is
seen in a pass over one token. Before a model is run this way, a few tokens are, in chunks, and held
against what the module computes without us: a module that does anything else with positions, masks
or state than is expected here is declined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from ...kernels.attention_ops import AttentionOptions, PagedBatch
from ...kernels.errors import UserError
from ...kernels.kv_store_ops import NewTokens, StoreOptions, kv_store
from ...kernels.paged_kv import new_pool
from ..attending import attend_blocks
from ..step_inputs import step_inputs
from .decoder import KVPools
from .families import FIXED_ROPES, rope_types

NAME = "lowbit_paged"
CALLS = "_lowbit_calls"
CALLS_TORCH = {"falcon"}  # models whose own code calls torch's attention
CHUNKS = (3, 1, 2)  # of a model's trial
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the trial's logits; else:
TOLERANCE_16_BIT = 0.1


class ModuleLayer(NamedTuple):
    """What a layer's attention is called with."""

    kv_heads: int
    head_dim: int
    value_dim: int
    sliding_window: int | None


class ModuleDecoder:
    """A causal LM of transformers as the engine runs it; see `Decoder`, whose face this is.

    UserError where the module calls attention otherwise than once a layer.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._base = model, model.get_decoder()
        self._calls = _Calls.of(model)
        seen = _Seen()
        ids = torch.zeros(1, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
        with torch.inference_mode():
            self._output_type = type(self._run(ids, ids, seen))
        self.layers = seen.in_order(model.config.get_text_config().num_hidden_layers)
        self.windows = tuple(dict.fromkeys(layer.sliding_window for layer in self.layers))
        self.kinds = [self.windows.index(layer.sliding_window) for layer in self.layers]

    def __call__(
        self,
        token_ids: Tensor,
        pools: Sequence[KVPools],
        batches: Sequence[PagedBatch],
        new: Sequence[NewTokens],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [rows, hidden] before the output head, as `Decoder`'s."""
        paged = _Paged(pools, [batches[k] for k in self.kinds], [new[k] for k in self.kinds])
        hidden = self._run(token_ids, new[0].positions, paged).last_hidden_state[0]
        return hidden if rows is None else hidden[rows]

    def prepare(self, pools: Sequence[KVPools]) -> None:
        """Nothing to compile."""

    def threads(self, pools: Sequence[KVPools]) -> AbstractContextManager[None]:
        """As `Decoder`'s: its module's ops are torch's."""
        return nullcontext()

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary]: the model's own way from hidden states [rows, hidden] on."""
        given = self._output_type(last_hidden_state=hidden[None])
        self._base.forward = lambda *args, **kwargs: given  # hides the class's
        try:
            return self._model(input_ids=hidden.new_zeros(1, 1, dtype=torch.int64)).logits[0]
        finally:
            del self._base.forward

    def _run(self, token_ids: Tensor, positions: Tensor, attention: _Attention) -> Any:
        with self._calls.answered_by(attention, self._model.config):
            return self._base(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False
            )


_Attention = Callable[[int, Tensor, Tensor, Tensor, AttentionOptions], Tensor]
"""(layer, q [tokens, heads, head_dim], k, v [tokens, kv_heads, ...], options) -> as q, of v's."""


class _Paged:
    """Attention of one step: over each layer's pools, batch and new tokens."""

    def __init__(
        self, pools: Sequence[KVPools], batches: Sequence[PagedBatch], new: Sequence[NewTokens]
    ) -> None:
        self._pools, self._batches, self._new = pools, batches, new

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        keys, values = self._pools[layer]
        stored = StoreOptions(rotate_queries=True)
        q = kv_store(q, k, v, keys, values, self._new[layer], stored)
        return attend_blocks(q, keys, values, self._batches[layer], options)


class _Seen:
    """Attention of one token, whose only key is its own, and what it was asked for."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, ModuleLayer]] = []

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        window = options.sliding_window
        self.layers.append((layer, ModuleLayer(k.shape[1], k.shape[2], v.shape[2], window)))
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def in_order(self, expected: int) -> list[ModuleLayer]:
        numbers = [number for number, _ in self.layers]
        if sorted(numbers) != list(range(expected)):
            raise UserError(
                f"the model's {expected} layers called attention as {numbers}, not once each"
            )
        return [layer for _, layer in sorted(self.layers, key=lambda pair: pair[0])]


class _Calls(TorchFunctionMode):
    """Takes a module's calls of attention to who answers them."""

    def __init__(self) -> None:
        super().__init__()
        self._layer = -1
        self._attention: _Attention | None = None

    @classmethod
    def of(cls, model: Any) -> _Calls:
        """Those of a model, which are made once."""
        if not hasattr(model, CALLS):
            calls = cls()
            setattr(model, CALLS, calls)
            for module in model.modules():
                if isinstance(getattr(module, "layer_idx", None), int):
                    module.register_forward_pre_hook(calls._enter)
                    setattr(module, CALLS, calls)  # where `_interface` finds them
        return getattr(model, CALLS)

    @contextmanager
    def answered_by(self, attention: _Attention, config: Any) -> Iterator[None]:
        """Within: `attention` answers. config: of the model, by which it finds its attention."""
        assert self._attention is None, "a step within a step"
        of_its_own = config._attn_implementation
        self._attention = attention
        try:
            if config.model_type in CALLS_TORCH:
                with self:
                    yield
            else:
                AttentionInterface.register(NAME, _interface)
                config._attn_implementation = NAME  # without a mask of that name none is made
                yield
        finally:
            self._attention, config._attn_implementation = None, of_its_own

    def _enter(self, module: Any, args: Any) -> None:
        self._layer = module.layer_idx

    def answer(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """q, k, v [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]."""
        assert self._attention is not None
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self._attention(self._layer, q, k, v, options)[None]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args[:3]
        scale = kwargs.get("scale") or query.shape[-1] ** -0.5
        options = AttentionOptions(scale, rotated_queries=True, wants_lse=False)
        return self.answer(query, key, value, options).transpose(1, 2)


def _interface(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions."""
    options = AttentionOptions(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
        None if s_aux is None else s_aux.float(),
        rotated_queries=True,
        wants_lse=False,
    )
    calls: _Calls = getattr(module, CALLS)
    return calls.answer(query, key, value, options), None


def decline_module(model: Any) -> str | None:
    """None, or why a loaded causal LM cannot run by its own module over blocks."""
    config, reason = model.config.get_text_config(), None
    takes = inspect.signature(model.get_decoder().forward).parameters
    changing = rope_types(config) - FIXED_ROPES
    if not _keeps_keys_and_values_alone(config):
        reason = "keeps state beside keys and values: a recurrence's or a convolution's"
    elif getattr(config, "alibi", False) or "position_ids" not in takes:
        reason = "has positions in its mask (ALiBi)"
    elif config.model_type not in CALLS_TORCH and not model._can_set_attn_implementation():
        reason = "computes attention itself, not by transformers' AttentionInterface"
    elif changing:
        reason = f"has rotary embeddings that change with the length ({', '.join(changing)})"
    return reason or _trial(model)


def _keeps_keys_and_values_alone(config: Any) -> bool:
    from ..kv_cache import batchable

    return batchable(config)


@torch.inference_mode()
def _trial(model: Any) -> str | None:
    """None, or why a few tokens in chunks over blocks are not what the module makes of them."""
    try:
        decoder = ModuleDecoder(model)
    except UserError as e:
        return str(e)
    if any(layer.head_dim != layer.value_dim for layer in decoder.layers):
        return "has values of another size than keys"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if "sliding_attention" in kinds and decoder.windows == (None,):
        return "does not tell its attention of its sliding windows"
    head = model.get_input_embeddings().weight
    ids = torch.arange(sum(CHUNKS), device=head.device) % len(head)
    pools = [
        KVPools(
            *(new_pool(2, x.kv_heads, 8, x.head_dim, None, head.dtype, head.device) for _ in "kv")
        )
        for x in decoder.layers
    ]
    got, start = [], 0
    for n in CHUNKS:
        at, many = list(range(start, start + n)), len(decoder.windows)
        step = step_inputs(
            ids[start : start + n].tolist(), at, [[8 + i for i in at]] * many, [n], [start + n],
            [[[1]]] * many, head.device,
        )  # fmt: skip
        got.append(decoder.logits(decoder(step.token_ids, pools, step.batches, step.new)))
        start += n
    want = model(input_ids=ids[None], use_cache=False).logits[0].float()
    error = (torch.cat(got).float() - want).norm() / want.norm()
    if not bool(error <= TOLERANCE.get(head.dtype, TOLERANCE_16_BIT)):
        return f"gives other logits over blocks than by itself (by {float(error):.1e})"
    return None
