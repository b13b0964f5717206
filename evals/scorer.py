"""Models as scorers: token ids in, logits out, by transformers' own forward pass.

The reference architecture runs, not our runtime, so a measured difference is quantization's alone.
A quantized checkpoint of a layout that lowbit reads gets its weights dequantized by our reader (the
definition in kernels/affine.py) and the inputs of its linears fake-quantized where the checkpoint
asks for that (kernels/activations.py), and needs no other package; every other one goes through
transformers' loader for it. A GGUF file's inputs can be rounded as llama.cpp rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..calib.expert_shards import fuse_experts
from ..calib.experts import split_experts, split_modules
from ..calib.meta_model import build_on_meta, load_config
from ..calib.shards import Shards
from ..kernels.errors import UserError
from ..kernels.float32_linears import float32_linears
from ..kernels.names import names_in_model
from ..quantize.activations import activation_format, fake_quantize_input
from ..quantize.checkpoint.ct_config import quantizes_outputs
from ..quantize.checkpoint.kv_config import KVStorage, read_kv_storage, scale_names
from ..quantize.checkpoint.layouts import find_layout
from ..quantize.checkpoint.load import Checkpoint, read_config
from ..quantize.spec import QuantSpec
from ..runtime.kv_formats import resolve_kv
from .kv_fake import FakeQuantizedKV
from .llamacpp_inputs import InputHook, llamacpp_inputs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INPUTS = ("exact", "llama.cpp")


class TransformersScorer:
    """Token ids int64 [1, T] to logits [T, V] of a transformers causal LM.

    kv: how the cache is quantized that attention reads from; None: there is no cache.
    rounds_inputs: its linears' inputs are quantized, and then what the last bit of a product is
    decides codes: they are computed as torch computes them for everybody.
    """

    def __init__(
        self, model: Any, kv: KVStorage | None = None, rounds_inputs: bool = False
    ) -> None:
        self.model, self.kv = model, kv
        self._linears = nullcontext if rounds_inputs else float32_linears
        self._fake = None if kv is None else FakeQuantizedKV(model, kv)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        ids = ids.to(self.model.device)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if int(ids.max()) >= vocabulary:
            raise UserError(
                f"the tokenizer gives id {int(ids.max())}, but the model has {vocabulary} "
                "embeddings: the tokenizer is another model's"
            )
        arguments = {"use_cache": False} if self._fake is None else self._fake.arguments()
        with self._linears():
            return self.model(input_ids=ids, **arguments).logits[0]


def load_scorer(
    folder: str | Path,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    kv: str = "auto",
    inputs: str = "exact",
) -> TransformersScorer:
    """The model of a folder, ready to be measured.

    `dtype`: of weights and computation; "auto" is float32 on a CPU, else the model's own. `kv`: a
    format of the KV cache by name, "auto" for what the checkpoint says, "model" for none.
    `inputs`: "llama.cpp" rounds what a GGUF file's matrices read as llama.cpp does, see
    llamacpp_inputs.py. Raises UserError when the folder is no causal LM, is damaged, or needs a
    package that is missing.
    """
    folder, device = Path(folder), torch.device(device)
    torch_dtype = measuring_dtype(dtype, device, folder)
    if inputs not in INPUTS:
        raise UserError(f"inputs must be one of {', '.join(INPUTS)}, got '{inputs}'")
    rounds_inputs = False
    if inputs != INPUTS[0]:
        model, rounds_inputs = _load_dequantized(folder, torch_dtype, llamacpp_inputs(folder))
    elif is_computed_here(folder):
        model, rounds_inputs = _load_dequantized(folder, torch_dtype, {})
    else:
        model = _load_by_transformers(folder, torch_dtype)
    model = model.to(device).eval()
    stored = resolve_kv(kv, _stored_kv(folder), model.config)
    return TransformersScorer(model, stored, rounds_inputs)


def _stored_kv(folder: Path) -> KVStorage | None:
    shards = Shards(folder)
    try:
        return read_kv_storage(read_config(folder), shards)
    finally:
        shards.close()


def measuring_dtype(name: str, device: torch.device, folder: Path) -> torch.dtype:
    """The torch dtype that `name` means for the model in `folder` on `device`."""
    if name != "auto":
        if name not in DTYPES:
            raise UserError(f"dtype must be auto or one of {', '.join(DTYPES)}, got '{name}'")
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return getattr(load_config(folder), "dtype", None) or torch.float32


def context_limit(folder: str | Path) -> int | None:
    """How many positions the model of a folder takes; None where its config names no limit."""
    return getattr(load_config(Path(folder)).get_text_config(), "max_position_embeddings", None)


def is_computed_here(folder: Path) -> bool:
    """Whether all that is quantized in it is computed by our own definitions."""
    quantization = read_config(folder).get("quantization_config") or {}
    if find_layout(quantization) is None or quantizes_outputs(quantization):
        return False
    for scheme in set(Checkpoint(folder).schemes.values()):
        try:
            if scheme.input_activations is not None:
                activation_format(scheme.input_activations)
        except UserError:
            return False
    return True


def _load_dequantized(
    folder: Path, dtype: torch.dtype, hooks: Mapping[str, InputHook]
) -> tuple[Any, bool]:
    """The model, and whether linears of it see rounded inputs: those that `hooks`, by the module's
    name in the checkpoint, round, and those whose scheme asks for it."""
    checkpoint = Checkpoint(folder)
    config = checkpoint.transformers_config()
    weights = {
        name: checkpoint.shards.get(name)
        for name in checkpoint.shards.names()
        if name.rpartition(".")[0] not in checkpoint.schemes or name.endswith(".bias")
    }
    for name in scale_names(weights):  # the cache's
        del weights[name]
    for module in checkpoint.schemes:
        weights[f"{module}.weight"] = checkpoint.dense_weight(module, dtype)
    model = build_on_meta(folder, config, dtype)
    split_experts(model)
    fused = fuse_experts(model, weights)
    loaded = _complete(
        folder,
        lambda: type(model).from_pretrained(
            None, config=config, state_dict=fused, dtype=dtype, output_loading_info=True
        ),
    )
    quantizers = {
        module: _input_quantizer(scheme.input_activations, checkpoint.input_scale(module))
        for module, scheme in checkpoint.schemes.items()
        if scheme.input_activations is not None
    }
    return loaded, _round_inputs(loaded, {**quantizers, **hooks}, weights)


def _round_inputs(
    model: Any, hooks: Mapping[str, InputHook], weights: Mapping[str, Tensor]
) -> bool:
    """Let the linears of `model` that have one of `hooks` see rounded inputs; whether any does.

    weights: stored name -> value. Experts are taken apart, so that each of their linears is one.
    """
    if not hooks:
        return False
    split_experts(model)
    stored = {name: stored for stored, name in names_in_model(model, weights).items()}
    for path, experts in split_modules(model).items():
        for name, parameter in list(experts.named_parameters(prefix=path)):
            module, _, leaf = name.rpartition(".")
            value = weights[stored[name]].to(parameter.dtype)
            setattr(model.get_submodule(module), leaf, nn.Parameter(value, requires_grad=False))
    names = names_in_model(model, [f"{module}.weight" for module in hooks])
    for module, hook in hooks.items():
        linear = model.get_submodule(names[f"{module}.weight"].removesuffix(".weight"))
        linear.register_forward_pre_hook(hook)
    return True


def _input_quantizer(spec: QuantSpec, scale: Tensor | None) -> InputHook:
    """A forward pre-hook that puts in place of the input what its quantized form is worth."""

    def quantize(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = inputs
        given = None if scale is None else scale.to(x.device)
        return fake_quantize_input(x, spec, given), *others

    return quantize


def _load_by_transformers(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.auto import AutoHfQuantizer

    Shards(folder).close()  # finds absent, pickled and truncated files
    quantization = read_config(folder).get("quantization_config")
    if not quantization:
        build_on_meta(folder, load_config(folder), dtype)  # finds what is no causal LM
    elif not AutoHfQuantizer.supports_quant_method(quantization):  # it would load codes as weights
        method = quantization.get("quant_method")
        raise UserError(f"{folder} is quantized with '{method}', which transformers does not read")
    config = load_config(folder)
    if quantization:
        config.quantization_config.pop("kv_cache_scheme", None)  # the scorer quantizes the cache
    return _complete(
        folder,
        lambda: AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True, use_safetensors=True
        ),
    )


def _complete(folder: Path, load: Callable[[], Any]) -> Any:
    """The model that `load` gives with its loading info; UserError when weights are missing."""
    try:
        model, info = load()
    except (ImportError, ValueError, TypeError, OSError, RuntimeError) as e:
        reason = " ".join(str(e).split())[:400]
        raise UserError(f"transformers cannot load {folder}: {reason}") from e
    absent = sorted(info["missing_keys"])
    if absent:
        raise UserError(
            f"{folder} lacks {len(absent)} of the model's weights, first '{absent[0]}'; it would "
            "be measured with random ones"
        )
    return model
