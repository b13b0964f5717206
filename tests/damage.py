"""Ways to damage a model folder or a checkpoint: each a function of the folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .models import change_json, change_tensors

Damage = Callable[[Path], object]
INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj"


def write(name: str, content: str | bytes) -> Damage:
    """A damage that puts a file of this content into the folder."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def cut(end: int) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:end])

    return damage


def config(**changes: Any) -> Damage:
    return lambda folder: change_json(folder / "config.json", lambda c: c.update(changes))


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(2)}, folder / "pytorch_model.bin")


def an_index_of(*files: str) -> Damage:
    entries = ",".join(f'"tensor {i}": "{file}"' for i, file in enumerate(files))
    return write(INDEX, f'{{"weight_map": {{{entries}}}}}')


def nan_in(name: str) -> Damage:
    return lambda f: change_tensors(f, lambda t: t[name][0].fill_(float("nan")))


def quantization(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda f: change_json(f / "config.json", lambda c: change(c["quantization_config"]))


def group(**changes: Any) -> Damage:
    return quantization(lambda q: q["config_groups"]["group_0"].update(changes))


def weights(**changes: Any) -> Damage:
    return quantization(lambda q: q["config_groups"]["group_0"]["weights"].update(changes))


def stored(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    name = f"{DOWN}.{part}"
    return lambda f: change_tensors(f, lambda t: t.update({name: change(t[name])}))


def lost(part: str) -> Damage:
    return lambda f: change_tensors(f, lambda t: t.pop(f"{DOWN}.{part}"))
