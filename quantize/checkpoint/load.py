"""Read a checkpoint folder: which modules are quantized, how, and their tensors.

One reader serves original models (nothing is quantized) and checkpoints of every layout in
layouts/, so that the runtime, the evals and the exporters need no case for any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...calib.safe_files import read_json_object
from ...calib.shards import Shards, TensorSource
from ...kernels.errors import UserError
from ..quantized import Quantized
from ..spec import LayerScheme
from .layouts import Layout, find_layout, layout_of


class Checkpoint:
    """A model folder opened for reading.

    `config`: config.json as a dict. `layout`: how quantized linears are stored, None where none
    are. `schemes`: name -> LayerScheme of every quantized linear. `warnings`: what is odd about the
    checkpoint and was understood all the same. An FP8 checkpoint of no layout here is the model
    that it stands for, see quantize/fp8_source.py.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self.shards: TensorSource = self._tensors()
        self.layout: Layout | None = None
        self.schemes: dict[str, LayerScheme] = {}
        self.warnings: list[str] = []
        quantization = self.config.get("quantization_config")
        if quantization is not None:
            self._open_layout(quantization)

    def quantized(self, module: str, device: str | torch.device = "cpu") -> Quantized:
        """Codes, scale and zero-point of the quantized linear `module`, unpacked."""
        assert self.layout is not None, module
        spec = self.schemes[module].weights
        get = lambda n: self.shards.get(n, device)  # noqa: E731
        return self.layout.decompress(module, self.shards, get, spec)

    def input_scale(self, module: str, device: str | torch.device = "cpu") -> Tensor | None:
        """The stored scale [1] of the inputs of `module`; None where none is stored."""
        spec = self.schemes[module].input_activations
        if spec is None:
            return None
        assert self.layout is not None, module
        get = lambda n: self.shards.get(n, device)  # noqa: E731
        return self.layout.decompress_input_scale(module, self.shards, get, spec)

    def shape(self, module: str) -> tuple[int, int]:
        """[out, in] of the weight of the quantized linear `module`; its codes are not read."""
        assert self.layout is not None, module
        return self.layout.shape(module, self.schemes[module].weights, self.shards)

    def stored_names(self, module: str) -> list[str]:
        """Names of the tensors that stand for the quantized linear `module`, its bias left out."""
        assert self.layout is not None, module
        leaves = sorted(self.layout.leaves)
        return [n for n in (f"{module}.{leaf}" for leaf in leaves) if n in self.shards]

    def dense_weight(
        self, module: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> Tensor:
        """The weight of `module` [out, in]: dequantized when quantized, as stored otherwise."""
        if module in self.schemes:
            q = self.quantized(module, device)
            return q.dequantize(dtype)
        return self.shards.get(f"{module}.weight", device).to(dtype)

    def transformers_config(self) -> Any:
        """The model's transformers config, without its quantization; UserError when unknown."""
        from ...calib.meta_model import load_config  # slow: transformers

        config = load_config(self.folder)
        vars(config).pop("quantization_config", None)
        return config

    def model_on_meta(self, config: Any, dtype: torch.dtype) -> Any:
        """The causal LM of `config`, its parameters on meta; UserError when it is none.

        Its experts are split into linears (calib/experts.py), and `shards` has a tensor for each
        from then on, whichever way the checkpoint holds them.
        """
        from ...calib.expert_shards import by_expert
        from ...calib.experts import split_experts
        from ...calib.meta_model import build_on_meta

        model = build_on_meta(self.folder, config, dtype)
        split_experts(model)
        self.shards = by_expert(model, self.shards)
        return model

    def _tensors(self) -> TensorSource:
        quantization = self.config.get("quantization_config") or {}
        if quantization.get("quant_method") != "fp8" or find_layout(quantization) is not None:
            return Shards(self.folder)
        from ..fp8_source import FP8Source  # slow: transformers

        source = FP8Source(self.folder)
        del self.config["quantization_config"]
        return source

    def _open_layout(self, quantization: dict[str, Any]) -> None:
        try:
            layout = layout_of(quantization)
        except UserError as e:
            raise UserError(f"{self.folder} is {e}") from e
        self.schemes = layout.schemes(quantization, self.shards)
        self.layout, warning = layout.relabelled(self.schemes, self.shards)
        self.warnings = [] if warning is None else [f"{self.folder}: {warning}"]


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; UserError when it is missing or not JSON."""
    if not Path(folder).is_dir():
        what = "a file, not a model folder" if Path(folder).exists() else "no such model folder"
        raise UserError(f"{what}: {folder}")
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    config = read_json_object(path)
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise UserError(f"{path}: quantization_config must be an object, got {quantization!r}")
    return config
