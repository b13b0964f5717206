"""What is stored of the layer at work: its packed tensors and its report, and the values that the
layer computes with from then on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..calib.layer_worker import InputGroup
from ..calib.model import LayeredModel
from .activations import input_scale_of_peak
from .checkpoint.journal import Journal
from .checkpoint.kv_config import KVScales, scale_tensors
from .checkpoint.layouts import Layout
from .layer_weights import LayerWeights
from .linear_plan import Plan
from .quantized import Quantized


class LayerStore:
    """Takes the quantized linears of one layer after another and writes each layer to the journal.

    `weights`: of the layer at work, for passes to read and transforms to change. `report`: by
    linear, what its pass says of it. `transform_report`: what the transforms did. `kept`: by
    linear, what is stored, where the layer is to be quantized as a whole. `input_scales`: by
    linear quantized so far, the static scale of its input, None where its input has none; they
    outlive `write`, for the layer is run once more behind it.
    """

    def __init__(
        self,
        model: LayeredModel,
        plan: Plan,
        journal: Journal,
        layout: Layout,
        whole_layers: bool = False,
    ) -> None:
        self._model, self._plan, self._journal, self._layout = model, plan, journal, layout
        self._whole_layers = whole_layers
        self._clear()
        self.input_scales: dict[str, Tensor | None] = {}

    def _clear(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self.report: dict[str, dict[str, Any]] = {}
        self.transform_report: dict[str, Any] = {}
        self.kept: dict[str, Quantized] = {}

    def begin(self, layer_name: str, layer: nn.Module) -> None:
        self.weights = LayerWeights(self._model, layer_name, layer)
        self.input_scales = {}

    def stacked(self, members: list[str]) -> tuple[Tensor, list[int], torch.dtype]:
        """The members' float32 weights in one, their heights, and the dtype that scales take."""
        originals = [self.weights.get(f"{name}.weight") for name in members]
        dtype = self._layout.scale_dtype(self.weights.stored_dtype(f"{members[0]}.weight"))
        heights = [len(weight) for weight in originals]
        stacked = torch.cat(originals)
        del originals
        self._model.shards.close()  # pages of files that have been read count as resident memory
        return stacked, heights, dtype

    def keep(
        self, name: str, group: InputGroup, quantized: Quantized, report: dict[str, Any]
    ) -> None:
        """Note what is stored for the linear `name`, and put its values into the module."""
        stored_name = self.stored_name(name)
        scheme = self._plan.linears[name].scheme
        self._tensors |= self._layout.compress(stored_name, quantized, scheme)
        self.report[name] = report if group.routed is None else {
            **report, "routed_tokens": group.routed,
        }  # fmt: skip
        if self._whole_layers:
            self.kept[name] = quantized
        self.input_scales[name] = None
        activations = scheme.input_activations
        if activations is not None and "channel_range" in group.statistics:
            peak = group.statistics["channel_range"].peak.amax()
            scale = input_scale_of_peak(peak, activations, quantized.scale.dtype)
            if scale is not None:
                self.input_scales[name] = scale
                stored_scale = self._layout.compress_input_scale(stored_name, activations, scale)
                self._tensors |= stored_scale
        self.weights.put(f"{name}.weight", quantized.dequantize())

    def keep_cache_scales(self, name: str, scales: KVScales) -> None:
        """Note the scales of the keys and values that the attention `name` puts into the cache."""
        self._tensors |= scale_tensors(self._stored_module(name), scales, torch.float32)

    def write(self, layer_name: str, dropped: list[int]) -> None:
        """Write the layer, with what transforms changed beside its linears, to the journal.

        dropped: the calibration rows left out as non-finite up to here.
        """
        quantized = {f"{name}.weight" for name in self.report}
        for name, value in self.weights.changed.items():
            if name not in quantized:
                stored = self._model.tensor_name(name)
                self._tensors[stored] = value.to(self.weights.stored_dtype(name))
        report = {
            "linears": self.report,
            "transforms": self.transform_report,
            "dropped_rows": dropped,
        }
        self._journal.write(layer_name, self._tensors, report)
        self._clear()

    def finished(self, layer_name: str) -> bool:
        return self._journal.finished(layer_name)

    def restore(self, layer_name: str, layer: nn.Module) -> None:
        """Put what the journal has of a finished layer into it."""
        self.input_scales = {}
        stored = self._journal.load(layer_name)
        weights = LayerWeights(self._model, layer_name, layer)
        planned = self._plan.linears
        for name, module in layer.named_modules(prefix=layer_name):
            if isinstance(module, nn.Linear) and name in planned:
                scheme, stored_name = planned[name].scheme, self.stored_name(name)
                get = stored.__getitem__
                q = self._layout.decompress(stored_name, stored, get, scheme.weights)
                weights.put(f"{name}.weight", q.dequantize())
                activations = scheme.input_activations
                self.input_scales[name] = (
                    None
                    if activations is None
                    else self._layout.decompress_input_scale(stored_name, stored, get, activations)
                )
        for name, _ in layer.named_parameters(prefix=layer_name):
            if name.rpartition(".")[0] not in planned or not name.endswith(".weight"):
                changed = stored.get(self._model.tensor_name(name))
                if changed is not None:
                    weights.put(name, changed)

    def stored_name(self, name: str) -> str:
        """What the shards call the linear (some leave the base model's prefix out)."""
        return self._model.tensor_name(f"{name}.weight").removesuffix(".weight")

    def _stored_module(self, name: str) -> str:
        """What the shards call the module `name`, as they call its parameters."""
        inside = f"{name}."
        parameter = next(n for n, _ in self._model.model.named_parameters() if n.startswith(inside))
        return self._model.tensor_name(parameter).removesuffix(parameter.removeprefix(name))
