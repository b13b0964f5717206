"""Many quantizations of one model: each made, measured beside the original and kept, once.

What is done lies below the output folder, a file for each step of each candidate, as the accuracy
matrix has it (evals/matrix_study.py): the same command goes on where it was killed, an unfinished
checkpoint after its last finished layer. The results file is assembled from these files alone.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..calib.text import tokenize
from ..kernels.errors import UserError
from ..quantize.gguf.as_folder import folder_of
from ..quantize.recipe import Recipe
from .definitions import definitions
from .made import made
from .matrix_rows import MatrixRow, PeerRow
from .matrix_study import BASE, RUN, ModelStudy, Settings, file_name, read_json, write_json
from .measure import measure_models
from .protocols import chosen_windowing
from .report import Report, Row, plain
from .results import header
from .speed import PROMPT_TOKENS, SpeedPlan, decode_speed_apart
from .windows import Windowing

GGUF_METHODS = {
    "round": (), "imatrix": ("--imatrix", "auto"), "gptq": ("--method", "gptq"),
}  # fmt: skip


@dataclass(frozen=True)
class Candidate(MatrixRow):
    """One quantization. recipe: of a checkpoint; gguf: the file's type, in place of one."""

    recipe: Recipe | None = None
    gguf: str | None = None


@dataclass(frozen=True)
class CompareSettings(Settings):
    """protocol: windows by name, in place of ctx. device: where all of it runs. speed: time each
    checkpoint's decode, too. keep: leave the checkpoints where they are made."""

    dtype: str = "auto"
    protocol: str | None = None
    device: str = "auto"
    speed: bool = False
    keep: bool = True


