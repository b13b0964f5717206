"""A killed run goes on and ends in the bytes of an unbroken one; it never mixes two runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowbit.kernels.errors import counted

from .command import Commands, in_new_interpreter
from .models import change_tensors, copied, hashes
from .runtime_models import FAMILIES, byte_tokenizer, save_tiny

KILLED = -9
LAYERS = 6
JOURNAL = "lowbit.quantize.checkpoint.journal"
SAVE = "lowbit.quantize.checkpoint.save"
STREAM = "lowbit.quantize.checkpoint.stream_output"
RENAMES = 1 + 2 * LAYERS  # of the journal and of each layer's report and tensors

# where SIGKILL strikes -> how many layers are finished by then
PLACES = {
    "before the journal": ((JOURNAL, "write_text", 1), 0),
    "in the first layer": ((JOURNAL, "Journal.write", 1), 0),
    "after the first layer": ((JOURNAL, "Journal.write", 2), 1),
    "between a layer's report and its tensors": ((JOURNAL, "write_tensors", 4), 3),
    "after the last layer": (("lowbit.quantize.runner", "save_checkpoint", 1), LAYERS),
    "after the shards of the output": ((SAVE, "copy_side_files", 1), LAYERS),
    "before the last rename": ((SAVE, "put_in_place", 1), LAYERS),
}
RECIPES = {
    "gptq": [],
    "gptq, parallel, asymmetric": ["--order", "parallel", "--scheme", "W4A16_ASYM"],
    "gptq in bfloat16": ["--dtype", "bfloat16", "--scheme", "W3A16"],
    "gptq, parallel, quantized inputs": ["--order", "parallel", "--scheme", "W8A8"],
    "smoothquant and rtn": ["--method", "smoothquant+rtn", "--scheme", "W8A8"],
}


@pytest.fixture(scope="module")
def unbroken(
    tiny: Path, calibration: list[str], command: Commands, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """Hashes of the files of an unbroken run of each recipe."""
    found = {}
    for name, options in RECIPES.items():
        out = tmp_path_factory.mktemp("unbroken") / "out"
        outcome = command("run", tiny, "-o", out, *calibration, *options)
        assert outcome.code == 0, outcome.stderr
        found[name] = hashes(out)
    assert len({h["model.safetensors"] for h in found.values()}) == len(RECIPES)
    return found


def finished(out: Path) -> int:
    """Finished layers of the unfinished run of `out`."""
    return len(list(out.with_name(f"{out.name}.partial").glob("*.safetensors")))


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_run_ends_in_the_same_bytes(
    place: str,
    tiny: Path,
    calibration: list[str],
    command: Commands,
    unbroken: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    kill_at, layers = PLACES[place]
    out = tmp_path / "out"
    run = ["run", tiny, "-o", out, *calibration]
    assert command(*run, kill_at=kill_at).code == KILLED
    assert not out.exists()
    assert finished(out) == layers
    again = command(*run)
    assert again.code == 0, again.stderr
    assert (f"resuming after {counted(layers, 'finished layer')}" in again.stderr) == (layers > 0)
    assert hashes(out) == unbroken["gptq"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_killed_twice_ends_in_the_same_bytes(
    recipe: str,
    tiny: Path,
    calibration: list[str],
    command: Commands,
    unbroken: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    run = ["run", tiny, "-o", out, *calibration, *RECIPES[recipe]]
    assert command(*run, kill_at=(JOURNAL, "Journal.write", 3)).code == KILLED
    assert command(*run, kill_at=(JOURNAL, "Journal.write", 3)).code == KILLED
    assert finished(out) == 4
    again = command(*run, "--json")
    assert again.code == 0, again.stderr
    assert json.loads(again.stdout)["resumed_layers"] == 4
    assert hashes(out) == unbroken[recipe]


def test_a_run_that_fails_midway_says_what_is_kept(
    tiny: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    folder, out = copied(tiny, tmp_path / "model"), tmp_path / "out"
    broken = "model.layers.3.mlp.up_proj.weight"
    change_tensors(folder, lambda t: t[broken].fill_(torch.nan))
    failed = command("run", folder, "-o", out, *calibration)
    failed.refuses("NaN or infinite", f"kept in {out}.partial", "--restart", "remove the folder")
    assert finished(out) == 3


@pytest.mark.parametrize("place", ["StreamOutput.finish", "StreamOutput.close"])
def test_a_streamed_run_killed_ends_in_the_same_bytes(
    place: str, tiny: Path, command: Commands, tmp_path: Path
) -> None:
    run = ["run", tiny, "--method", "rtn", "-o"]
    assert command(*run, tmp_path / "unbroken").code == 0
    nth = {"StreamOutput.finish": 20, "StreamOutput.close": 1}[place]
    assert command(*run, tmp_path / "out", kill_at=(STREAM, place, nth)).code == KILLED
    assert not (tmp_path / "out").exists()
    assert command(*run, tmp_path / "out").code == 0
    assert hashes(tmp_path / "out") == hashes(tmp_path / "unbroken")
    assert {p.name for p in tmp_path.iterdir()} == {"out", "unbroken"}


def test_side_files_ride_along(tiny: Path, packed: Path) -> None:
    for name in ("NOTICE", "extra/notes.txt", "tokenizer.json", "chat_template.jinja"):
        assert (packed / name).read_bytes() == (tiny / name).read_bytes()


def test_a_run_killed_while_it_replaces_a_checkpoint(
    tiny: Path,
    calibration: list[str],
    command: Commands,
    packed: Path,
    unbroken: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    out = copied(packed, tmp_path / "out")
    run = ["run", tiny, "-o", out, *calibration, "--overwrite", "--scheme", "W3A16"]
    run += ["--dtype", "bfloat16"]
    assert command(*run, kill_at=(SAVE, "os.replace", RENAMES + 2)).code == KILLED
    assert not out.exists()
    replaced = tmp_path / "out.partial" / "replaced"
    assert hashes(replaced) == hashes(packed), "the old checkpoint is lost before the new is there"
    again = command(*run)
    assert again.code == 0, again.stderr
    assert hashes(out) == unbroken["gptq in bfloat16"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_checkpoint_is_whole_once_it_has_its_name(
    tiny: Path,
    calibration: list[str],
    command: Commands,
    unbroken: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    run = ["run", tiny, "-o", out, *calibration]
    assert command(*run, kill_at=(JOURNAL, "Journal.remove", 1)).code == KILLED
    assert hashes(out) == unbroken["gptq"]
    command(*run).refuses(str(out), "exists", "--overwrite")
    assert command(*run, "--overwrite").code == 0
    assert hashes(out) == unbroken["gptq"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_run_says_how_to_go_on(
    tiny: Path,
    calibration: list[str],
    command: Commands,
    unbroken: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    run = ["run", tiny, "-o", out, *calibration]
    interrupt = f"""
