"""Stand-ins for a model's decoder layers that note what they are called with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..kernels.errors import UserError


class LayerCall(NamedTuple):
    """One batch's input to a decoder layer: hidden states [rows, seq, hidden] and keywords."""

    hidden: Tensor
    kwargs: dict[str, Any]


class Recorder(nn.Module):
    """Stands in for a decoder layer: notes what it was called with and hands its input through,
    or `output` where that is set."""

    def __init__(self, name: str, layer: nn.Module, recorded: dict[str, LayerCall]) -> None:
        super().__init__()
        self._name, self._recorded = name, recorded
        self._layer = [layer]  # in a list: not a submodule
        self.output: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._layer[0], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            raise UserError(
                f"{type(self._layer[0]).__name__} takes positional arguments beside the hidden "
                "states; lowbit cannot calibrate this model"
            )
        self._recorded[self._name] = LayerCall(hidden_states, kwargs)
        return hidden_states if self.output is None else self.output


@contextmanager
def stand_ins(model: Any, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """`modules` in the places that their names say while the context is open."""
    container = model.get_submodule(next(iter(modules)).rpartition(".")[0])
    originals = list(container)
    try:
        for i, module in enumerate(modules.values()):
            container[i] = module
        yield
    finally:
        for i, module in enumerate(originals):
            container[i] = module
