"""Fixtures that several test files share: the command, a small model, a text, a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .command import Asked, Commands
from .models import SENTENCE, deep_llama
from .small_disk import SmallDisk


def pytest_configure(config: pytest.Config) -> None:
    """One thread where OMP_NUM_THREADS names no other number: for products as small as the tests',
    threads spin longer for each other than they work, many times so on a busy machine. Without a
    GPU Triton kernels run in its interpreter, chosen as they are imported."""
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where tests of Triton kernels put their tensors: a GPU, or a CPU for the interpreter."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def kernel_dtypes(kernel_device: torch.device) -> tuple[torch.dtype, ...]:
    """The float dtypes that kernels are right in there: the interpreter rounds bfloat16 wrongly."""
    on_gpu = (torch.bfloat16,) if kernel_device.type == "cuda" else ()
    return torch.float16, *on_gpu


@pytest.fixture
def nan_outputs() -> Iterator[None]:
    """What is allocated and never written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(9).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


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


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers. Not to be changed: copy it."""
    return deep_llama(tmp_path_factory.mktemp("models") / "shallow", layers=2)


@pytest.fixture(scope="session")
def shallow_packed(
    shallow: Path,
    calibration: list[str],
    command: Commands,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("packed") / "shallow-w4"
    assert command("run", shallow, "-o", out, *calibration).code == 0
    return out


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk that can be filled."""
    disk = SmallDisk(tmp_path / "disk")
    yield disk
    disk.unmount()


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A place for output, at which nothing may be when the test is over."""
    yield tmp_path / "out.gguf"
    assert not (tmp_path / "out.gguf").exists(), "a refused command left output"


@pytest.fixture
def asked(calibration: list[str], story: Path, out: Path) -> dict[str, Asked]:
    """Each command by name: from a model to its arguments."""
    evaluated = ["--text", story, "--ctx", "64", "--windows", "1"]
    return {
        "plan": lambda model: ["plan", model, "-o", out, *calibration, "--no-timing"],
        "run": lambda model: ["run", model, "-o", out, *calibration],
        "inspect": lambda model: ["inspect", model],
        "generate": lambda model: ["generate", model, "the dog", "--max-tokens", "2"],
        "eval": lambda model: ["eval", model, *evaluated],
        "export": lambda model: ["export", model, "-o", out],
    }
