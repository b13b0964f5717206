"""Write a GGUF file from a Hugging Face folder or a quantized checkpoint of any layout.

The header needs every tensor's type and size, which follow from the config; then the tensors are
read, turned into blocks and written one at a time, so memory is that of the largest tensor. A
quantized layer whose codes fit the block type is repacked without rounding again.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ...kernels.errors import UserError
from ..checkpoint.load import Checkpoint
from ..quantized import Quantized
from . import hparams, vocab
from .codecs import BF16, F16, F32, Codec
from .hf_vocab import read_vocab
from .hparams import Hyperparameters
from .mix import CODECS, FILE_TYPES, check_file_type, choose_codec
from .names import ROPE_FREQS, interleave, rotated_heads, to_gguf
from .repack import can_repack, repack
from .writer import Planned, replacing, start_file

HALF_MAX = 65504.0  # largest float16, the type of values or scales
IGNORED = (  # buffers, and scales of activations and caches: llama.cpp has its own for these
    ".inv_freq", ".input_scale", ".input_global_scale", ".input_zero_point", ".q_scale",
    ".k_scale", ".v_scale",
)  # fmt: skip


class TypeTotal(NamedTuple):
    """What a file holds of one block type."""

    tensors: int
    weights: int
    nbytes: int


class ExportReport(NamedTuple):
    """What was written.

    `totals`: block type -> TypeTotal. `repacked`: quantized layers carried over without a second
    rounding; `rounded_again`: those that were not. `fallbacks`: GGUF name -> why its type is not
    the file's. `bits_per_weight` counts scales, not the file's header. `warnings`: what is odd
    about the checkpoint and was understood all the same.
    """

    path: Path
    file_type: str
    pre: str
    nbytes: int
    weights: int
    bits_per_weight: float
    totals: dict[str, TypeTotal]
    repacked: list[str]
    rounded_again: list[str]
    fallbacks: dict[str, str]
    warnings: list[str]


class Entry(NamedTuple):
    """A tensor of the file and the module it comes from; `part`: "weight" or "bias"."""

    planned: Planned
    module: str
    part: str


def export_gguf(
    model: str | Path,
    out: Path,
    file_type: str,
    *,
    pre: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> ExportReport:
    """Write `out` from the model folder `model` in `file_type` (a key of mix.FILE_TYPES).

    `pre` overrules llama.cpp's name for the pre-tokenizer. Raises UserError when the architecture,
    a tensor or the tokenizer has no counterpart in llama.cpp's `llama`, when weights are not
    finite, and when `out` exists without `overwrite`.
    """
    file_type = check_file_type(file_type)
    checkpoint = Checkpoint(Path(model))
    h = hparams.from_config(checkpoint.config)
    tokenizer = read_vocab(checkpoint.folder, checkpoint.config, pre)
    entries = plan(checkpoint, h, file_type)
    divisors = h.rope_divisors()
    extra = [Planned(ROPE_FREQS, tuple(divisors.shape), F32)] if divisors is not None else []
    planned = extra + [e.planned for e in entries]
    keys = {
        "general.type": "model",
        "general.name": model_name(checkpoint.folder),
        "general.quantized_by": "lowbit",
        **hparams.to_keys(h),
        "general.file_type": FILE_TYPES[file_type],
        "general.quantization_version": 2,
        **vocab.to_keys(tokenizer),
    }
    repacked, rounded_again = [], []
    total = sum(p.nbytes for p in planned)
    with replacing(Path(out), overwrite) as temporary:
        writer = start_file(temporary, "llama", keys, planned)
        try:
            if divisors is not None:
                writer.write_tensor_data(divisors.numpy())
            with tqdm(
                total=total, unit="B", unit_scale=True, desc=file_type, disable=not progress
            ) as bar:
                for entry in entries:
                    blocks, exact = encode(checkpoint, h, entry)
                    checkpoint.shards.close()
                    writer.write_tensor_data(blocks.numpy())
                    if exact is not None:
                        (repacked if exact else rounded_again).append(entry.module)
                    bar.update(entry.planned.nbytes)
        finally:
            writer.close()
    weights = sum(e.planned.weights for e in entries)
    return ExportReport(
        path=Path(out),
        file_type=file_type,
        pre=tokenizer.pre,
        nbytes=Path(out).stat().st_size,
        weights=weights,
        bits_per_weight=8 * total / weights,
        totals=_totals(planned),
        repacked=repacked,
        rounded_again=rounded_again,
        fallbacks=_fallbacks(planned, file_type),
        warnings=checkpoint.warnings,
    )


def model_name(folder: Path) -> str:
    """The folder's name, or the model's where the folder is a snapshot in the Hub's cache."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name


