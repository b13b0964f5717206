"""From a model folder to a module that runs: transformers' own, with packed linears in it.

The module is built with its parameters on meta; every tensor is then read from the shards, cast and
put in its place one at a time, so the dense model never exists twice, and a quantized linear never
exists dense at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ..kernels.errors import UserError
from ..kernels.linear_ops import LinearProblem
from ..kernels.meta import parameters_on_meta
from ..quantize.checkpoint.load import Checkpoint
from .linear import LinearReport, PackedLinear, linear_problem
from .placement import resolve_device, resolve_dtype

QUANTIZED_SUFFIXES = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight",
)  # fmt: skip
OUTDATED = re.compile(r"\.(rotary_emb\.inv_freq|attention\.bias|masked_bias)$")


class LoadedModel(NamedTuple):
    """A model ready to run. tokenizer: None when the folder has none."""

    model: Any
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    linears: list[LinearReport]


def load(
    folder: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    linear_kernel: str | None = None,
) -> LoadedModel:
    """Load an original or quantized model folder.

    linear_kernel: name of the kernel that all packed linears must run on. Raises UserError for
    folders that are no causal LM, missing or unexpected tensors, and choices that cannot run here.
    """
    checkpoint = Checkpoint(folder)
    resolved_device = resolve_device(device)
    config = load_config(checkpoint)
    stored = _stored_dtype(checkpoint, config)
    model = _build_on_meta(checkpoint, config, stored)
    problems = list(_problems(checkpoint, model, resolved_device))
    resolved_dtype = resolve_dtype(dtype, resolved_device, stored, problems)
    if resolved_dtype != stored:
        model = _build_on_meta(checkpoint, config, resolved_dtype)
    linears = _fill(checkpoint, model, resolved_device, resolved_dtype, linear_kernel)
    checkpoint.shards.close()
    tokenizer = load_tokenizer(checkpoint.folder)
    eos = _eos_token_ids(checkpoint.folder, config)
    return LoadedModel(model, tokenizer, eos, resolved_device, resolved_dtype, linears)


def load_config(checkpoint: Checkpoint) -> Any:
    """The model's transformers config without its quantization; UserError when it is unknown."""
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder)
    except (ValueError, KeyError, OSError, ImportError) as e:
        raise UserError(f"{checkpoint.folder}/config.json cannot be used: {e}") from e
    vars(config).pop("quantization_config", None)
    return config


