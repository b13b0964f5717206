"""The functions that `lowbit.quantize` offers, and that importing it costs nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import lowbit.quantize
import pytest
from lowbit.quantize import convert, plan, run, verify
from lowbit.quantize.conversion import ConvertResult
from lowbit.quantize.planning.report import PlanReport
from lowbit.quantize.recipe import Calibration, Recipe, WeightPass
from lowbit.quantize.run_result import RunResult
from lowbit.quantize.verification import VerifyReport


def test_the_face_returns_typed_results_and_prints_nothing(
    shallow: Path, story: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Progress is shown on standard error."""
    rows = Calibration(str(story), samples=4, seq_len=32)
    passes = (WeightPass(method="gptq", scheme="W4A16", group_size=32),)
    recipe = Recipe(passes, rows)
    planned = plan(shallow, recipe, timed=False)
    made = run(shallow, tmp_path / "w4", recipe)
    converted = convert(made.out, tmp_path / "gptq", "gptq", requantize=True)
    report = verify(converted.out, shallow)
    assert capfd.readouterr().out == ""
    assert isinstance(planned, PlanReport) and isinstance(made, RunResult)
    assert isinstance(converted, ConvertResult) and isinstance(report, VerifyReport)
    assert report.whole and len(report.errors) == len(planned.modules) == 14


@pytest.mark.parametrize("name", lowbit.quantize.FACE)
def test_the_face_is_functions_even_when_every_module_is_imported(name: str) -> None:
    module, _ = lowbit.quantize.FACE[name]
    importlib.import_module(f"lowbit.quantize.{module}")
    assert callable(getattr(lowbit.quantize, name))
    folder = Path(lowbit.quantize.__file__).parent
    hidden = [p for p in (folder / name, folder / f"{name}.py") if p.exists()]
    assert not hidden, f"{hidden[0]} would stand in the place of lowbit.quantize.{name}"


def test_the_face_is_what_the_package_says_it_exports() -> None:
    assert sorted(lowbit.quantize.__all__) == sorted(lowbit.quantize.FACE)


def test_importing_the_package_imports_nothing_slow() -> None:
    code = (
        "import sys, lowbit.quantize; "
        "print([m for m in ('torch', 'transformers', 'numpy', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsuch"):
        _ = lowbit.quantize.nonsuch  # type: ignore[attr-defined]
