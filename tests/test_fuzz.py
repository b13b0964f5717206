"""Damaged files of every kind are read or refused, never anything else; and the fuzzer notices."""

from __future__ import annotations

import mmap
import random
from pathlib import Path

import pytest
from lowbit.calib.safe_files import DamagedFile
from lowbit.evals import fuzz_targets
from lowbit.evals.fuzz import fuzz_with_hypothesis
from lowbit.evals.fuzz_targets import TARGETS, Target, make_sources
from lowbit.evals.fuzzer import Fuzzer
from lowbit.evals.gguf_mutations import mutate_gguf
from lowbit.evals.gguf_table import read_table, write_table
from lowbit.evals.mutations import mutate_bytes, mutate_header, mutate_json
from lowbit.quantize import verify
from lowbit.quantize.gguf.container import read_container

SEED = 1
EXAMPLES = {"header": 100, "sentencepiece": 100, "gguf": 40}
FEW = 15  # of a target whose inputs take longer
TRIALS = 60


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sources(tmp_path_factory.mktemp("sources"))


def test_what_is_damaged_was_whole(sources: Path) -> None:
    for name in ("w4", "gptq", "gguf/m.gguf"):
        assert verify(sources / name).findings == (), name


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_are_read_or_refused(name: str, sources: Path, tmp_path: Path) -> None:
    fuzzer = Fuzzer(name, sources, tmp_path)
    fuzz_with_hypothesis(fuzzer, 0, SEED, EXAMPLES.get(name, FEW))
    assert fuzzer.inputs >= FEW
    assert not fuzzer.faults, fuzzer.facts()


def test_a_reader_that_fails_otherwise_is_a_fault(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (sources / "gguf" / "tokenizer.model").stat().st_size

    def fails(folder: Path) -> None:
        if (folder / "tokenizer.model").stat().st_size < size:
            raise ZeroDivisionError("a damaged number")

    target = Target("gguf", "tokenizer.model", (mutate_bytes,), (fails,))
    monkeypatch.setitem(fuzz_targets.TARGETS, "sentencepiece", target)
    fuzzer = Fuzzer("sentencepiece", sources, tmp_path, keep=tmp_path / "kept")
    choices = random.Random(SEED)
    raised = 0
    for _ in range(FEW):
        try:
            fuzzer.try_one(choices.randrange)
        except ZeroDivisionError:
            raised += 1
    assert fuzzer.inputs == FEW and fuzzer.faults.total() == raised > 0
    (fault,) = fuzzer.faults
    assert fault.error == "ZeroDivisionError: a damaged number"
    (kept,) = (tmp_path / "kept").iterdir()
    with pytest.raises(ZeroDivisionError):
        (tmp_path / "tokenizer.model").write_bytes(kept.read_bytes())
        fails(tmp_path)


def test_damage_follows_from_the_choices_alone(sources: Path) -> None:
    weights = next((sources / "w4").glob("model-00001*")).read_bytes()
    config = (sources / "w4" / "config.json").read_bytes()
    gguf = (sources / "gguf" / "m.gguf").read_bytes()
    for mutate, data in (
        (mutate_bytes, weights), (mutate_header, weights), (mutate_json, config),
        (mutate_gguf, gguf),
    ):  # fmt: skip
        made = [mutate(data, random.Random(seed).randrange) for seed in (0, 0, 1, 2)]
        assert made[0] == made[1]
        assert len({data, *made}) > 2


@pytest.mark.parametrize("name", ["m.gguf", "imatrix.gguf"])
def test_a_gguf_table_is_written_back_as_it_was_read(name: str, sources: Path) -> None:
    data = (sources / "gguf" / name).read_bytes()
    assert write_table(read_table(data)) == data


def test_any_choices_give_a_gguf_file(sources: Path) -> None:
    whole = (sources / "gguf" / "m.gguf").read_bytes()
    for seed in range(10 * TRIALS):
        assert mutate_gguf(whole, random.Random(seed).randrange)[:4] == b"GGUF"


def test_damaged_gguf_keys_reach_the_readers_of_their_values(sources: Path, tmp_path: Path) -> None:
    """Most inputs have a whole container, so that what is tried is behind its check."""
    whole = (sources / "gguf" / "m.gguf").read_bytes()
    path = tmp_path / "m.gguf"
    past = {mutate_gguf: 0, mutate_bytes: 0}
    faults: set[str] = set()
    for mutate in past:
        for seed in range(TRIALS):
            path.write_bytes(mutate(whole, random.Random(seed).randrange))
            past[mutate] += _opens(path)
            if mutate is mutate_gguf:
                faults |= {f.fault for f in verify(path).findings}
    assert past[mutate_gguf] > 0.75 * TRIALS > past[mutate_bytes]
    assert faults >= {"GGUF key", "GGUF shape", "GGUF tensor missing", "GGUF tokenizer"}


def _opens(path: Path) -> bool:
    """Whether the container is whole."""
    if not path.stat().st_size:
        return False
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            read_container(data, path)
        except DamagedFile:
            return False
    return True
