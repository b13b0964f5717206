"""The error of a block's output: what AWQ's search compares when it asks for more than linears."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..calib.layer_worker import InputGroup
from ..calib.model import LayerCall, forward_layer
from .folds import Fold
from .passes.settings import AWQSettings


class BlockLoss:
    """Mean squared error of a block's output with other weights in the place of a group's.

    The block is the module around linears that a norm feeds (attention for q/k/v, the MLP for
    gate/up), or the linear itself where a linear feeds it. Its inputs and its outputs on the first
    `loss_rows` calibration rows are kept, and it is run again batch by batch. The weights that it
    is called with replace the modules' and are put back.
    """

    def __init__(
        self,
        layer: nn.Module,
        group: InputGroup,
        calls: list[LayerCall],
        fold: Fold,
        settings: AWQSettings,
    ) -> None:
        self._linears = list(group.linears.values())
        self._block = self._linears[0] if fold.added is None else _around(layer, self._linears)
        self._inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._outputs: list[Tensor] = []

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._inputs.append((args, kwargs))
            self._outputs.append(_tensor(output))

        handle = self._block.register_forward_hook(keep, with_kwargs=True)
        rows = 0
        for call in calls:
            if rows >= settings.loss_rows:
                break
            forward_layer(layer, call)
            rows += len(call.hidden)
        handle.remove()

    def __call__(self, weights: list[Tensor]) -> float:
        """weights: float32 [out, in], in the group's order."""
        kept = [linear.weight.data for linear in self._linears]
        for linear, weight in zip(self._linears, weights, strict=True):
            linear.weight.data = weight.to(linear.weight.dtype)
        total, count = 0.0, 0
        for (args, kwargs), expected in zip(self._inputs, self._outputs, strict=True):
            difference = _tensor(self._block(*args, **kwargs)).float() - expected.float()
            total += float(difference.square().sum())
            count += difference.numel() // difference.shape[-1]
        for linear, weight in zip(self._linears, kept, strict=True):
            linear.weight.data = weight
        return total / max(1, count)


def _around(layer: nn.Module, linears: list[nn.Linear]) -> nn.Module:
    """The smallest module of the layer, or the layer, that holds all of `linears`."""
    wanted = set(linears)
    holders = [m for m in layer.modules() if m not in wanted and wanted <= set(m.modules())]
    return min(holders, key=lambda m: sum(1 for _ in m.modules()))


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
