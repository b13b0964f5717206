"""Put a finished run together: shards, config, side files, all under the final name at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calib.safetensors_file import DTYPES
from ...calib.shards import TensorSource
from ...kernels.errors import UserError
from ...kernels.finite import all_finite
from ..spec import KVSpec, LayerScheme
from .files import FileRecord, fsync_path, write_text
from .journal import Journal
from .kv_config import with_kv_cache
from .layouts import NATIVE, Layout
from .load import read_config
from .manifest import write_manifest
from .raw import (
    MAX_SHARD_BYTES,
    MadeTensor,
    RawTensor,
    raw_tensors,
    slot,
    write_shards,
)
from .side_files import REPORT, copy_side_files, side_files
from .workspace import REPLACED


class LinearStorage(NamedTuple):
    """How a checkpoint's linears are stored.

    schemes: quantized modules by the source's names. ignore: linears left alone. act_order: whether
    some columns lie in no order of groups.
    """

    schemes: Mapping[str, LayerScheme]
    ignore: list[str]
    layout: Layout = NATIVE
    act_order: bool = False

    def quantization_config(self, version: str) -> dict[str, Any]:
        return self.layout.config(self.schemes, self.ignore, version, self.act_order)


def check_output(source: Path, out: Path, overwrite: bool) -> None:
    """UserError when the output folder cannot be made under its name.

    Nor may it hold the model's folder `source` or lie within it: the one would be replaced along
    with it, and the other's files are copied. DamagedFile when some of these cannot be.
    """
    if source.is_dir():
        side_files(source)
    inside, outside = out.resolve(), source.resolve()
    if inside.is_relative_to(outside) or outside.is_relative_to(inside):
        raise UserError(f"{out} and the model's folder {source} overlap; choose another output")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; choose another output or pass --overwrite to replace it")
    if out.exists() and not (out / "config.json").exists():
        raise UserError(
            f"{out} exists and is not a model folder (no config.json); it will not be replaced: "
            "choose another output"
        )
    if out.exists() and not _is_made_from_another(out):
        raise UserError(
            f"{out} holds an original model (its config.json quantizes nothing, and lowbit left no "
            f"{REPORT}); it will not be replaced: choose another output"
        )
    parent = out.absolute().parent
    if not parent.is_dir():
        raise UserError(f"no such folder for the output: {parent}")
    if not os.access(parent, os.W_OK):
        raise UserError(f"{parent} is not writable; choose another output")


def _is_made_from_another(folder: Path) -> bool:
    """Whether a model folder is a checkpoint that can be made again."""
    return (folder / REPORT).exists() or "quantization_config" in read_config(folder)


def save_checkpoint(
    source: TensorSource,
    out: Path,
    journal: Journal,
    layers: list[str],
    storage: LinearStorage,
    report: dict[str, Any],
    version: str,
    changed: Collection[str] = (),
    config_changes: Mapping[str, Any] | None = None,
    cache: KVSpec | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the checkpoint `out` from the original tensors and the journal.

    layers: names of the decoder layers, all finished, their tensors as `storage` says. report: what
    is kept beside the weights, no times in it. changed: tensors that the source hands out otherwise
    than the folder has them. config_changes: keys of config.json that differ. cache: how keys and
    values are to be stored. max_shard_bytes: of tensor data in a file, but for a tensor that is
    larger. One tensor is in memory at a time; everything is made in a temporary folder that is
    renamed at the end.
    """
    journal.check_source(source)
    folder = journal.folder / "assembled"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    tensors = _all_tensors(source, journal, layers, set(storage.schemes), set(changed))
    written = write_shards(folder, tensors, max_shard_bytes)
    complete_checkpoint(
        source.folder, folder, out, storage, report, version, config_changes, cache, written.files
    )
    journal.remove()


def complete_checkpoint(
    source: Path,
    folder: Path,
    out: Path,
    storage: LinearStorage,
    report: dict[str, Any],
    version: str,
    config_changes: Mapping[str, Any] | None = None,
    cache: KVSpec | None = None,
    written: Mapping[str, FileRecord] | None = None,
) -> None:
    """Put config, report, side files and manifest beside the shards in `folder`; rename it to
    `out`. written: records of files that were hashed while they were written.

    config.json comes after all else but the manifest: without it no reader takes the folder for a
    checkpoint.
    """
    config = {**read_config(source), **(config_changes or {})}
    config.pop("quantization_config", None)
    files: dict[str, Any] = {REPORT: report}
    if storage.schemes:
        quantization = storage.quantization_config(version)
        config["quantization_config"] = quantization
        files |= storage.layout.side_files(quantization)
    files["config.json"] = config if cache is None else with_kv_cache(config, cache, version)
    known = {**(written or {}), **copy_side_files(source, folder)}
    for name, value in files.items():
        known[name] = write_text(folder / name, json.dumps(value, indent=2) + "\n")
    write_manifest(folder, known)
    fsync_path(folder)
    put_in_place(folder, out)


def put_in_place(folder: Path, out: Path) -> None:
    """Rename `folder` to `out`; an older `out` is left beside where `folder` was."""
    old = folder.with_name(REPLACED)
    if out.exists():
        if old.exists():
            shutil.rmtree(old)
        os.replace(out, old)
    os.replace(folder, out)
    fsync_path(out.absolute().parent)


def _all_tensors(
    source: TensorSource,
    journal: Journal,
    layers: list[str],
    quantized: set[str],
    changed: set[str],
) -> list[RawTensor | MadeTensor]:
    """The source's tensors in their order: each quantized weight replaced by what stores it, others
    by what the journal has under their name. What the folder does not hold as the source hands it
    out is made when its turn comes."""
    stored: dict[str, RawTensor] = {}
    of_module: dict[str, list[RawTensor]] = {}
    for layer in layers:
        for t in journal.stored(layer):
            stored[t.name] = t
            of_module.setdefault(t.name.rpartition(".")[0], []).append(t)
    files = dict.fromkeys(info.file for info in source.info.values())
    original = {t.name: t for f in files for t in raw_tensors(source.folder / f)}
    tensors: list[RawTensor | MadeTensor] = []
    for name in source.names():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in quantized:
            held = [t for t in of_module.pop(module) if t.name == name or t.name not in source]
            held.sort(key=lambda t: t.name)  # a changed bias has its own place
            tensors += held
            for t in held:
                del stored[t.name]
        elif name in stored:
            tensors.append(stored.pop(name))
        elif name in original and name not in changed and _same(original[name], source, name):
            tensors.append(original[name])
        else:
            tensors.append(made_tensor(source, name))
    tensors += stored.values()  # of names that the source does not have
    return tensors


def made_tensor(source: TensorSource, name: str) -> MadeTensor:
    """The tensor `name` as the source hands it out, read when it is written, not before."""

    def make() -> Tensor:
        tensor = to_store(source, name)
        source.close()
        return tensor

    info = source.info[name]
    return MadeTensor(*slot(name, torch.empty(info.shape, dtype=info.dtype, device="meta")), make)


def _same(t: RawTensor, source: TensorSource, name: str) -> bool:
    info = source.info[name]
    return (DTYPES[t.dtype], tuple(t.shape)) == (info.dtype, info.shape)


def to_store(source: TensorSource, name: str) -> Tensor:
    """The tensor `name` in its stored dtype; UserError where that cannot hold its values."""
    tensor = source.get(name).to(source.info[name].dtype)
    if tensor.is_floating_point() and not all_finite(tensor):
        raise UserError(
            f"'{name}' has values beyond {tensor.dtype} once it is transformed; convert the model "
            "to bfloat16 or float32 first"
        )
    return tensor
