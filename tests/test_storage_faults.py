"""What happens to files while a command is at work: clear errors, and nothing is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from lowbit.kernels.errors import UserError
from lowbit.quantize.checkpoint.journal import Journal
from lowbit.quantize.checkpoint.stream_output import StreamOutput
from lowbit.quantize.gguf.writer import replacing
from lowbit.quantize.recipe import Calibration, Recipe, WeightPass
from lowbit.quantize.runner import quantize_model

from .command import Commands
from .models import copied, hashes
from .small_disk import FILLED_LATER, SmallDisk


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers in several shards. Not to be changed: copy it."""
    from lowbit.evals.tiny_llama import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("models") / "model", layers=3)


@pytest.fixture(scope="module")
def recipes(story: Path) -> dict[str, Recipe]:
    rows = Calibration(str(story), samples=4, seq_len=32)
    return {
        "streamed": Recipe((WeightPass(method="rtn", scheme="W4A16"),)),
        "calibrated": Recipe((WeightPass(method="gptq", scheme="W4A16", group_size=32),), rows),
    }


@pytest.fixture(scope="module")
def unbroken(
    sharded: Path, recipes: dict[str, Recipe], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """Hashes of the files of an unbroken run of each recipe."""
    found = {}
    for name, recipe in recipes.items():
        out = tmp_path_factory.mktemp("unbroken") / "out"
        quantize_model(sharded, out, recipe)
        found[name] = hashes(out)
    return found


def contents(out: Path) -> dict[str, str] | bytes:
    return out.read_bytes() if out.is_file() else hashes(out)


def at_work(patch: pytest.MonkeyPatch, kind: str, act: Callable[[], object], nth: int = 2) -> None:
    """Let `act` happen when a run has finished its `nth` tensor or layer."""
    owner, name = {
        "streamed": (StreamOutput, "finish"),
        "calibrated": (Journal, "write"),
    }[kind]
    original, calls = getattr(owner, name), 0

    def acting(*args: object) -> None:
        nonlocal calls
        original(*args)
        calls += 1
        if calls == nth:
            act()

    patch.setattr(owner, name, acting)


@pytest.mark.parametrize("kind", ["streamed", "calibrated"])
def test_a_shard_deleted_while_a_run_is_at_work(
    kind: str,
    sharded: Path,
    recipes: dict[str, Recipe],
    unbroken: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    model, out, aside = copied(sharded, tmp_path / "model"), tmp_path / "out", tmp_path / "aside"
    last = sorted(model.glob("*.safetensors"))[-1]
    with pytest.MonkeyPatch.context() as patch:
        at_work(patch, kind, lambda: last.rename(aside))
        with pytest.raises(UserError, match=f"{last.name} is gone; put it back"):
            quantize_model(model, out, recipes[kind])
    assert not out.exists()
    aside.rename(last)
    result = quantize_model(model, out, recipes[kind])
    assert result.resumed_layers or kind == "streamed"  # (little is written before it is recorded)
    assert hashes(out) == unbroken[kind]


@pytest.mark.parametrize("kind", ["streamed", "calibrated"])
def test_a_model_that_changes_while_a_run_is_at_work(
    kind: str, sharded: Path, recipes: dict[str, Recipe], tmp_path: Path
) -> None:
    model, out = copied(sharded, tmp_path / "model"), tmp_path / "out"
    first = sorted(model.glob("*.safetensors"))[0]

    def rewritten() -> None:
        first.write_bytes(first.read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        at_work(patch, kind, rewritten)
        with pytest.raises(UserError, match=r"model has changed while.*--restart"):
            quantize_model(model, out, recipes[kind])
    assert not out.exists()
    with pytest.raises(UserError, match=r"was written to since.*--restart"):
        quantize_model(model, out, recipes[kind])
    quantize_model(model, out, recipes[kind], restart=True)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["model", "out"]


def test_a_finished_layer_deleted_while_a_run_is_at_work(
    sharded: Path, recipes: dict[str, Recipe], unbroken: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    layer = tmp_path / "out.partial" / "model.layers.0.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        at_work(patch, "calibrated", layer.unlink)
        with pytest.raises(UserError, match=r"layers\.0\.safetensors.*is damaged"):
            quantize_model(sharded, out, recipes["calibrated"])
    assert quantize_model(sharded, out, recipes["calibrated"]).resumed_layers == 2
    assert hashes(out) == unbroken["calibrated"]


def stop() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d + b"x", lambda d: b"{}" + d])
def test_a_damaged_shard_of_a_streamed_run_is_made_anew(
    damage: Callable[[bytes], bytes],
    sharded: Path,
    recipes: dict[str, Recipe],
    unbroken: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        at_work(patch, "streamed", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_model(sharded, out, recipes["streamed"])
    (shard,) = (tmp_path / "out.partial" / "assembled").iterdir()
    shard.write_bytes(damage(shard.read_bytes()))
    quantize_model(sharded, out, recipes["streamed"])
    assert hashes(out) == unbroken["streamed"]


@pytest.mark.parametrize("kind", ["streamed", "calibrated"])
def test_the_unfinished_output_deleted_while_a_run_is_at_work(
    kind: str,
    sharded: Path,
    recipes: dict[str, Recipe],
    unbroken: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with pytest.MonkeyPatch.context() as patch:
        at_work(patch, kind, lambda: shutil.rmtree(partial))
        with pytest.raises(UserError, match=r"out\.partial.* was removed while"):
            quantize_model(sharded, out, recipes[kind])
    quantize_model(sharded, out, recipes[kind])
    assert hashes(out) == unbroken[kind]


# what makes something in one go or streams it -> its command but for the output
MADE = {
    "run": ["run", "{model}", "--method", "rtn", "--max-shard-size", "20KB"],
    "export": ["export", "{model}", "--pre", "gpt-2", "--type", "F16"],
    "convert": ["convert", "{packed}", "--to", "gptq", "--max-shard-size", "20KB"],
}


@pytest.fixture(scope="module")
def given(
    sharded: Path, recipes: dict[str, Recipe], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    packed = tmp_path_factory.mktemp("packed") / "packed"
    quantize_model(sharded, packed, recipes["calibrated"])
    return {"model": str(sharded), "packed": str(packed)}


@pytest.mark.parametrize("name", MADE)
def test_a_full_disk(
    name: str, given: dict[str, str], command: Commands, small_disk: SmallDisk, tmp_path: Path
) -> None:
    """Filled in the middle and at the last files; then enlarged."""
    made = [a.format_map(given) for a in MADE[name]]
    whole = tmp_path / "whole"
    assert command(*made, "-o", whole).code == 0
    needed = sum(-(-p.stat().st_size // 4096) * 4 for p in [whole, *whole.rglob("*")])
    for kib in (needed // 2, needed - 8):
        out = small_disk.mount(kib) / "out"
        ended = command(*made, "-o", out, before=FILLED_LATER)
        ended.refuses("No space left", str(out), "free some")
        assert not out.exists()
    small_disk.enlarge()
    assert command(*made, "-o", out, before=FILLED_LATER).code == 0
    assert contents(out) == contents(whole)
    assert [p.name for p in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("name", MADE)
def test_a_folder_that_cannot_be_written_to(
    name: str, given: dict[str, str], command: Commands, small_disk: SmallDisk
) -> None:
    place = small_disk.mount(100, "ro")
    made = [a.format_map(given) for a in MADE[name]]
    command(*made, "-o", place / "out").refuses(str(place), "choose another")


def test_parts_of_two_models_never_stand_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers open the first part: it goes with all others before new ones come, and comes last."""
    names = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in names:
        (tmp_path / name).write_text("old")
    replace, moved = os.replace, []

    def stopped(source: Path, target: Path) -> None:
        if len(moved) == 1:
            raise KeyboardInterrupt
        moved.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", stopped)
    with (
        pytest.raises(KeyboardInterrupt),
        replacing(tmp_path / "m.gguf", names, overwrite=True) as folder,
    ):
        for name in names:
            (folder / name).write_text("new")
    assert moved == names[-1:]
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {names[-1]: "new"}
