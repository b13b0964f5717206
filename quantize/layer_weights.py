"""The weights of the layer that is loaded: float32 masters to read and to change."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..calib.model import LayeredModel, owner


class LayerWeights:
    """The parameters of one loaded layer (or of the output head) by their names in the model.

    `changed`: name -> float32 value of those that were set.
    """

    def __init__(self, model: LayeredModel, name: str, layer: nn.Module) -> None:
        self._model, self._name, self._layer = model, name, layer
        self.changed: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor:
        """The parameter in float32, whatever the dtype of the forward passes. Not to be changed."""
        if name in self.changed:
            return self.changed[name]
        return self._model.shards.get(self._model.tensor_name(name), self._model.device).float()

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype that the checkpoint has it in."""
        return self._model.shards.info[self._model.tensor_name(name)].dtype

    def set(self, name: str, value: Tensor) -> None:
        """Make `value` the parameter: the master as it is, the module's own cast."""
        self.changed[name] = value.float()
        self.put(name, value)

    def put(self, name: str, value: Tensor) -> None:
        """Make `value` the module's parameter and leave the master as it is."""
        module, leaf = owner(self._layer, name.removeprefix(f"{self._name}."))
        parameter = module._parameters[leaf]
        assert parameter is not None and parameter.shape == value.shape, (name, value.shape)
        parameter.data = value.to(parameter.device, parameter.dtype)
