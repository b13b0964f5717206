"""Turn a GGUF file into a Hugging Face folder.

Tensors are dequantized one at a time straight into one safetensors file: its header is known before
any data is, so memory is that of the largest tensor. The folder appears under its name only when it
is whole.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ...kernels.errors import UserError
from ..checkpoint.files import fsync_path
from ..checkpoint.workspace import workspace
from . import hparams, rope, vocab
from .hf_tokenizer import token_ids, write_json, write_tokenizer
from .hparams import Hyperparameters
from .names import Target, targets
from .reader import GGUFFile

DTYPES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


def gguf_to_hf(
    gguf_path: str | Path,
    out_dir: Path,
    *,
    dtype: torch.dtype | None = torch.float16,
    extra: Mapping[str, str] | None = None,
    progress: bool = True,
) -> Path:
    """Write config, weights in `dtype`, tokenizer and generation config to `out_dir`; returns it.

    dtype: None for the narrowest that holds each tensor's values as they are, which is float32 for
    block types; then config.json names the widest of the matrices'. extra: further files, name ->
    text.

    Raises UserError for an architecture or a tokenizer that is not known, missing or unexpected
    tensors, values beyond `dtype`, and when `out_dir` exists.
    """
    out_dir = Path(out_dir)
    if out_dir.exists():
        raise UserError(f"{out_dir} exists; give another name")
    file = GGUFFile(gguf_path)
    h = read_hyperparameters(file)
    tensors = tensor_table(file, h)
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        # of this process alone: two that make the same folder do not wait for each other
        with workspace(out_dir.with_name(f"{out_dir.name}.{os.getpid()}")) as work:
            folder = work / "made"
            folder.mkdir()
            dtypes = {name: dtype or exact_dtype(file, place) for name, place in tensors.items()}
            _write_side_files(folder, file, h, tensors, dtypes)
            for name, text in (extra or {}).items():
                (folder / name).write_text(text, encoding="utf-8")
            bar = tqdm(tensors.items(), desc="dequantizing", unit="tensor", disable=not progress)
            values = ((n, read_tensor(file, n, place, dtypes[n])) for n, place in bar)
            header = {n: Header(p.target.module_shape, dtypes[n]) for n, p in tensors.items()}
            write_safetensors(folder / "model.safetensors", header, values)
            fsync_path(folder)
            os.replace(folder, out_dir)
    except OSError as e:
        raise UserError(f"cannot write {out_dir}: {e.strerror or e}") from e
    return out_dir


def _write_side_files(
    folder: Path,
    file: GGUFFile,
    h: Hyperparameters,
    tensors: Mapping[str, Place],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """config.json and the tokenizer."""
    tokenizer = vocab.from_keys(file.keys)
    write_tokenizer(tokenizer, folder, h["max_position_embeddings"])
    named = dict.fromkeys(TOKEN_IDS) | token_ids(tokenizer)  # null, or the class's own would be
    config = {**hparams.to_config(h), **bias_settings(h, tensors), **named}
    matrices = {dtypes[name] for name, place in tensors.items() if not place.target.float32}
    widest = matrices.pop() if len(matrices) == 1 else torch.float32
    config["dtype"] = config["torch_dtype"] = str(widest).removeprefix("torch.")
    write_json(folder / "config.json", config)


class Header(NamedTuple):
    """What a safetensors file says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Place(NamedTuple):
    """Where a tensor of the folder lies in the file. expert: which matrix of a stack."""

    target: Target
    expert: int | None


def read_hyperparameters(file: GGUFFile) -> Hyperparameters:
    """Hyperparameters of the file; the embedding's rows give the vocabulary size."""
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path} holds no token_embd.weight: it is no language model")
    stored = {name: file.get(name) for name in rope.TENSORS if name in file.tensors}
    tied = "output.weight" not in file.tensors
    return hparams.from_keys(file.keys, file.tensors["token_embd.weight"].shape[0], tied, stored)


def tensor_table(file: GGUFFile, h: Hyperparameters) -> dict[str, Place]:
    """Hugging Face tensor name -> its place, in the model's order, shapes checked."""
    table: dict[str, Place] = {}
    known: set[str] = set(rope.TENSORS)
    for target in targets(h):
        known.add(target.name)
        if target.name not in file.tensors:
            if target.part == "weight":
                raise UserError(f"{file.path} holds no tensor '{target.name}'")
            continue
        found = file.tensors[target.name].shape
        if found != target.shape and found != target.shape[1:]:
            raise UserError(
                f"{file.path}: '{target.name}' has shape {found}, its metadata means {target.shape}"
            )
        for expert, module in enumerate(target.modules):
            place = Place(target, expert if target.stacked else None)
            table[f"{module}.{target.part}"] = place
    if unknown := file.tensors.keys() - known:
        raise UserError(f"{file.path}: tensor '{min(unknown)}' belongs to no {h.architecture.name}")
    return table


def bias_settings(h: Hyperparameters, names: Iterable[str]) -> dict[str, bool]:
    """What config.json says of biases that not every model of the class has."""
    if "attention_bias" not in h.architecture.bias_settings:
        return {}
    biased = {name.rpartition(".")[0] for name in names if name.endswith(".bias")}
    found = {
        "attention_bias": any(".self_attn." in module for module in biased),
        "mlp_bias": any(".mlp." in module for module in biased),
    }
    return {name: found[name] for name in h.architecture.bias_settings}


def exact_dtype(file: GGUFFile, place: Place) -> torch.dtype:
    """The narrowest dtype that holds what is stored at `place` as it is."""
    return HALVES.get(file.tensors[place.target.name].kind, torch.float32)


def read_tensor(file: GGUFFile, name: str, place: Place, dtype: torch.dtype) -> Tensor:
    """The tensor with the Hugging Face name `name`, as Hugging Face has it."""
    target = place.target
    if place.expert is None:
        x = file.get(target.name).view(target.shape)
    else:
        x = file.get_matrix(target.name, place.expert)
    converted = target.take(x).to(dtype)
    if not converted.isfinite().all():
        raise UserError(f"{file.path}: '{name}' holds values that {dtype} cannot")
    return converted


def write_safetensors(
    path: Path,
    tensors: dict[str, Header],
    values: Iterable[tuple[str, Tensor]],
) -> None:
    """A safetensors file whose tensors come one by one, in the order of `tensors`.

    The format: u64 length of the header, a JSON header of dtype, shape and byte range of each
    tensor (padded with spaces to 8 bytes), then the bytes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entry = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for (name, value), (expected, stored) in zip(values, tensors.items(), strict=True):
            assert name == expected and value.dtype == stored.dtype, (name, expected)
            f.write(value.contiguous().view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())
