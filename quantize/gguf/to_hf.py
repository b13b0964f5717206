"""Turn a GGUF file of llama.cpp's `llama` architecture into a Hugging Face folder.

Tensors are dequantized one at a time straight into one safetensors file: its header is known before
any data is, so memory is that of the largest tensor. The folder appears under its name only when it
is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ...kernels.errors import UserError
from . import hparams, vocab
from .hf_tokenizer import token_ids, write_json, write_tokenizer
from .hparams import Hyperparameters
from .names import ROPE_FREQS, deinterleave, rotated_heads, to_gguf
from .reader import GGUFFile
from .writer import sync

DTYPES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


def gguf_to_hf(
    gguf_path: str | Path,
    out_dir: Path,
    *,
    dtype: torch.dtype = torch.float16,
    progress: bool = True,
) -> Path:
    """Write config, weights in `dtype`, tokenizer and generation config to `out_dir`; returns it.

    Raises UserError for another architecture, an unknown tokenizer, missing or unexpected tensors,
    values beyond `dtype`, and when `out_dir` exists.
    """
    out_dir = Path(out_dir)
    if out_dir.exists():
        raise UserError(f"{out_dir} exists; give another name")
    file = GGUFFile(gguf_path)
    h = read_hyperparameters(file)
    tokenizer = vocab.from_keys(file.keys)
    tensors = tensor_table(file, h)
    temporary = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        write_tokenizer(tokenizer, temporary, h.max_position_embeddings)
        config = {**hparams.to_config(h), **token_ids(tokenizer)}
        biased = {name.rpartition(".")[0] for name in tensors if name.endswith(".bias")}
        config["attention_bias"] = any(".self_attn." in m for m in biased)
        config["mlp_bias"] = any(".mlp." in m for m in biased)
        config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
        write_json(temporary / "config.json", config)
        bar = tqdm(tensors, desc="dequantizing", unit="tensor", disable=not progress)
        values = ((name, read_tensor(file, h, name, dtype)) for name in bar)
        shapes = {name: file.tensors[tensors[name]].shape for name in tensors}
        write_safetensors(temporary / "model.safetensors", shapes, dtype, values)
        sync(temporary)
        os.replace(temporary, out_dir)
    except OSError as e:
        raise UserError(f"cannot write {out_dir}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out_dir


def read_hyperparameters(file: GGUFFile) -> Hyperparameters:
    """Hyperparameters of the file; the embedding's rows give the vocabulary size."""
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path} holds no token_embd.weight: it is no language model")
    divisors = file.get(ROPE_FREQS) if ROPE_FREQS in file.tensors else None
    tied = "output.weight" not in file.tensors
    return hparams.from_keys(file.keys, file.tensors["token_embd.weight"].shape[0], tied, divisors)


def tensor_table(file: GGUFFile, h: Hyperparameters) -> dict[str, str]:
    """Hugging Face tensor name -> GGUF name, in the model's order, shapes checked."""
    table: dict[str, str] = {}
    for module, shape in h.shapes().items():
        name = to_gguf(module)
        for part, expected in (("weight", shape), ("bias", shape[:1])):
            stored = f"{name}.{part}"
            if stored not in file.tensors:
                if part == "weight":
                    raise UserError(f"{file.path} holds no tensor '{stored}'")
                continue
            found = file.tensors[stored].shape
            if found != expected:
                raise UserError(
                    f"{file.path}: '{stored}' has shape {found}, its metadata means {expected}"
                )
            table[f"{module}.{part}"] = stored
    unknown = file.tensors.keys() - set(table.values()) - {ROPE_FREQS}
    if unknown:
        raise UserError(f"{file.path}: tensor '{min(unknown)}' belongs to no Llama")
    return table


def read_tensor(file: GGUFFile, h: Hyperparameters, name: str, dtype: torch.dtype) -> Tensor:
    """The tensor with the Hugging Face name `name`, rows in Hugging Face's order."""
    module, _, part = name.rpartition(".")
    x = file.get(f"{to_gguf(module)}.{part}")
    heads = rotated_heads(module, h.num_attention_heads, h.num_key_value_heads)
    if heads is not None:
        x = deinterleave(x, heads)
    converted = x.to(dtype)
    if not converted.isfinite().all():
        raise UserError(f"{file.path}: '{name}' holds values that {dtype} cannot")
    return converted


def write_safetensors(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    values: Iterable[tuple[str, Tensor]],
) -> None:
    """A safetensors file whose tensors come one by one, in the order of `shapes`.

    The format: u64 length of the header, a JSON header of dtype, shape and byte range of each
    tensor (padded with spaces to 8 bytes), then the bytes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entry = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for (name, value), expected in zip(values, shapes, strict=True):
            assert name == expected and value.dtype == dtype, (name, expected)
            f.write(value.contiguous().view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())
