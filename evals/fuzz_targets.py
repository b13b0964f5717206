"""What is fuzzed: files of small whole checkpoints, and lowbit's readers of each.

A reader must read a damaged file, or raise UserError (verify: report); anything else is a fault.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ..calib.meta_model import load_config
from ..calib.safetensors_file import read_header
from ..calib.shards import INDEX, Shards
from ..calib.text import load_tokenizer
from ..kernels.errors import UserError
from ..quantize import convert, run, verify
from ..quantize.checkpoint.load import Checkpoint, read_config
from ..quantize.checkpoint.manifest import MANIFEST, read_manifest
from ..quantize.gguf.export import export_gguf
from ..quantize.gguf.hf_vocab import read_vocab
from ..quantize.gguf.imatrix import Imatrix, Importance, read_imatrix, write_imatrix
from ..quantize.gguf.reader import GGUFFile
from ..quantize.gguf.spm_model import read_spm_model
from ..quantize.gguf.to_hf import gguf_to_hf
from ..quantize.recipe import Recipe
from .gguf_mutations import mutate_gguf
from .mutations import Choose, mutate_bytes, mutate_header, mutate_json
from .size import size_report
from .tiny_llama import tiny_llama

Mutate = Callable[[bytes, Choose], bytes]
GGUF, PIECES = "m.gguf", "tokenizer.model"
IMATRICES = ("imatrix.gguf", "imatrix.dat")


class Target(NamedTuple):
    """source: a folder that `make_sources` made. file: the one that is damaged. mutations: ways to
    do it. readers: each called with the folder."""

    source: str
    file: str
    mutations: tuple[Mutate, ...]
    readers: tuple[Callable[[Path], object], ...]


class Workplace:
    """A folder for one target, whose damaged file is put in place and taken out again."""

    def __init__(self, target: Target, sources: Path, scratch: Path) -> None:
        self.target = target
        self.folder = Path(shutil.copytree(sources / target.source, scratch / target.source))
        self._path = self.folder / target.file
        self._whole = self._path.read_bytes()

    def damaged(self, choose: Choose) -> bytes:
        """The file, damaged as `choose` says."""
        mutations = self.target.mutations
        return mutations[choose(len(mutations))](self._whole, choose)

    def read(self, data: bytes) -> None:
        """Let every reader read the folder with `data` in the file's place; what they raise beside
        UserError is raised."""
        self._path.write_bytes(data)
        for reader in self.target.readers:
            try:
                reader(self.folder)
            except UserError:
                continue


def make_sources(folder: Path) -> Path:
    """Whole checkpoints: `w4` in several shards, `gptq`, and a GGUF file with a sentencepiece model
    beside it."""
    model = tiny_llama(folder / "model", layers=1)
    recipe = Recipe.from_dict({
        "passes": [{"method": "rtn", "scheme": "W4A16", "group_size": 32}]
    })  # fmt: skip
    run(model, folder / "w4", recipe, max_shard_size=20_000)
    convert(folder / "w4", folder / "gptq", "gptq", requantize=True)
    (folder / "gguf").mkdir()
    export_gguf(model, folder / "gguf" / GGUF, "Q4_0", pre="gpt-2", progress=False)
    (folder / "gguf" / PIECES).write_bytes(_pieces())
    entry = Importance(torch.rand(2, 8), torch.tensor([3.0, 4.0]))
    for name in IMATRICES:
        write_imatrix(folder / "gguf" / name, Imatrix({"blk.0.ffn_up.weight": entry}, ["x"], 1, 8))
    return folder


def _pieces() -> bytes:
    """A sentencepiece model of a few pieces, as protocol buffers have it."""
    pieces = [("<unk>", 0.0, 2), ("a", -1.0, 1), ("b", -2.0, 1), ("ab", -3.0, 1), ("<0x0A>", 0, 6)]
    data = b""
    for text, score, kind in pieces:
        word = text.encode()
        inner = b"\x0a" + bytes([len(word)]) + word + b"\x15" + struct.pack("<f", score)
        inner += b"\x18" + bytes([kind])
        data += b"\x0a" + bytes([len(inner)]) + inner
    return data + b"\x12\x02\x18\x02"


def _read_tensors(folder: Path) -> None:
    """Every tensor as the runtime reads it."""
    checkpoint = Checkpoint(folder)
    try:
        for module in checkpoint.schemes:
            checkpoint.quantized(module)
        for name in checkpoint.shards.names():
            checkpoint.shards.get(name)
    finally:
        checkpoint.shards.close()


def _open(folder: Path) -> None:
    Shards(folder).close()


def _header(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        read_header(file)


def _vocabulary(folder: Path) -> None:
    read_vocab(folder, read_config(folder))


def _gguf(folder: Path) -> None:
    file = GGUFFile(folder / GGUF)
    for name in file.tensors:
        file.get(name)


def _import(folder: Path) -> None:
    made = folder / "made"
    try:
        gguf_to_hf(folder / GGUF, made, progress=False)
    finally:
        shutil.rmtree(made, ignore_errors=True)


SHARD = "model-00001-of-00003.safetensors"
JSON = (mutate_json, mutate_json, mutate_bytes)
KEYS = (mutate_gguf, mutate_gguf, mutate_gguf, mutate_bytes)
TARGETS: dict[str, Target] = {
    "weights": Target("w4", SHARD, (mutate_bytes, mutate_header), (verify, _read_tensors)),
    "header": Target("w4", SHARD, (mutate_bytes, mutate_header), (_header, _open)),
    "gptq weights": Target(
        "gptq", "model.safetensors", (mutate_bytes, mutate_header), (verify, _read_tensors)
    ),
    "config": Target("w4", "config.json", JSON, (verify, load_config, Checkpoint, size_report)),
    "gptq config": Target("gptq", "config.json", JSON, (verify, Checkpoint)),
    "index": Target("w4", INDEX, JSON, (verify, _open)),
    "manifest": Target("w4", MANIFEST, JSON, (read_manifest, verify)),
    "tokenizer": Target("w4", "tokenizer.json", JSON, (_vocabulary, load_tokenizer, verify)),
    "tokenizer settings": Target(
        "w4", "tokenizer_config.json", JSON, (_vocabulary, load_tokenizer, verify)
    ),
    "generation config": Target("w4", "generation_config.json", JSON, (_vocabulary, verify)),
    "gguf": Target(
        "gguf", GGUF, KEYS, (lambda f: verify(f / GGUF), _gguf, _import)
    ),
    "sentencepiece": Target(
        "gguf", PIECES, (mutate_bytes,), (lambda f: read_spm_model(f / PIECES),)
    ),
    "imatrix": Target(
        "gguf", IMATRICES[0], KEYS, (lambda f: read_imatrix(f / IMATRICES[0]),)
    ),
    "older imatrix": Target(
        "gguf", IMATRICES[1], (mutate_bytes,), (lambda f: read_imatrix(f / IMATRICES[1]),)
    ),
}  # fmt: skip