class Comparison(ModelStudy):
    """The candidates of one model. `say` is told what has been done."""

    settings: CompareSettings

    def __init__(
        self, model: Path, folder: Path, settings: CompareSettings, say: Callable[[str], None]
    ) -> None:
        super().__init__(model, folder, settings)
        self._say = say

    def windowing(self) -> Windowing:
        """Of the evaluation text."""
        s = self.settings
        given = {name: value for name, value in (("ctx", s.ctx), ("skip", s.skip)) if value}
        return chosen_windowing(s.protocol, [self.model], self._tokenizer, s.windows or None, given)

    def results_file(self, candidates: Sequence[Candidate]) -> dict[str, Any]:
        """The results of those candidates that have one. UserError where none has."""
        protocol = self.protocol()
        rows = [self._kept(c.key) for c in candidates if self._row_file(c.key).exists()]
        if protocol is None or not rows:
            raise UserError(f"nothing in {self.folder} has been measured yet")
        noise = self.folder / "noise.json"
        results = {
            **header("compare"),
            **protocol,
            "rows": [self._kept(BASE), *rows],
            "noise_floor": read_json(noise) if noise.exists() else None,
        }
        return {**results, "definitions": definitions(results)}

    def errors(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Why those without a result have none, by key."""
        found, keys = self.results(), {c.key for c in candidates}
        return {k: r.error for k, r in found.items() if k in keys and r.error is not None}

    def _kept(self, key: str) -> dict[str, Any]:
        return read_json(self._row_file(key))

    def _make(self, row: MatrixRow | PeerRow, pythons: dict[str, str]) -> None:
        self._say(f"making {row.key}")
        super()._make(row, pythons)

    def _command(self, row: MatrixRow | PeerRow, out: Path, pythons: dict[str, str]) -> list[str]:
        assert isinstance(row, Candidate), row
        s = self.settings
        quantize = [sys.executable, "-c", RUN]
        if row.gguf is None:
            assert row.recipe is not None, row
            recipe = self._scratch / f"{file_name(row.key)}.yaml"
            recipe.write_text(row.recipe.to_yaml(), encoding="utf-8")
            options = ["-o", str(out), "--recipe", str(recipe), "--overwrite"]
            return [*quantize, "run", str(self.model), *options, "--device", s.device]
        options = ["-o", str(out), "--type", row.gguf, "--overwrite", *row.options]
        if row.options:
            options += ["--calib", s.calib, "--samples", str(s.samples)]
            options += ["--seq-len", str(s.seq_len)]
        return [*quantize, "export", str(self.model), *options]

    def _report(self, folders: dict[str, Path], caches: dict[str, str]) -> Report:
        s, noise = self.settings, self.folder / "noise.json"
        self._say("measuring " + ", ".join(key for key in folders if key != BASE))
        report = measure_models(
            folders, self._evaluation_text(), self.windowing(), base=BASE, dtype=s.dtype,
            device=s.device, kv=caches, protocol=s.protocol,
            noise_floor=not noise.exists() and self._has_noise_floor(),
        )  # fmt: skip
        if report.noise_floor is not None:
            write_json(noise, plain(report.noise_floor))
        return report

    def _has_noise_floor(self) -> bool:
        """Whether the base is measured in another dtype than the floor's."""
        dtype = self.settings.dtype
        on_cpu = self.settings.device in ("auto", "cpu") and not torch.cuda.is_available()
        return dtype == "float32" or (dtype == "auto" and on_cpu)

    def _keep(
        self,
        row: MatrixRow | PeerRow,
        measured: Row | None = None,
        base: Row | None = None,
        error: str | None = None,
    ) -> None:
        if measured is not None and base is not None:
            assert isinstance(row, Candidate), row
            if not self._row_file(BASE).exists():
                self._write_row(BASE, base, self.model, None)
            cost = read_json(self._cost_file(row))
            how = {"method": row.method, "scheme": row.family}
            how |= {} if row.recipe is None else made(row.recipe, None)
            path = self._checkpoint(row)
            self._write_row(row.key, measured, None if row.gguf else path, {**how, **cost}, path)
        super()._keep(row, measured, base, error)

    def _write_row(
        self,
        key: str,
        measured: Row,
        timed: Path | None,
        how: dict[str, Any] | None,
        path: Path | None = None,
    ) -> None:
        """Keep a row whole. timed: what decodes in our runtime; a GGUF file does so in llama.cpp,
        and its values in ours would say nothing of that."""
        if self.settings.speed and timed is not None:
            ids = tokenize(self._evaluation_text().text, self._tokenizer, PROMPT_TOKENS).tolist()
            speed = decode_speed_apart(timed, SpeedPlan(ids), self.settings.device)
            measured = measured._replace(speed=speed)
        row = {**plain(measured), "made": how}
        write_json(self._row_file(key), row if path is None else {**row, "path": str(path)})

    def _row_file(self, key: str) -> Path:
        return self.folder / f"{file_name(key)}.row.json"

    def _measured_folder(self, row: MatrixRow | PeerRow) -> Path:
        path = self._checkpoint(row)
        gguf = isinstance(row, Candidate) and row.gguf
        return folder_of(path, lambda line: None, self._scratch) if gguf else path

    def _checkpoint(self, row: MatrixRow | PeerRow) -> Path:
        path = super()._checkpoint(row)
        gguf = isinstance(row, Candidate) and row.gguf
        return path.with_name(f"{path.name}.gguf") if gguf else path

    def _remove(self, row: MatrixRow | PeerRow) -> None:
        shutil.rmtree(self._scratch / "gguf", ignore_errors=True)  # values that a file stands for
        path = self._checkpoint(row)
        if self.settings.keep:
            return
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def gguf_candidate(name: str) -> Candidate:
    """Of "Q4_K_M", "Q4_K_M+imatrix" or "Q4_K_M+gptq"."""
    file_type, _, method = name.partition("+")
    method = method or "round"
    if method not in GGUF_METHODS:
        known = ", ".join(f"+{m}" for m in GGUF_METHODS if m != "round")
        raise UserError(f"'{name}': a GGUF type takes nothing behind it, or one of {known}")
    return Candidate(file_type, method, options=GGUF_METHODS[method], gguf=file_type)


def settings_of(values: dict[str, Any]) -> CompareSettings:
    """The settings with the values that are not None in place of the defaults."""
    return CompareSettings(**{**asdict(CompareSettings("", "")), **{
        key: value for key, value in values.items() if value is not None
    }})  # fmt: skip
