"""The manifest of an output: what it says holds, and what is otherwise since is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lowbit.kernels.errors import UserError
from lowbit.quantize.checkpoint.manifest import MANIFEST, check_manifest, read_manifest
from lowbit.quantize.recipe import Recipe, WeightPass
from lowbit.quantize.rotated_model import write_rotated
from lowbit.quantize.runner import quantize_model

from .models import copied, deep_llama, hashes

RTN = Recipe((WeightPass(method="rtn", scheme="W4A16"),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep_llama(tmp_path_factory.mktemp("models") / "model", layers=2)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its W4A16 checkpoint in several shards. Not to be changed: copy it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    quantize_model(model, out, RTN, max_shard_size="20KB")
    return out


def faults(folder: Path, contents: bool = True) -> list[tuple[str, str]]:
    manifest = read_manifest(folder)
    assert manifest is not None
    return [(fault.file, fault.kind) for fault in check_manifest(folder, manifest, contents)]


def test_names_every_file_with_its_bytes(whole: Path) -> None:
    found = json.loads((whole / MANIFEST).read_text())
    assert found["version"] == 1
    assert list(found["files"]) == sorted(found["files"])
    on_disk = {name: digest for name, digest in hashes(whole).items() if name != MANIFEST}
    assert {name: entry["sha256"] for name, entry in found["files"].items()} == on_disk
    sizes = {name: (whole / name).stat().st_size for name in on_disk}
    assert {name: entry["bytes"] for name, entry in found["files"].items()} == sizes
    assert {"extra/notes.txt", "config.json", "tokenizer.json"} <= on_disk.keys()
    assert len([name for name in on_disk if name.endswith(".safetensors")]) > 2
    assert faults(whole) == []


def test_whichever_way_an_output_is_made_it_has_one(model: Path, tmp_path: Path) -> None:
    write_rotated(model, tmp_path / "rotated")
    assert faults(tmp_path / "rotated") == []
    quantize_model(tmp_path / "rotated", tmp_path / "out", RTN)
    assert faults(tmp_path / "out") == []
    assert read_manifest(model) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tokenizer.json", "missing"),
        ("config.json", "size"),
        ("model-00002-of-00004.safetensors", "contents"),
        ("extra/mine.txt", "extra"),
    ],
)
def test_what_has_changed_is_found(name: str, kind: str, whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "copy")
    file = folder / name
    if kind == "missing":
        file.unlink()
    elif kind == "size":
        file.write_text(file.read_text() + "\n")
    elif kind == "contents":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        file.write_text("mine")
    assert faults(folder) == [(name, kind)]
    assert faults(folder, contents=False) == ([] if kind == "contents" else [(name, kind)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "nesting"),
        ("[]", "holds a list"),
        ("{}", "no table of files"),
        ('{"version": 2, "files": {}}', "version 2"),
        ('{"version": 1, "files": {"a": {"bytes": 1}}}', "'a' has no size and hash"),
        ('{"version": 1, "files": {"../a": {"bytes": 1, "sha256": ""}}}', "'../a'"),
        ('{"version": 1, "files": {"/a": {"bytes": 1, "sha256": ""}}}', "'/a'"),
        ('{"version": 1, "files": {"": {"bytes": 1, "sha256": ""}}}', "not a file of the folder"),
    ],
)
def test_a_damaged_manifest_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UserError, match="quantization_manifest.json") as refused:
        read_manifest(tmp_path)
    assert said in str(refused.value)
