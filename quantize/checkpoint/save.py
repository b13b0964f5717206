"""Put a finished run together: shards, config, side files, all under the final name at once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from ...calib.shards import INDEX, Shards
from ...kernels.errors import UserError
from ..spec import LayerScheme
from .ct_config import config_from_schemes
from .journal import Journal
from .load import read_config
from .raw import RawTensor, fsync_folder, raw_tensors, write_shards, write_text

REPORT = "quantization_report.json"
WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".pkl",
)  # fmt: skip


def check_output(out: Path, overwrite: bool) -> None:
    """UserError when the output folder cannot be made under its name."""
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; choose another output or pass --overwrite to replace it")
    if out.exists() and not (out / "config.json").exists():
        raise UserError(
            f"{out} exists and is not a model folder (no config.json); it will not be replaced: "
            "choose another output"
        )
    parent = out.absolute().parent
    if not parent.is_dir():
        raise UserError(f"no such folder for the output: {parent}")
    if not os.access(parent, os.W_OK):
        raise UserError(f"{parent} is not writable; choose another output")


def save_checkpoint(
    source: Path,
    out: Path,
    journal: Journal,
    layers: list[str],
    schemes: dict[str, LayerScheme],
    ignore: list[str],
    report: dict[str, Any],
    version: str,
) -> None:
    """Write the compressed-tensors checkpoint `out` from the original folder and the journal.

    layers: names of the decoder layers, all finished. schemes: quantized modules by the shards'
    names. ignore: linears left alone. report: what is kept beside the weights, no times in it.
    Everything is made in a temporary folder that is renamed at the end.
    """
    folder = journal.folder / "assembled"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    write_shards(folder, _all_tensors(source, journal, layers, set(schemes)))
    config = read_config(source)
    config["quantization_config"] = config_from_schemes(schemes, ignore, version)
    copy_side_files(source, folder)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_text(folder / REPORT, json.dumps(report, indent=2) + "\n")
    fsync_folder(folder)
    put_in_place(folder, out)
    journal.remove()


def put_in_place(folder: Path, out: Path) -> None:
    """Rename `folder` to `out`, replacing an older `out`."""
    old = out.with_name(out.name + ".old")
    if out.exists():
        os.replace(out, old)
    os.replace(folder, out)
    fsync_folder(out.absolute().parent)
    if old.exists():
        shutil.rmtree(old)


def copy_side_files(source: Path, folder: Path) -> None:
    """Everything that rode with the model: tokenizer, chat template, generation config, others."""
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name in ("config.json", INDEX):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=_only_side_files)
        elif not _is_weights(path.name):
            shutil.copyfile(path, folder / path.name)


def _only_side_files(_: str, names: list[str]) -> list[str]:
    return [n for n in names if _is_weights(n) or n.startswith(".")]


def _is_weights(name: str) -> bool:
    return name.endswith((*WEIGHT_SUFFIXES, ".bin.index.json"))


def _all_tensors(
    source: Path, journal: Journal, layers: list[str], quantized: set[str]
) -> list[RawTensor]:
    """Original tensors in their order, each quantized weight replaced by what stores it."""
    stored: dict[str, list[RawTensor]] = {}
    for layer in layers:
        for t in raw_tensors(journal.file(layer)):
            stored.setdefault(t.name.rpartition(".")[0], []).append(t)
    shards = Shards(source)
    files = dict.fromkeys(info.file for info in shards.info.values())
    shards.close()
    tensors: list[RawTensor] = []
    for file in files:
        for t in raw_tensors(source / file):
            module, _, leaf = t.name.rpartition(".")
            if leaf == "weight" and module in quantized:
                tensors += sorted(stored.pop(module), key=lambda t: t.name)
            else:
                tensors.append(t)
    assert not stored, f"no original weight for {next(iter(stored), None)}"
    return tensors
