"""Folders that the commands are tried on: a deeper Llama, models that are none, damaged ones."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from .runtime_models import FAMILIES, PAD, byte_tokenizer, save_tiny

SENTENCE = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "


def deep_llama(folder: Path, layers: int = 6) -> Path:
    """A random Llama of `layers` layers with a tokenizer and files that ride along.

    Its tokenizer has a merge: llama.cpp reads no byte-level BPE without one.
    """
    config: LlamaConfig = FAMILIES["llama"]()
    config.num_hidden_layers = layers
    save_tiny(folder, config)
    change_json(folder / "tokenizer.json", add_merge)
    (folder / "NOTICE").write_text("rides along\n")
    (folder / "extra").mkdir()
    (folder / "extra" / "notes.txt").write_text("rides along too\n")
    return folder


def add_merge(tokenizer: dict[str, Any]) -> None:
    """Edit a byte tokenizer's JSON in place."""
    tokenizer["model"]["vocab"]["th"] = PAD + 1
    tokenizer["model"]["merges"] = [["t", "h"]]


def not_causal(folder: Path, config: Any, model_class: Any) -> Path:
    """A random model of another kind, saved as its own class saves it."""
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Let `change` edit the tensors of the folder's only shard in place."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata={"format": "pt"})


def change_json(file: Path, change: Callable[[Any], object]) -> None:
    """Let `change` edit the value of a JSON file in place."""
    value = json.loads(file.read_text(encoding="utf-8"))
    change(value)
    file.write_text(json.dumps(value), encoding="utf-8")


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`, by its path there."""
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(folder.rglob("*"))
        if f.is_file()
    }