def load_tokenizer(folder: Path) -> Any | None:
    """The folder's tokenizer, None when it has no tokenizer files."""
    if not any((folder / f).exists() for f in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (ValueError, KeyError, OSError, ImportError) as e:
        raise UserError(f"the tokenizer of {folder} cannot be loaded: {e}") from e


def _stored_dtype(checkpoint: Checkpoint, config: Any) -> torch.dtype:
    """The dtype of config.json, or that of the first floating-point tensor where it names none."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    infos = checkpoint.shards.info.values()
    return next((i.dtype for i in infos if i.dtype.is_floating_point), torch.float32)


def _build_on_meta(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> Any:
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{checkpoint.folder} is an encoder-decoder model ({config.model_type}); lowbit runs "
            "causal language models"
        )
    try:
        with parameters_on_meta():
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except ValueError as e:
        raise UserError(
            f"{checkpoint.folder} is not a causal language model that transformers knows "
            f"(model_type '{config.model_type}'): {e}"
        ) from e


def _problems(
    checkpoint: Checkpoint, model: nn.Module, device: torch.device
) -> Iterable[LinearProblem]:
    for module, scheme in checkpoint.schemes.items():
        if scheme.input_activations is not None:
            raise UserError(
                f"{module} quantizes its input activations, which is not run yet; use a checkpoint "
                "with quantized weights only (W4A16, W8A16, ...)"
            )
        linear = _linear(checkpoint, model, module)
        shape = (linear.out_features, linear.in_features)
        yield linear_problem(module, scheme.weights, shape, torch.float32, device)


def _linear(checkpoint: Checkpoint, model: nn.Module, module: str) -> nn.Linear:
    try:
        linear = model.get_submodule(module)
    except AttributeError as e:
        raise UserError(
            f"{checkpoint.folder} holds a quantized '{module}', which the model does not have"
        ) from e
    if not isinstance(linear, nn.Linear):
        raise UserError(f"'{module}' is quantized, but it is a {type(linear).__name__}, not linear")
    return linear


def _fill(
    checkpoint: Checkpoint,
    model: Any,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str | None,
) -> list[LinearReport]:
    """Put every tensor of the checkpoint into the model; the reports of its packed linears."""
    used: set[str] = set()
    reports = []
    for module in tqdm(checkpoint.schemes, desc="load linears", delay=2):
        linear = _linear(checkpoint, model, module)
        quantized = checkpoint.quantized(module, device)
        expected = (linear.out_features, linear.in_features)
        _check_shape(checkpoint, f"{module}.weight", tuple(quantized.codes.shape), expected)
        packed = PackedLinear(module, quantized, linear.bias, dtype, device, kernel)
        parent, _, leaf = module.rpartition(".")
        setattr(model.get_submodule(parent), leaf, packed)
        reports.append(packed.report)
        used.update(f"{module}.{suffix}" for suffix in QUANTIZED_SUFFIXES)
    used |= _fill_parameters(checkpoint, model, device, dtype)
    used |= _fill_buffers(checkpoint, model, device)
    _check_unexpected(checkpoint, model, used)
    return reports


def _fill_parameters(
    checkpoint: Checkpoint, model: Any, device: torch.device, dtype: torch.dtype
) -> set[str]:
    """Read every parameter; those that the model ties share one tensor. The names used."""
    tied: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(param), []).append(name)
    used = set()
    for names in tqdm(tied.values(), desc="load tensors", delay=2):
        found = {n: s for n in names if (s := _shard_name(checkpoint, model, n)) is not None}
        if not found:
            raise UserError(f"{checkpoint.folder} holds no tensor for the parameter '{names[0]}'")
        used.update(found.values())
        tensors = {n: checkpoint.shards.get(s) for n, s in found.items()}
        first = next(iter(tensors.values()))
        if all(torch.equal(t, first) for t in tensors.values()):
            tensors = dict.fromkeys(names, first)  # one tensor for all of them
        elif len(tensors) < len(names):
            raise UserError(f"{checkpoint.folder} ties {names}, but holds different {list(found)}")
        _assign(checkpoint, model, tensors, device, dtype)
    return used


def _assign(
    checkpoint: Checkpoint,
    model: Any,
    tensors: dict[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Make `tensors` the parameters of these names; names with the same tensor share one."""
    made: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        _check_shape(checkpoint, name, tuple(tensor.shape), tuple(getattr(owner, leaf).shape))
        if id(tensor) not in made:
            if not tensor.is_floating_point():
                raise UserError(f"'{name}' is stored as {tensor.dtype} with no scale beside it")
            value = tensor.to(device, dtype, copy=True)  # off the file map
            made[id(tensor)] = nn.Parameter(value, requires_grad=False)
        owner._parameters[leaf] = made[id(tensor)]


def _fill_buffers(checkpoint: Checkpoint, model: Any, device: torch.device) -> set[str]:
    """Move all buffers to the device and read those that the checkpoint holds. The names used."""
    used = set()
    persistent = set(model.state_dict().keys())
    for name, buffer in list(model.named_buffers()):
        parent, _, leaf = name.rpartition(".")
        stored = _shard_name(checkpoint, model, name) if name in persistent else None
        if stored is not None:
            used.add(stored)
            buffer = checkpoint.shards.get(stored).to(buffer.dtype, copy=True)
        model.get_submodule(parent)._buffers[leaf] = buffer.to(device)
    return used


def _shard_name(checkpoint: Checkpoint, model: Any, name: str) -> str | None:
    """The shards' name of a parameter: some checkpoints leave the base model's prefix out."""
    prefix = f"{model.base_model_prefix}."
    for candidate in (name, name.removeprefix(prefix), prefix + name):
        if candidate in checkpoint.shards:
            return candidate
    return None


def _check_shape(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    if shape != expected:
        raise UserError(
            f"'{name}' has shape {shape} in {checkpoint.folder}, but config.json asks for "
            f"{expected}"
        )


def _check_unexpected(checkpoint: Checkpoint, model: Any, used: set[str]) -> None:
    """UserError when the checkpoint holds tensors that the model has no place for."""
    ignored = [OUTDATED, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]
    unexpected = [
        name
        for name in checkpoint.shards.names()
        if name not in used and not any(pattern.search(name) for pattern in ignored)
    ]
    if unexpected:
        raise UserError(
            f"{checkpoint.folder} holds {len(unexpected)} tensors that its model "
            f"({type(model).__name__}) has no place for, first '{unexpected[0]}'"
        )


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    """The end-of-sequence ids of generation_config.json, else those of config.json."""
    if (folder / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(folder)
    else:
        generation = GenerationConfig.from_model_config(config)
    eos = generation.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])
