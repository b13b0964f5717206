"""From a model folder to a module that runs: transformers' own, with packed linears in it.

The module is built with its parameters on meta and then filled from the shards (runtime/fill.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ..kernels.errors import UserError
from ..kernels.meta import parameters_on_meta
from ..quantize.checkpoint.load import Checkpoint
from .fill import Filler
from .linear import LinearReport
from .placement import resolve_device, resolve_dtype


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
    problems = list(Filler(checkpoint, model).problems(resolved_device))
    resolved_dtype = resolve_dtype(dtype, resolved_device, stored, problems)
    if resolved_dtype != stored:  # buffers may depend on it
        model = _build_on_meta(checkpoint, config, resolved_dtype)
    linears = Filler(checkpoint, model).fill(resolved_device, resolved_dtype, linear_kernel)
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
