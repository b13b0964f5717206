"""A Hub id whose snapshot is in the cache: taken when it is whole, whatever else was fetched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from lowbit.calib import source
from lowbit.calib.source import model_folder
from lowbit.kernels.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache, and no Hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(source, "hub_reachable", lambda: False)
    return tmp_path


def snapshot(cache: Path, files: list[Path]) -> Path:
    """A cached snapshot of somebody/model with copies of `files`."""
    folder = cache / "models--somebody--model" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    refs = cache / "models--somebody--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    for file in files:
        shutil.copy(file, folder)
    return folder


def test_a_whole_snapshot_is_used(tiny: Path, cache: Path) -> None:
    folder = snapshot(cache, [tiny / "config.json", tiny / "model.safetensors"])
    assert model_folder("somebody/model") == folder


@pytest.mark.parametrize("missing", ["weights", "a shard"])
def test_a_snapshot_without_its_weights_is_not_used(
    missing: str, tiny: Path, cache: Path, tmp_path: Path
) -> None:
    folder = snapshot(cache, [tiny / "config.json", tiny / "tokenizer.json"])
    if missing == "a shard":
        shutil.copy(tiny / "model.safetensors", folder / "model-00001-of-00002.safetensors")
        index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-2"}}'
        (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match="no folder 'somebody/model', and the Hub does not answer"):
        model_folder("somebody/model")


def test_a_folder_comes_before_the_hub(
    tiny: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot(cache, [tiny / "config.json", tiny / "model.safetensors"])
    monkeypatch.chdir(tmp_path)
    Path("somebody/model").mkdir(parents=True)
    assert model_folder("somebody/model") == Path("somebody/model")
