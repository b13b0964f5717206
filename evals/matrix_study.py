"""The rows of the accuracy matrix on one model: run, measured, kept, one file for each.

A row goes through two states on disk: KEY.cost.json once its checkpoint is whole, KEY.result.json
once that is measured and removed. What is killed in between goes on from there.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ..calib.shards import Shards
from ..calib.text import Text, load_text, load_tokenizer, token_rows
from ..kernels.errors import UserError
from . import peers
from .matrix_rows import MatrixRow, PeerRow
from .matrix_table import Result
from .measure import measure_models
from .process_cost import CommandFailed, run_command
from .protocols import plan_windowing
from .report import Report, Row

BASE = "base"
RUN = "from lowbit.quantize.cli import main; main()"


@dataclass(frozen=True)
class Settings:
    """The protocol: calibration rows, windows of the evaluation text, dtype of measuring.

    together: how many checkpoints are measured in one pass, each held in memory, so that the
    original model runs once for all of them.
    """

    calib: str
    text: str
    samples: int = 128
    seq_len: int = 512
    windows: int = 10
    ctx: int = 2048
    dtype: str = "float32"
    together: int = 4
    skip: int = 0


UNSEEN = ("together", "keep")  # settings that change no number
FAST = {"samples": 4, "seq_len": 128, "windows": 1, "ctx": 256}


class ModelStudy:
    """The rows of one model: what is done is below `folder`, what is not is done by `run`."""

    def __init__(self, model: Path, folder: Path, settings: Settings) -> None:
        self.model, self.folder, self.settings = model, folder, settings
        self._scratch = folder / "checkpoints"
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._tokenizer = load_tokenizer(model)
        self._check_identity()

    def run(self, rows: Sequence[MatrixRow | PeerRow], pythons: dict[str, str]) -> None:
        """Make and measure every row without a result. pythons: each peer's interpreter."""
        waiting: list[MatrixRow | PeerRow] = []
        for row in rows:
            if self._result_file(row).exists():
                continue
            try:
                if _needs_a_run(row) and not self._cost_file(row).exists():
                    self._make(row, pythons)
            except CommandFailed as e:
                self._keep(row, error=str(e))
                continue
            waiting.append(row)
            if len(waiting) == self.settings.together:
                self._measure(waiting)
                waiting = []
        self._measure(waiting)

    def forget(self, keys: Sequence[str]) -> None:
        """Throw the results of `keys` away."""
        for key in keys:
            for end in ("result", "cost"):
                (self.folder / f"{file_name(key)}.{end}.json").unlink(missing_ok=True)

    def results(self) -> dict[str, Result]:
        """The finished rows by key."""
        found = [read_json(path) for path in sorted(self.folder.glob("*.result.json"))]
        return {data["key"]: Result(**data) for data in found}

    def protocol(self) -> dict[str, Any] | None:
        """What the last pass of measuring was, as its report says; None before the first."""
        path = self.folder / "protocol.json"
        return read_json(path) if path.exists() else None

    def _make(self, row: MatrixRow | PeerRow, pythons: dict[str, str]) -> None:
        """Run the row's command; its checkpoint and its cost are then there."""
        command = self._command(row, self._checkpoint(row), pythons)
        cost = run_command(command, self.folder / f"{file_name(row.key)}.log")
        write_json(self._cost_file(row), cost._asdict())

    def _command(self, row: MatrixRow | PeerRow, out: Path, pythons: dict[str, str]) -> list[str]:
        """What makes the row's checkpoint `out`."""
        if isinstance(row, PeerRow):
            shutil.rmtree(out, ignore_errors=True)
            script, rows = str(Path(peers.__file__)), str(self._calibration_rows())
            return [pythons[row.tool], script, row.key, str(self.model), rows, str(out)]
        return [sys.executable, "-c", RUN, *self._run_options(row, out)]

    def _run_options(self, row: MatrixRow, out: Path) -> list[str]:
        s = self.settings
        options = ["run", str(self.model), "-o", str(out), "--overwrite", "--restart"]
        options += ["--calib", s.calib, "--samples", str(s.samples), "--seq-len", str(s.seq_len)]
        options += row.options
        if row.passes:
            recipe = self._scratch / f"{file_name(row.key)}.yaml"
            data = {"passes": list(row.passes)} | ({"budget": row.budget} if row.budget else {})
            recipe.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
            options += ["--recipe", str(recipe)]
        return options

    def _calibration_rows(self) -> Path:
        """The rows that lowbit's runs calibrate on, as token ids in a file."""
        path = self.folder / "rows.json"
        if not path.exists():
            s = self.settings
            text = load_text(s.calib, "calibration", self._tokenizer)
            write_json(path, token_rows(text, self._tokenizer, s.samples, s.seq_len).tolist())
        return path

    def _measure(self, rows: Sequence[MatrixRow | PeerRow]) -> None:
        """Measure rows together; where that fails, one by one, to know which cannot be measured."""
        try:
            if rows:
                self._measure_together(rows)
        except UserError as e:
            if len(rows) == 1:
                self._keep(rows[0], error=str(e))
                return
            for row in rows:
                self._measure([row])

    def _measure_together(self, rows: Sequence[MatrixRow | PeerRow]) -> None:
        """Measure checkpoints in one pass beside the original, keep the results, remove them."""
        folders = {row.key: self._measured_folder(row) for row in rows}
        caches = {row.key: row.kv for row in rows if isinstance(row, MatrixRow) and row.kv}
        report = self._report({BASE: self.model, **folders}, caches)
        write_json(self.folder / "protocol.json", _protocol(report))
        measured = {row.name: row for row in report.rows}
        for row in rows:
            self._keep(row, measured[row.key], measured[BASE])
            if _needs_a_run(row):
                self._remove(row)

    def _report(self, folders: dict[str, Path], caches: dict[str, str]) -> Report:
        """The measured `folders`, the original model among them as BASE."""
        s = self.settings
        windowing = plan_windowing([self.model], s.ctx, windows=s.windows, skip=s.skip)
        return measure_models(
            folders, self._evaluation_text(), windowing, base=BASE, dtype=s.dtype, kv=caches
        )

    def _measured_folder(self, row: MatrixRow | PeerRow) -> Path:
        return self._checkpoint(row)

    def _remove(self, row: MatrixRow | PeerRow) -> None:
        """Remove what the row's command has made; its result is kept."""
        shutil.rmtree(self._checkpoint(row))

    def _keep(
        self,
        row: MatrixRow | PeerRow,
        measured: Row | None = None,
        base: Row | None = None,
        error: str | None = None,
    ) -> None:
        """Write the row's result: the last thing that is done for it."""
        tool = row.tool if isinstance(row, PeerRow) else None
        result = Result(row.key, row.family, row.method, tool, error=error)
        if measured is not None and base is not None and measured.divergence is not None:
            assert measured.size is not None, row
            cost = read_json(self._cost_file(row)) if _needs_a_run(row) else {}
            result = replace(
                result,
                perplexity=measured.perplexity.perplexity,
                original_perplexity=base.perplexity.perplexity,
                kld=measured.divergence.kld_mean,
                kld_stderr=measured.divergence.kld_mean_stderr,
                top1=measured.divergence.top1,
                bits=measured.size.quantized_bits_per_weight or measured.size.bits_per_weight,
                nbytes=measured.size.file_bytes,
                **cost,
            )
        write_json(self._result_file(row), asdict(result))

    def _evaluation_text(self) -> Text:
        return load_text(self.settings.text, "evaluation", self._tokenizer)

    def _check_identity(self) -> None:
        """UserError when the folder holds results by another protocol or of another model."""
        tensors = Shards(self.model).info
        files = {info.file for info in tensors.values()}
        calibration = load_text(self.settings.calib, "calibration", self._tokenizer)
        here = {
            **{k: v for k, v in asdict(self.settings).items() if k not in UNSEEN},
            "calib": calibration.sha256,
            "text": self._evaluation_text().sha256,
            "bytes": sum((self.model / f).stat().st_size for f in files),
        }
        path = self.folder / "settings.json"
        there = read_json(path) if path.exists() else here
        for key, value in here.items():
            if there.get(key) != value:
                raise UserError(
                    f"{self.folder} holds results of {key} = {there.get(key)}, now it is {value}; "
                    "give another --out"
                )
        write_json(path, here)

    def _checkpoint(self, row: MatrixRow | PeerRow) -> Path:
        """What is measured: the model itself where the cache alone is quantized."""
        if not _needs_a_run(row):
            return self.model
        return self._scratch / file_name(row.key)

    def _cost_file(self, row: MatrixRow | PeerRow) -> Path:
        """The sign of a whole checkpoint: it is written after it."""
        return self.folder / f"{file_name(row.key)}.cost.json"

    def _result_file(self, row: MatrixRow | PeerRow) -> Path:
        return self.folder / f"{file_name(row.key)}.result.json"


def _needs_a_run(row: MatrixRow | PeerRow) -> bool:
    """Whether the row has a checkpoint of its own."""
    return isinstance(row, PeerRow) or row.kv is None


def file_name(key: str) -> str:
    """A row's key as the beginning of its files' names."""
    return key.replace("/", "__")


def _protocol(report: Report) -> dict[str, Any]:
    whole = report.to_dict()
    return {key: whole[key] for key in ("protocol", "environment")}


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write under a temporary name, then give the file its name: a file that is there is whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