import os, signal
from {JOURNAL} import Journal
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored in a background job
write = Journal.write
def interrupted(self, layer, *args):
    if layer.endswith(".2"):
        os.kill(os.getpid(), signal.SIGINT)
    write(self, layer, *args)
Journal.write = interrupted
"""
    outcome = in_new_interpreter(*run, before=interrupt)
    assert outcome.code == 130, outcome.stderr
    assert outcome.message == "interrupted"
    assert "the same command goes on after the last finished layer" in outcome.stderr
    assert not out.exists()
    assert finished(out) == 2
    assert command(*run).code == 0
    assert hashes(out) == unbroken["gptq"]


@pytest.fixture
def unfinished(tiny: Path, calibration: list[str], command: Commands, tmp_path: Path) -> list[str]:
    """The command of a run that was killed after its second layer; MODEL is a copy of `tiny`."""
    model = copied(tiny, tmp_path / "model")
    run = ["run", str(model), "-o", str(tmp_path / "out"), *calibration]
    assert command(*run, kill_at=(JOURNAL, "Journal.write", 3)).code == KILLED
    return run


def with_option(run: list[str], *option: str) -> list[str]:
    """`run` with an option's value replaced or added."""
    if option[0] not in run:
        return [*run, *option]
    at = run.index(option[0])
    return [*run[:at], *option, *run[at + 2 :]]


@pytest.mark.parametrize(
    ("option", "difference"),
    [
        (("--samples", "9"), "recipe.calibration.samples: 8 there, 9 here"),
        (("--scheme", "W3A16"), 'recipe.passes[0].scheme: "W4A16" there, "W3A16" here'),
        (("--dtype", "bfloat16"), 'recipe.execution.dtype: "float32" there, "bfloat16" here'),
        (("--ignore", "re:.*down_proj"), "recipe.passes[0].ignore: [] there"),
        (("--order", "parallel"), 'recipe.execution.order: "sequential" there'),
    ],
)
def test_another_recipe_is_not_mixed_in(
    option: tuple[str, ...], difference: str, unfinished: list[str], command: Commands
) -> None:
    other = with_option(unfinished, *option)
    message = command(*other).refuses(difference, "--restart")
    assert message.count(" there, ") <= 4
    out = Path(unfinished[3])
    assert finished(out) == 2 and not out.exists()
    assert command(*other, "--restart").code == 0
    restarted = hashes(out)
    shutil.rmtree(out)
    assert command(*other).code == 0
    assert hashes(out) == restarted


