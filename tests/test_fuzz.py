"""Damaged files of every kind are read or refused, never anything else; and the fuzzer notices."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from lowbit.evals import fuzz_targets
from lowbit.evals.fuzz import fuzz_with_hypothesis
from lowbit.evals.fuzz_targets import TARGETS, Target, make_sources
from lowbit.evals.fuzzer import Fuzzer
from lowbit.evals.mutations import mutate_bytes, mutate_header, mutate_json
from lowbit.quantize import verify

SEED = 1
EXAMPLES = {"header": 100, "sentencepiece": 100, "gguf": 40}
FEW = 15  # of a target whose inputs take longer


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
    for mutate, data in (
        (mutate_bytes, weights), (mutate_header, weights), (mutate_json, config),
    ):  # fmt: skip
        made = [mutate(data, random.Random(seed).randrange) for seed in (0, 0, 1, 2)]
        assert made[0] == made[1]
        assert len({data, *made}) > 2
