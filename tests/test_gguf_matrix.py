"""The table of GGUF file types: rows made and measured, llama.cpp's beside them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lowbit.evals import gguf_matrix, matrix_study
from lowbit.evals.gguf_matrix import PEER_ROWS, ROWS
from lowbit.evals.llamacpp_tools import LlamaTools, parsed
from lowbit.evals.matrix_table import Result, verdict
from lowbit.evals.process_cost import ProcessCost
from lowbit.kernels.errors import UserError
from lowbit.quantize.gguf.export import export_gguf
from lowbit.quantize.gguf.file_types import FILE_TYPES

from .gguf_models import tiny_llama

SAID = """
====== Perplexity statistics ======
Mean PPL(Q)                   :  30.125000 ±   0.100000
Mean PPL(base)                :  26.620000 ±   0.100000

====== KL divergence statistics ======
Mean    KLD:   0.139800 ±   0.003000
Maximum KLD:   4.000000

====== Token probability statistics ======
Mean    Δp: -0.100 ± 0.050 %
Same top p: 77.800 ± 0.400 %
"""


def test_what_llama_perplexity_prints_is_read() -> None:
    assert parsed(SAID) == (0.1398, 0.003, pytest.approx(0.778), 30.125)
    with pytest.raises(UserError, match="printed no"):
        parsed("error: cannot open the file")


def test_every_row_is_a_file_type() -> None:
    assert {row.family for row in ROWS} <= FILE_TYPES.keys()
    assert {row.family for row in PEER_ROWS} == {row.family for row in ROWS}
    assert all((row.bar is not None) == (row.method == "gptq") for row in ROWS)


def test_a_gptq_row_is_held_to_the_same_type_rounded() -> None:
    rows = {row.key: row for row in ROWS}
    assert all(r.bar.of in (f"{r.family}/imatrix", "nats") for r in ROWS if r.bar is not None)
    results = {
        f"Q4_0/{method}": Result(f"Q4_0/{method}", "Q4_0", method, perplexity=20.0, kld=kld)
        for method, kld in (("imatrix", 0.2), ("gptq", 0.14))
    }
    found = verdict(rows["Q4_0/gptq"].bar, results["Q4_0/gptq"], "m", results)
    assert found is not None and found.passed and found.ratio == pytest.approx(0.7)
    worse = replace(results["Q4_0/gptq"], kld=0.16)
    found = verdict(rows["Q4_0/gptq"].bar, worse, "m", results)
    assert found is not None and not found.passed


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs that do what llama.cpp's do, with fixed answers."""
    folder = tmp_path / "bin"
    folder.mkdir()
    quantize = "import shutil, sys; shutil.copy(sys.argv[-4], sys.argv[-3])"
    perplexity = (
        "import pathlib, sys; a = sys.argv; base = a[a.index('--kl-divergence-base') + 1]; "
        "pathlib.Path(base).touch(); "
        f"print({SAID!r} if '--kl-divergence' in a else 'kept')"
    )
    for name, code in (("llama-quantize", quantize), ("llama-perplexity", perplexity)):
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{code}\n", encoding="utf-8")
        path.chmod(0o755)
    return folder


def test_rows_are_made_measured_and_kept(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path / "m")
    text = tmp_path / "some.txt"
    text.write_text("the thin tin then in a thing, and a hat in the bin " * 80)
    made: list[str] = []
    run = matrix_study.run_command

    def run_here(command: list[str], log: Path) -> ProcessCost:
        made.append(log.stem)
        if "imatrix" in command:
            assert command[command.index("--samples") + 1] == "6", "its own number of rows"
            out = Path(command[command.index("-o") + 1])
            out.write_bytes(b"")
            return ProcessCost(1.0, 1.0, 1)
        if "export" not in command:
            return run(command, log)
        out = Path(command[command.index("-o") + 1])
        export_gguf(model, out, command[command.index("--type") + 1], progress=False)
        return ProcessCost(2.0, 3.0, 10**8)

    monkeypatch.setattr(matrix_study, "run_command", run_here)
    monkeypatch.setattr(gguf_matrix, "run_command", run_here)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- end of table -->\nafter\n")
    out = tmp_path / "out"
    arguments = [
        "matrix", "--models", str(model), "--calib", str(text), "--text", str(text), "--fast",
        "--out", str(out), "--rows", "Q4_0", "--imatrix-samples", "6", "--llama-cpp", str(programs),
        "--markdown", str(page),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    gguf_matrix.main()
    rows = ["Q4_0__round", "Q4_0__imatrix", "Q4_0__gptq", "llama.cpp__Q4_0__imatrix"]
    assert [name for name in made if "Q4_0" in name] == rows
    results = json.loads((out / "matrix.json").read_text())["m"]["results"]
    assert results["Q4_0/round"]["kld"] > 0 and results["Q4_0/round"]["nbytes"] > 0
    assert 4.5 < results["Q4_0/round"]["bits"] < 10
    assert results["llama.cpp/Q4_0/imatrix"]["kld"] < results["Q4_0/round"]["kld"], "the F16 file"
    shown = page.read_text()
    assert shown.startswith("before\n") and shown.endswith("after\n") and "old" not in shown
    assert "1 > 0.75 of peers: missed" in shown, (
        "as far from F16 as llama-quantize's, as llama.cpp says"
    )
    assert "0.13980" in shown and "KLD in llama.cpp" in shown and "file, MB" in shown
    assert not list((out / "m" / "checkpoints").iterdir())
    before = len(made)
    gguf_matrix.main()
    assert len(made) == before, "what is done is not done again"


def test_a_folder_without_the_programs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no llama-quantize"):
        LlamaTools(tmp_path, 1)
