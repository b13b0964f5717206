"""Fixtures that several test files share: the command, a small model, a text, a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .command import Commands
from .models import SENTENCE, deep_llama


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """`quantize`, each call in a process of its own."""
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of six layers. Not to be changed: copy it."""
    return deep_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of about 16,000 byte tokens."""
    file = tmp_path_factory.mktemp("text") / "story.txt"
    file.write_text(SENTENCE * 200, encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def calibration(story: Path) -> list[str]:
    """Options of a quick run."""
    return ["--calib", str(story), "--samples", "8", "--seq-len", "64", "--dtype", "float32"]


@pytest.fixture(scope="session")
def packed(
    tiny: Path, calibration: list[str], command: Commands, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A W4A16 checkpoint of `tiny`. Not to be changed: copy it."""
    out = tmp_path_factory.mktemp("packed") / "tiny-w4"
    outcome = command("run", tiny, "-o", out, *calibration)
    assert outcome.code == 0, outcome.stderr
    return out