def plan(checkpoint: Checkpoint, h: Hyperparameters, file_type: str) -> list[Entry]:
    """Every tensor of the file in order; UserError for missing or unknown tensors."""
    shards, entries, used = checkpoint.shards, [], set()
    for module, shape in h.shapes().items():
        name = to_gguf(module)
        assert name is not None, module
        codec = choose_codec(f"{name}.weight", shape, file_type, h.tie_word_embeddings)
        if module in checkpoint.schemes:
            base = CODECS[file_type]
            if can_repack(checkpoint.schemes[module].weights, shape[-1], base):
                codec = base
        elif f"{module}.weight" not in shards:
            raise UserError(f"{checkpoint.folder} holds no tensor '{module}.weight'")
        entries.append(Entry(Planned(f"{name}.weight", shape, codec), module, "weight"))
        if f"{module}.bias" in shards:
            entries.append(Entry(Planned(f"{name}.bias", shape[:1], F32), module, "bias"))
        used.add(module)
    codes = {n for module in checkpoint.schemes for n in checkpoint.stored_names(module)}
    for tensor in shards.names():
        module, _, part = tensor.rpartition(".")
        placed = module in used and (part in ("weight", "bias") or tensor in codes)
        tied_copy = h.tie_word_embeddings and module == "lm_head"
        if not (placed or tied_copy or tensor.endswith(IGNORED)):
            raise UserError(f"tensor '{tensor}' has no place in llama.cpp's llama architecture")
    return entries


def encode(checkpoint: Checkpoint, h: Hyperparameters, entry: Entry) -> tuple[Tensor, bool | None]:
    """The bytes of a tensor, and for a quantized layer whether its codes were kept."""
    module, codec = entry.module, entry.planned.codec
    heads = rotated_heads(module, h.num_attention_heads, h.num_key_value_heads)

    def place(rows: Tensor) -> Tensor:
        return rows if heads is None else interleave(rows, heads)

    if entry.part == "weight" and module in checkpoint.schemes:
        q = checkpoint.quantized(module)
        _check_shape(q.codes, entry)
        if q.spec.type != "int" or q.spec.block is not None or q.g_idx is not None:
            # no block type holds such codes
            return _encode_dense(place(q.dequantize()), entry), False
        rows = q.codes.shape[0]
        zero = q.zero_point
        q = Quantized(
            place(q.codes),
            place(q.scale.expand(rows, -1)),
            None if zero is None else place(zero.expand(rows, -1)),
            q.spec,
        )
        if (blocks := repack(q, codec)) is not None:
            return blocks, True
        return _encode_dense(q.dequantize(), entry), False
    x = checkpoint.shards.get(f"{module}.{entry.part}").to(torch.float32)
    _check_shape(x, entry)
    return _encode_dense(place(x), entry), None


def _encode_dense(x: Tensor, entry: Entry) -> Tensor:
    """Float values to blocks; UserError for values that the type cannot hold."""
    planned = entry.planned
    largest = x.abs().max().item()
    if not largest < float("inf"):
        raise UserError(f"tensor '{entry.module}.{entry.part}' holds NaN or infinite values")
    if largest > HALF_MAX and planned.codec not in (F32, BF16):
        raise UserError(
            f"tensor '{entry.module}.{entry.part}' reaches {largest:.3g}, beyond float16's "
            f"{HALF_MAX:g} that {planned.codec.name} relies on; export as BF16"
        )
    return planned.codec.encode(x.reshape(-1, planned.shape[-1]))


def _check_shape(x: Tensor, entry: Entry) -> None:
    if tuple(x.shape) != entry.planned.shape:
        raise UserError(
            f"tensor '{entry.module}.{entry.part}' has shape {tuple(x.shape)}, config.json means "
            f"{entry.planned.shape}"
        )


def _totals(planned: list[Planned]) -> dict[str, TypeTotal]:
    totals: dict[str, TypeTotal] = {}
    for p in planned:
        old = totals.get(p.codec.name, TypeTotal(0, 0, 0))
        totals[p.codec.name] = TypeTotal(
            old.tensors + 1, old.weights + p.weights, old.nbytes + p.nbytes
        )
    return totals


def _fallbacks(planned: list[Planned], file_type: str) -> dict[str, str]:
    """The matrices whose columns do not fill the blocks wanted for them."""
    base: type[Codec] = CODECS[file_type]
    return {
        p.name: f"{p.shape[-1]} columns are no multiple of {base.block}: kept as F16"
        for p in planned
        if len(p.shape) > 1 and p.codec is F16 and base.block > 1
    }
