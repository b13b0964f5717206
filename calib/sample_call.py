"""What a model's decoder layers are called with, found without reading a weight.

For timing a layer before a run: the model's shapes, masks and positions are real, all numbers are
random.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..kernels.errors import UserError
from .model import LayeredModel, owner
from .recorder import LayerCall, Recorder, stand_ins

FILL = 1 << 20  # random numbers that a parameter is filled with over and over
SPREAD = 0.02  # their standard deviation: what untrained models begin with
BUILD_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)


@torch.inference_mode()
def sample_call(model: LayeredModel, rows: int, seq_len: int) -> dict[str, LayerCall]:
    """Layer name -> a call of random hidden states [rows, seq_len, hidden].

    The model's own weights are neither read nor changed. UserError, with the reason, where the base
    model does not take hidden states in place of token ids.
    """
    hidden = model.config.get_text_config().hidden_size
    embedded = _random(torch.empty(rows, seq_len, hidden, dtype=model.dtype, device=model.device))
    recorded: dict[str, LayerCall] = {}
    recorders = {n: Recorder(n, layer, recorded) for n, layer in model.layers.items()}
    base = model.model.base_model
    embedding = model.model.get_input_embeddings()
    with stand_ins(model.model, recorders), random_weights(base, model.device, embedding):
        try:
            base(inputs_embeds=embedded, use_cache=False)
        except BUILD_ERRORS as e:  # whatever a model's own code raises
            raise UserError(f"{type(base).__name__} runs on no hidden states alone: {e}") from e
    return recorded


def layer_kinds(model: LayeredModel) -> dict[str, list[str]]:
    """The first layer of each kind -> all layers of it. A kind: the same parameters and shapes."""
    kinds: dict[frozenset[tuple[str, torch.Size]], list[str]] = {}
    for name, layer in model.layers.items():
        kind = frozenset(
            (re.sub(r"\.\d+\.", ".N.", n), p.shape) for n, p in layer.named_parameters()
        )
        kinds.setdefault(kind, []).append(name)
    return {names[0]: names for names in kinds.values()}


@contextmanager
def random_weights(
    root: nn.Module, device: torch.device, leave: nn.Module | None = None
) -> Iterator[None]:
    """`root` with random numbers for its parameters on meta while the context is open; those of
    the module `leave` stay on meta."""
    left = set() if leave is None else set(leave.parameters())
    names = [n for n, p in root.named_parameters() if p.is_meta and p not in left]
    places = [owner(root, name) for name in names]
    empty = [module._parameters[leaf] for module, leaf in places]
    try:
        for (module, leaf), parameter in zip(places, empty, strict=True):
            assert parameter is not None
            value = _random(torch.empty_like(parameter, device=device))
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        yield
    finally:
        for (module, leaf), parameter in zip(places, empty, strict=True):
            module._parameters[leaf] = parameter


def _random(tensor: Tensor) -> Tensor:
    """`tensor` filled with normal numbers, which repeat where it is large."""
    flat = tensor.view(-1)
    draw = torch.Generator(tensor.device).manual_seed(0)
    count = min(FILL, flat.numel())
    piece = torch.randn(count, generator=draw, device=tensor.device).mul_(SPREAD).to(tensor.dtype)
    for part in flat.split(FILL):
        part.copy_(piece[: part.numel()])
    return tensor
