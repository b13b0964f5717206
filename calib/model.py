"""A Hugging Face causal LM held one decoder layer at a time.

The model is built with its parameters on the meta device; a layer's weights are read from the
safetensors shards when it is loaded and dropped when it is released, so the memory that calibration
needs does not grow with depth. Nothing is traced: what a layer is called with is recorded by
running the base model once with recorders in place of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.errors import UserError
from ..kernels.finite import all_finite
from ..kernels.names import names_in_model
from .causal_attention import use_causal_blocks
from .expert_shards import by_expert
from .experts import check_experts_are_split, split_experts
from .meta_model import build_on_meta, load_config
from .recorder import LayerCall, Recorder, stand_ins
from .shards import Shards, TensorSource

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def forward_layer(layer: nn.Module, call: LayerCall) -> Tensor:
    """Hidden states [rows, seq, hidden] after the layer."""
    out = layer(call.hidden, **call.kwargs)
    return out[0] if isinstance(out, tuple) else out


class LayeredModel:
    """`layers`: name -> decoder layer, in order; weights on meta unless loaded. `head`: the name of
    the output linear, None where it shares the embedding's weight.

    source, config: tensors and config in place of the folder's own (a rotated model's). Experts are
    split into linears (calib/experts.py), and `shards` has a tensor for each.

    Raises UserError when the folder is no causal LM that transformers knows, when its decoder
    layers cannot be found or hold experts that cannot be split, or (on loading) when a tensor is
    missing or has another shape.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        source: TensorSource | None = None,
        config: Any = None,
    ) -> None:
        self.folder, self.dtype, self.device = Path(folder), dtype, torch.device(device)
        tensors = Shards(self.folder) if source is None else source
        self.config = load_config(self.folder) if config is None else config
        self.model = build_on_meta(self.folder, self.config, dtype)
        split_experts(self.model)
        check_experts_are_split(self.model)
        if dtype == torch.bfloat16 and self.device.type == "cpu":
            use_causal_blocks(self.model)
        self.shards = by_expert(self.model, tensors)
        self.layers = find_decoder_layers(self.model)
        self.head = _untied_head(self.model)
        in_model = names_in_model(self.model, self.shards.names())
        self._stored_names = {parameter: stored for stored, parameter in in_model.items()}

    def check_shards(self) -> None:
        """UserError when a parameter of the base model has no tensor or one that does not fit."""
        prefix = self._base_prefix()
        for name, param in self.model.base_model.named_parameters():
            self._check_shape(prefix + name, param.shape)

    @torch.inference_mode()
    def layer_calls(self, rows: Tensor, batch_size: int) -> list[dict[str, LayerCall]]:
        """What every layer is called with, for each batch of token rows int64 [rows, seq].

        The hidden states are those that enter the first layer, the same object for all: the
        caller replaces them layer by layer.
        """
        recorded: dict[str, LayerCall] = {}
        recorders = {n: Recorder(n, layer, recorded) for n, layer in self.layers.items()}
        calls = []
        with self._outside_loaded(), stand_ins(self.model, recorders):
            for batch in rows.split(batch_size):
                self._run_base(batch.to(self.device))
                calls.append(dict(recorded))
        return calls

    @torch.inference_mode()
    def head_inputs(self, rows: Tensor, states: list[Tensor]) -> Iterator[Tensor]:
        """What the output linear reads, batch by batch: `states`, the hidden states [rows, seq,
        hidden] after the last decoder layer, through what the base model does to them."""
        yield from self._after_layers(rows, states, self._run_base)

    def logits(self, rows: Tensor, states: list[Tensor]) -> Iterator[Tensor]:
        """The model's logits [rows, seq, vocabulary], batch by batch, from the same hidden states;
        gradients flow back to those that require them."""
        run = lambda ids: self.model(input_ids=ids, use_cache=False).logits  # noqa: E731
        yield from self._after_layers(rows, states, run, self._head_loaded())

    def _after_layers(
        self,
        rows: Tensor,
        states: list[Tensor],
        run: Callable[[Tensor], Tensor],
        head: AbstractContextManager[None] | None = None,
    ) -> Iterator[Tensor]:
        recorded: dict[str, LayerCall] = {}
        players = {n: Recorder(n, layer, recorded) for n, layer in self.layers.items()}
        last = next(reversed(players.values()))
        with self._outside_loaded(), stand_ins(self.model, players), head or nullcontext():
            for batch, last.output in zip(rows.split(len(states[0])), states, strict=True):
                yield run(batch.to(self.device))

    def _run_base(self, rows: Tensor) -> Tensor:
        output = self.model.base_model(input_ids=rows, use_cache=False)
        return output.last_hidden_state

    @contextmanager
    def _outside_loaded(self) -> Iterator[None]:
        """The base model's parameters outside its decoder layers, loaded and then released."""
        outside = [n for n, _ in self.model.base_model.named_parameters()]
        prefix = self._base_prefix()
        inside = tuple(f"{name}." for name in self.layers)
        names = [prefix + n for n in outside if not (prefix + n).startswith(inside)]
        self._fill(self.model, {n: n for n in names})
        try:
            yield
        finally:
            self._empty(self.model, names)

    @contextmanager
    def _head_loaded(self) -> Iterator[None]:
        """The output linear's weight, its own or the loaded embedding's, and then released."""
        if self.head is not None:
            with self.loaded(self.head):
                yield
            return
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UserError(f"{type(self.model).__name__} has no linear output head")
        empty, head.weight = head.weight, self.model.get_input_embeddings().weight
        try:
            yield
        finally:
            head.weight = empty

    @contextmanager
    def loaded(self, name: str) -> Iterator[nn.Module]:
        """The decoder layer (or head) `name`, weights on the device; released on leaving."""
        layer = self.model.get_submodule(name)
        params = [n for n, _ in layer.named_parameters()]
        self._fill(layer, {n: f"{name}.{n}" for n in params})
        self._fill_buffers(name, layer)
        try:
            yield layer
        finally:
            self._empty(layer, params)

    def tensor_name(self, parameter: str) -> str:
        """The shards' name of a parameter: checkpoints may keep an older name of the module, or
        leave the base model's prefix out."""
        if parameter not in self._stored_names:
            raise UserError(
                f"{self.folder} holds no tensor for '{parameter}', which config.json asks for; "
                "download the model again"
            )
        return self._stored_names[parameter]

    def _base_prefix(self) -> str:
        for name, module in self.model.named_modules():
            if module is self.model.base_model:
                return f"{name}." if name else ""
        raise AssertionError("a model contains its base model")

    def _check_shape(self, name: str, shape: torch.Size) -> None:
        stored = self.shards.info[self.tensor_name(name)]
        if stored.shape != tuple(shape):
            raise UserError(
                f"'{name}' has shape {stored.shape} in {self.folder}, but config.json asks for "
                f"{tuple(shape)}"
            )
        if stored.dtype not in FLOATS:
            raise UserError(
                f"'{name}' is stored as {stored.dtype} in {self.folder}, so the model is quantized "
                "already; give the original one"
            )

    def _fill(self, root: nn.Module, names: dict[str, str]) -> None:
        """Give each parameter of `root` (key) the shards' tensor (value), cast to the dtype."""
        for inner, name in names.items():
            module, leaf = owner(root, inner)
            param = module._parameters[leaf]
            assert param is not None
            self._check_shape(name, param.shape)
            tensor = self.shards.get(self.tensor_name(name))
            if not all_finite(tensor):
                raise UserError(f"'{name}' holds NaN or infinite values; download the model again")
            value = tensor.to(self.device, self.dtype)
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)

    def _fill_buffers(self, name: str, layer: nn.Module) -> None:
        """Move the layer's buffers to the device, and read those that the shards hold (a router's
        correction of its scores), which keep their dtype."""
        layer.to(self.device)
        for inner, buffer in layer.named_buffers():
            stored = self._stored_names.get(f"{name}.{inner}")
            if stored is not None and inner in layer.state_dict():
                buffer.copy_(self.shards.get(stored))

    def _empty(self, root: nn.Module, names: list[str]) -> None:
        for inner in names:
            module, leaf = owner(root, inner)
            param = module._parameters[leaf]
            assert param is not None
            module._parameters[leaf] = nn.Parameter(param.to("meta"), requires_grad=False)
        self.shards.close()


def owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the parameter `name` below `root`, and its name there."""
    parent, _, leaf = name.rpartition(".")
    return root.get_submodule(parent), leaf


def find_decoder_layers(model: Any) -> dict[str, nn.Module]:
    """Name -> decoder layer: the outermost nn.ModuleList that has as many members as the model
    has layers and holds linears."""
    candidates = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == model.config.get_text_config().num_hidden_layers
        and any(isinstance(m, nn.Linear) for m in module.modules())
    ]
    if not candidates:
        raise UserError(
            f"{type(model).__name__} has no list of its "
            f"{model.config.get_text_config().num_hidden_layers} decoder layers that holds "
            "nn.Linear modules, the only ones that lowbit quantizes; choose another model"
        )
    name, layers = min(candidates, key=lambda c: c[0].count("."))
    return {f"{name}.{i}": layer for i, layer in enumerate(layers)}


def _untied_head(model: Any) -> str | None:
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or head.weight is embedding.weight:
        return None
    return next(name for name, module in model.named_modules() if module is head)
