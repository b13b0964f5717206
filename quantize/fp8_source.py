"""FP8 checkpoints as the models that they stand for: dequantized as they are read.

Many models are published in 8-bit floats alone. Two layouts are read. Hugging Face's fine-grained
FP8 (quant_method "fp8"): weight float8_e4m3fn [out, in], weight_scale_inv [ceil(out/m), ceil(in/n)]
for blocks of m x n or one number for the whole weight, a factor in spite of its name.
compressed-tensors' float-quantized: weight float8_e4m3fn, weight_scale. A weight times its scale is
rounded once to the dtype that config.json names; of the 8 bits of a bfloat16's significand FP8 has
4, so what is lost is far below what storing in FP8 had cost before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..calib.meta_model import load_config
from ..calib.model import LayeredModel
from ..calib.shards import Shards, TensorInfo, TensorSource
from ..kernels.affine import dequantize_affine
from ..kernels.errors import UserError
from .checkpoint.ct_config import scheme_for_module, schemes_from_config
from .checkpoint.load import read_config
from .spec import Block, QuantSpec, TensorWise

READABLE = (
    "Hugging Face's fine-grained FP8 (quant_method \"fp8\"), compressed-tensors' float-quantized"
)
CT_FORMATS = ("float-quantized", "naive-quantized")
SCALES = ("weight_scale_inv", "weight_scale")
DROPPED = (*SCALES, "input_scale", "activation_scale", "q_scale", "k_scale", "v_scale")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def open_source(folder: Path) -> Shards | FP8Source:
    """The tensors of a model folder, those of an FP8 checkpoint dequantized."""
    config = read_config(folder)
    return FP8Source(folder) if is_fp8(config.get("quantization_config")) else Shards(folder)


def open_model(folder: Path, dtype: torch.dtype, device: str | torch.device) -> LayeredModel:
    """The model in `folder`, layer by layer, an FP8 checkpoint as the model that it stands for."""
    source = open_source(folder)
    config = load_config(folder)
    if isinstance(source, FP8Source):
        vars(config).pop("quantization_config", None)
    return LayeredModel(folder, dtype, device, source, config)


def is_fp8(quantization: dict[str, Any] | None) -> bool:
    """Whether a `quantization_config` is of a layout that is dequantized as it is read."""
    match (quantization or {}).get("quant_method"):
        case "fp8":
            return True
        case "compressed-tensors":
            assert quantization is not None
            groups = quantization.get("config_groups") or {}
            formats = {g.get("format") or quantization.get("format") for g in groups.values()}
            return bool(formats) and formats <= set(CT_FORMATS)
    return False


class RowSource(TensorSource, Protocol):
    """Tensors that rows can be read from."""

    def get_rows(self, name: str, start: int, stop: int) -> Tensor: ...


class FP8Source:
    """The tensors of an FP8 checkpoint as `calib.shards.Shards` hands out a model's.

    `info` has the dequantized weights' dtype and shape; scales have no name. `scales`: weight ->
    its scale. Raises UserError as Shards does, for an FP8 weight without a scale, and when a scale
    does not fit its weight.
    """

    def __init__(self, folder: Path, stored: RowSource | None = None) -> None:
        """stored: the tensors as they are, where they are open already."""
        self.folder = Path(folder)
        self._stored: RowSource = Shards(self.folder) if stored is None else stored
        config = read_config(self.folder)
        dtype = model_dtype(config)
        info = self._stored.info
        self.scales = {
            f"{module}.weight": name
            for name in info
            for module, _, leaf in [name.rpartition(".")]
            if leaf in SCALES
        }
        bare = [n for n, i in info.items() if _is_fp8(i.dtype) and n not in self.scales]
        odd = [n for n in self.scales if n not in info or not _is_fp8(info[n].dtype)]
        odd += [n for n in self.scales if n in info and len(info[n].shape) != 2]
        if bare or odd:
            raise UserError(
                f"{self.folder}: '{(bare or odd)[0]}' is no FP8 matrix beside its scale, which "
                "config.json promises; download the model again"
            )
        self._specs = _specs([w.removesuffix(".weight") for w in self.scales], config, folder)
        self.info: dict[str, TensorInfo] = {
            name: i._replace(dtype=dtype) if name in self.scales else i
            for name, i in info.items()
            if name.rpartition(".")[2] not in DROPPED
        }

    def names(self) -> list[str]:
        return list(self.info)

    def __contains__(self, name: str) -> bool:
        return name in self.info

    def get(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """The tensor `name`, in the dtype that `info` names."""
        if name not in self.scales:
            return self._stored.get(name, device)
        return self._dequantized(name, 0, self.info[name].shape[0], device)

    def get_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Entries `start` to `stop` of the first axis of the tensor `name`."""
        if name not in self.scales:
            return self._stored.get_rows(name, start, stop)
        return self._dequantized(name, start, min(stop, self.info[name].shape[0]), "cpu")

    def close(self) -> None:
        self._stored.close()

    def check_scale(self, name: str) -> None:
        """UserError where the scale of the weight `name` is not one of finite numbers for it."""
        self._scale(name, "cpu")

    def _dequantized(self, name: str, start: int, stop: int, device: str | torch.device) -> Tensor:
        spec, scale = self._specs[name], self._scale(name, device)
        tall = spec.block[0] if spec.block else 1
        first = start // tall * tall  # a block's scale counts from its first row
        if len(scale) > 1:
            scale = scale[first // tall : -(-stop // tall)]
        codes = self._stored.get_rows(name, first, stop).to(device)
        values = dequantize_affine(codes, scale, None, self.info[name].dtype, spec.block)
        return values[start - first :]

    def _scale(self, name: str, device: str | torch.device) -> Tensor:
        rows, columns = self.info[name].shape
        spec = self._specs[name]
        scale = self._stored.get(self.scales[name], device).float()
        expected = spec.scale_shape(rows, columns)
        if isinstance(spec.granularity, TensorWise) and scale.numel() == 1:
            scale = scale.reshape(1, 1)
        if tuple(scale.shape) != expected or not torch.isfinite(scale).all():
            raise UserError(
                f"{self.folder}: '{self.scales[name]}' has shape {tuple(scale.shape)}, expected "
                f"{expected} finite numbers; download the model again"
            )
        return scale


def _is_fp8(dtype: torch.dtype) -> bool:
    return dtype == torch.float8_e4m3fn


def model_dtype(config: dict[str, Any]) -> torch.dtype:
    """What a model's weights were before; bfloat16 where config.json does not say."""
    for part in (config, config.get("text_config") or {}):
        named = part.get("dtype") or part.get("torch_dtype")
        if isinstance(named, str) and named.removeprefix("torch.") in DTYPES:
            return DTYPES[named.removeprefix("torch.")]
    return torch.bfloat16


def _specs(modules: list[str], config: dict[str, Any], folder: Path) -> dict[str, QuantSpec]:
    """Weight name -> how it is stored, by the config."""
    quantization = config["quantization_config"]
    if quantization["quant_method"] == "fp8":
        size = quantization.get("weight_block_size", (128, 128))
        if size and not (isinstance(size, list | tuple) and len(size) == 2):
            raise UserError(
                f"{folder}: weight_block_size must be null or two numbers, got {size!r}"
            )
        spec = QuantSpec(8, "float", Block(*size) if size else TensorWise())
        return {f"{module}.weight": spec for module in modules}
    groups = schemes_from_config(quantization, folder)
    specs = {}
    for module in modules:
        scheme = scheme_for_module(module, groups)
        if scheme is None or (scheme.weights.type, scheme.weights.num_bits) != ("float", 8):
            raise UserError(
                f"{folder}: '{module}' is stored in FP8, but no config_group of config.json says so"
            )
        specs[f"{module}.weight"] = scheme.weights
    return specs