def test_other_inputs_are_not_mixed_in(
    unfinished: list[str],
    command: Commands,
    unbroken: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    text = tmp_path / "other.txt"
    text.write_text("Another text, in which nothing is said of foxes. " * 100)
    command(*with_option(unfinished, "--calib", str(text))).refuses(
        "recipe.calibration.source", "rows:", 'other.txt" here'
    )
    model = Path(unfinished[1])
    original = copied(model, tmp_path / "original")
    change_tensors(model, lambda t: t["model.norm.weight"].mul_(2))
    message = command(*unfinished).refuses("model's model.safetensors was written to since")
    seconds = message.partition("touch -d @")[2].partition(" ")[0]
    assert float(seconds) == pytest.approx((original / "model.safetensors").stat().st_mtime)
    shutil.rmtree(model)
    shutil.copytree(original, model)  # copy2: the time of change is the original's
    assert command(*unfinished).code == 0
    assert hashes(Path(unfinished[3])) == unbroken["gptq"]


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_damaged_journal_is_said(content: str, unfinished: list[str], command: Commands) -> None:
    journal = Path(f"{unfinished[3]}.partial") / "journal.json"
    journal.write_text(content)
    command(*unfinished).refuses("out.partial", "--restart")
    assert command(*unfinished, "--restart").code == 0


def flip(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("damage", [lambda d: d[:50], flip], ids=["cut", "flipped"])
@pytest.mark.parametrize("ending", ["safetensors", "report.json"])
def test_a_damaged_layer_is_made_anew(
    layer: int,
    damage: Callable[[bytes], bytes],
    ending: str,
    unfinished: list[str],
    command: Commands,
    unbroken: dict[str, dict[str, str]],
) -> None:
    file = Path(f"{unfinished[3]}.partial") / f"model.layers.{layer}.{ending}"
    file.write_bytes(damage(file.read_bytes()))
    outcome = command(*unfinished)
    assert outcome.code == 0
    assert f"made anew, for what was finished of them is damaged: model.layers.{layer}" in (
        outcome.stderr
    )
    assert "resuming after 1 finished layer" in outcome.stderr
    assert hashes(Path(unfinished[3])) == unbroken["gptq"]


def test_auto_keeps_the_dtype_that_the_run_began_with(
    tiny: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run = ["run", tiny, "-o", out, *calibration[:-2]]
    assert command(*run, kill_at=(JOURNAL, "Journal.write", 2)).code == KILLED
    journal = tmp_path / "out.partial" / "journal.json"
    begun = json.loads(journal.read_text())
    begun["dtype"] = {"float32": "bfloat16", "bfloat16": "float32"}[begun["dtype"]]
    journal.write_text(json.dumps(begun))  # as if the machine had been measured the other way
    again = command(*run, "--json")
    assert again.code == 0, again.stderr
    assert json.loads(again.stdout)["dtype"] == begun["dtype"]


def test_rows_that_were_dropped_stay_counted(
    story: Path, command: Commands, tmp_path: Path
) -> None:
    """One row of sixteen overflows, at its one "#"; OPT hands its MLP the rows flattened."""
    model = save_tiny(tmp_path / "model", FAMILIES["opt"]())
    token = byte_tokenizer().convert_tokens_to_ids("#")

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        row = tensors["model.decoder.embed_tokens.weight"][token]
        row[:32], row[32:] = 3e38, -3e38  # their difference is infinite

    change_tensors(model, poison)
    text = tmp_path / "text.txt"
    told = story.read_text()
    text.write_text(told[:100] + "#" + told[100:])
    out = tmp_path / "out"
    run = ["run", model, "-o", out, "--calib", text, "--samples", "16", "--seq-len", "64"]
    run += ["--dtype", "float32"]
    whole = command(*run)
    assert whole.code == 0, whole.stderr
    report = json.loads((out / "quantization_report.json").read_text())
    assert report["dropped_rows"] == 1
    expected = hashes(out)
    shutil.rmtree(out)
    assert command(*run, kill_at=("lowbit.quantize.runner", "save_checkpoint", 1)).code == KILLED
    assert command(*run).code == 0
    assert hashes(out) == expected


def test_what_is_not_an_unfinished_run_is_left_alone(
    tiny: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    partial.mkdir()
    (partial / "mine.safetensors").write_text("dear to me")
    for more in ([], ["--restart"]):
        command("run", tiny, "-o", out, *calibration, *more).refuses("out.partial", "move it away")
    assert (partial / "mine.safetensors").read_text() == "dear to me"


def test_only_what_is_replaced_is_deleted(
    packed: Path, tiny: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    out = copied(packed, tmp_path / "out")
    backup = copied(packed, tmp_path / "out.old")
    assert command("run", tiny, "-o", out, *calibration, "--overwrite").code == 0
    assert hashes(backup) == hashes(packed)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.old"]


def test_two_runs_do_not_share_an_output(
    unfinished: list[str], command: Commands, unbroken: dict[str, dict[str, str]]
) -> None:
    fcntl = pytest.importorskip("fcntl", reason="no file locks on this system")
    out = Path(unfinished[3])
    with (Path(f"{out}.partial") / "lock").open("ab") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        for more in ([], ["--restart"]):
            command(*unfinished, *more).refuses("another run is at work", "out.partial")
        assert finished(out) == 2 and not out.exists()
    assert command(*unfinished).code == 0
    assert hashes(out) == unbroken["gptq"]
