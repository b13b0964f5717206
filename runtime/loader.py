"""From a model folder to a module that runs: transformers' own, with packed linears in it.

The module is built with its parameters on meta and then filled from the shards (runtime/fill.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, GenerationConfig

from ..kernels.device import resolve_device
from ..kernels.errors import UserError
from ..quantize.checkpoint.kv_config import KVStorage, read_kv_storage
from ..quantize.checkpoint.load import Checkpoint
from .fill import Filler
from .head import pack_head
from .linear import LinearReport
from .models.families import takes_tape
from .placement import resolve_dtype


class LoadedModel(NamedTuple):
    """A model ready to run. tokenizer: None when the folder has none. kv: how its checkpoint says
    that the cache is quantized, None where it says nothing. warnings: what is odd about the
    checkpoint and was understood all the same. batch_invariant: its packed linears give a row the
    same bits in every batch."""

    model: Any
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    linears: list[LinearReport]
    kv: KVStorage | None
    warnings: list[str]
    batch_invariant: bool = False


def load(
    folder: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    linear_kernel: str | None = None,
    batch_invariant: bool = False,
    head_bits: int | None = None,
) -> LoadedModel:
    """Load an original or quantized model folder.

    linear_kernel: name of the kernel that all packed linears must run on. batch_invariant: take
    kernels, and forms of them, whose rows have the same bits in every batch. head_bits: see
    runtime/head.py. Raises UserError for
    folders that are no causal LM, missing or unexpected tensors, and choices that cannot run here.
    """
    checkpoint = Checkpoint(folder)
    resolved_device = resolve_device(device)
    config = checkpoint.transformers_config()
    stored = _stored_dtype(checkpoint, config)
    model = checkpoint.model_on_meta(config, stored)
    problems = list(Filler(checkpoint, model).problems(resolved_device))
    resolved_dtype = resolve_dtype(dtype, resolved_device, stored, problems, takes_tape(config))
    if resolved_dtype != stored:  # buffers may depend on it
        model = checkpoint.model_on_meta(config, resolved_dtype)
    linears = Filler(checkpoint, model, batch_invariant).fill(
        resolved_device, resolved_dtype, linear_kernel
    )
    if head_bits is not None:
        taped = resolved_device.type == "cpu" and takes_tape(config)
        linears.append(pack_head(model, head_bits, resolved_dtype, batch_invariant, taped))
    kv = read_kv_storage(checkpoint.config, checkpoint.shards)
    checkpoint.shards.close()
    tokenizer = load_tokenizer(checkpoint.folder)
    eos = _eos_token_ids(checkpoint.folder, config)
    return LoadedModel(
        model,
        tokenizer,
        eos,
        resolved_device,
        resolved_dtype,
        linears,
        kv,
        checkpoint.warnings,
        batch_invariant,
    )


def load_tokenizer(folder: Path) -> Any | None:
    """The folder's tokenizer, None when it has no tokenizer files."""
    if not any((folder / f).exists() for f in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as e:  # a damaged tokenizer.json makes the tokenizers library raise just that
        raise UserError(f"the tokenizer of {folder} cannot be loaded: {e}") from e


def _stored_dtype(checkpoint: Checkpoint, config: Any) -> torch.dtype:
    """The dtype of config.json, or that of the first floating-point tensor where it names none."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    infos = checkpoint.shards.info.values()
    return next((i.dtype for i in infos if i.dtype.is_floating_point), torch.float32)


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    """The end-of-sequence ids of generation_config.json, else those of config.json."""
    path = folder / "generation_config.json"
    if path.exists():
        try:
            generation = GenerationConfig.from_pretrained(folder)
        except (ValueError, TypeError, OSError) as e:
            raise UserError(f"{path} cannot be used: {e}") from e
    else:
        generation = GenerationConfig.from_model_config(config)
    eos = generation.eos_token_id
    ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(end, int) for end in ends):
        raise UserError(f"{folder}: eos_token_id must be a token id or a list of them, got {eos!r}")
    return frozenset(ends)
