"""What the layer loop drives, and what it hands over: the nouns between calibration and passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from .model import LayerCall


class InputGroup(NamedTuple):
    """Linears (full name -> module) that read the same input, and that input's statistics (name in
    STATISTICS -> an instance of its class).

    routed: for the linears of an expert, how many tokens the model's router gives it.
    """

    linears: dict[str, nn.Linear]
    statistics: dict[str, Any]
    routed: int | None = None


class Wants(Protocol):
    """Who asks for statistics (`needs`: names of STATISTICS) of which linears' inputs."""

    @property
    def needs(self) -> frozenset[str]: ...

    def wants(self, name: str) -> bool: ...


class LayerTransform(Wants, Protocol):
    """A change of a layer's weights before they are quantized."""

    def apply(
        self,
        layer_name: str,
        layer: nn.Module,
        groups: list[InputGroup],
        calls: list[LayerCall],
    ) -> None:
        """Change the weights of the loaded layer, unquantized until then."""
        ...


class LayerWorker(Wants, Protocol):
    """What the loop drives; it `wants` the linears that are to be quantized.

    transforms: what changes a layer's weights before. whole_layers: layers go to `quantize_layer`
    instead of their input groups to `quantize`, together with what the float model puts out there.
    watches_layers: it looks at more of a layer's forward pass than the inputs of linears, while
    `quantized_inputs` is open, so that each layer must be run to its end.
    """

    transforms: Sequence[LayerTransform] = ()
    whole_layers: bool = False
    watches_layers: bool = False

    def begin(self, layer_name: str, layer: nn.Module) -> None:
        """Called with each loaded layer that is not finished, before all else."""

    def peers(self, names: list[str]) -> list[list[str]]:
        """`names` in the groups that `quantize` is to be given where no data shows which of them
        share an input."""
        return [[name] for name in names]

    def quantize(self, group: InputGroup) -> None:
        """Quantize the group's linears and put the values that are stored into their weights."""
        ...

    def quantize_layer(
        self,
        layer_name: str,
        layer: nn.Module,
        groups: list[InputGroup],
        calls: list[LayerCall],
        targets: list[Tensor],
    ) -> None:
        """Quantize all of the layer's wanted linears.

        targets: the layer's outputs in the float model, where no layer before is quantized.
        """
        raise AssertionError("called for workers of whole layers alone, which define it")

    def quantized_inputs(self, layer_name: str, layer: nn.Module) -> AbstractContextManager[None]:
        """While open, a linear that is quantized rounds its input where its scheme says so."""
        return nullcontext()

    def finish(self, layer_name: str, dropped: list[int]) -> None:
        """Called when all linears of a layer are quantized: store them.

        dropped: the calibration rows left out as non-finite up to here.
        """
        ...

    def restore(self, layer_name: str, layer: nn.Module) -> bool:
        """Put the stored weights of a finished layer into it; False: it is not finished."""
        ...
