"""Output goes where it may and is whole there; a full disk and faults of our own end clearly."""

from __future__ import annotations

import sys
from pathlib import Path

from .command import Commands, in_new_interpreter
from .damage import cut
from .models import copied, hashes
from .small_disk import FILLED_LATER, SmallDisk


def test_output_that_exists(
    shallow: Path, shallow_packed: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    there = copied(shallow_packed, tmp_path / "there")
    run = ["run", shallow, *calibration]
    command(*run, "-o", there).refuses(str(there), "exists", "--overwrite")
    assert hashes(there) == hashes(shallow_packed)
    gguf = tmp_path / "there.gguf"
    gguf.write_text("dear to me")
    command("export", shallow, "-o", gguf).refuses(str(gguf), "exists", "--overwrite")
    assert gguf.read_text() == "dear to me"


def test_output_that_is_no_checkpoint_is_never_replaced(
    shallow: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.png").write_text("dear to me")
    file = tmp_path / "file"
    file.write_text("dear to me")
    for place in (photos, file):
        command("run", shallow, "-o", place, *calibration, "--overwrite").refuses(
            str(place), "not a model folder", "will not be replaced"
        )
    assert (photos / "cat.png").read_text() == file.read_text() == "dear to me"


def test_an_original_model_is_never_replaced(
    shallow: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    original = copied(shallow, tmp_path / "original")
    command("run", shallow, "-o", original, *calibration, "--overwrite").refuses(
        str(original), "holds an original model", "choose another output"
    )
    assert hashes(original) == hashes(shallow)


def test_output_that_would_swallow_the_model(
    shallow: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    model = copied(shallow, tmp_path / "models" / "model")
    (tmp_path / "models" / "config.json").write_text("{}")
    before = hashes(tmp_path)
    for place in (model, model / "w4", model.parent):
        run = ["run", model, "-o", place, *calibration, "--overwrite"]
        command(*run).refuses(str(place), "overlap", "choose another output")
    command("run", ".", "-o", "w4", *calibration, cwd=model).refuses("w4", "overlap")
    assert hashes(tmp_path) == before


def test_output_in_places_that_do_not_take_it(
    shallow: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    run = ["run", shallow, *calibration, "-o"]
    command(*run, tmp_path / "no" / "such" / "out").refuses("no such folder", "no/such")
    command(*run, tmp_path / ("long" * 80)).refuses("name too long", "shorter")
    if sys.platform == "linux":
        command(*run, "/proc/lowbit-out").refuses("/proc", "choose another output")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(
    tiny: Path,
    calibration: list[str],
    packed: Path,
    command: Commands,
    small_disk: SmallDisk,
) -> None:
    """Filled at the first layer, in the middle, while the output is put together and at its side
    files; enlarged, the same command goes on to the same bytes."""
    needed = sum(f.stat().st_size for f in packed.rglob("*") if f.is_file()) // 1024
    seen = set()
    for kib in (8, 100, needed - 60, needed + 100):
        out = small_disk.mount(kib) / "out"
        ended = command("run", tiny, "-o", out, *calibration, before=FILLED_LATER)
        message = ended.refuses("No space left", "free")
        seen.add(next(p for p in ("assembled", "model.layers.") if p in message))
        assert not out.exists()
    assert seen == {"assembled", "model.layers."}
    small_disk.enlarge()
    again = command("run", tiny, "-o", out, *calibration, before=FILLED_LATER)
    assert again.code == 0 and "resuming after 6 finished layers" in again.stderr
    assert hashes(out) == hashes(packed)


def test_the_demo(shallow: Path, command: Commands, tmp_path: Path) -> None:
    demo = ["demo", "--fast", "--model", shallow, "-o"]
    command(*demo, tmp_path / "out", "--text", "nonsuch").refuses("'nonsuch'", "pydoc")
    file = tmp_path / "file"
    file.write_text("dear to me")
    command(*demo, file).refuses(str(file), "exists")
    assert file.read_text() == "dear to me"
    command("demo", "--model", tmp_path / "nowhere").refuses("no such model folder")


def test_in_a_fresh_interpreter(shallow: Path, calibration: list[str], tmp_path: Path) -> None:
    """The same refusals, exit codes and silence without the tests' own way of running commands."""
    out = tmp_path / "out"
    outcome = in_new_interpreter("run", shallow, "-o", out, *calibration, "--scheme", "W4A61")
    outcome.refuses("did you mean W4A16")
    assert outcome.stdout == ""
    broken = tmp_path / "broken"
    copied(shallow, broken)
    cut(-1000)(broken)
    in_new_interpreter("inspect", broken, "--json").refuses("truncated or damaged")
    assert not out.exists()


def test_faults_of_our_own_show_where(shallow: Path) -> None:
    """The other side of the promise: what is no user's mistake keeps its traceback and exits 1."""
    fault = "import lowbit.evals.size as s\ndef broken(_): raise KeyError('ours')\n"
    outcome = in_new_interpreter("inspect", shallow, before=fault + "s.size_report = broken")
    assert outcome.code == 1
    assert "KeyError: 'ours'" in outcome.stderr
    assert outcome.stderr.strip().splitlines()[-1].startswith("quantize: this is a fault of lowbit")
