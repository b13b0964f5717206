"""GGUF file types beside llama.cpp's quantizer: size, divergence, time, by one protocol.

    python -m lowbit.evals.gguf_matrix --models DIR ... --calib FILE --text FILE --out DIR
        [--rows Q4_K_M,Q2_K/gptq] [--llama-cpp FOLDER] [--markdown docs/gguf.md]

Of each file type three files are made: weights rounded, rounded with an importance matrix, and by
GPTQ. With `--llama-cpp`, the folder of llama.cpp's programs, llama-quantize makes the same type
with the same importance matrix, and llama-perplexity measures every file too. Windows are its own
(ctx 512, the first half of each skipped), and what matrices read is rounded as llama.cpp rounds it
unless `--inputs exact` is given. `--imatrix-samples` takes more rows for the importance matrix,
which costs a forward pass, than GPTQ takes. Results are kept as by evals/accuracy_matrix.py.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..calib.text import load_text, load_tokenizer
from ..kernels.errors import UserError
from ..quantize.gguf.as_folder import folder_of
from .accuracy_matrix import WIDTH, write_tables
from .llamacpp_tools import LlamaTools
from .matrix_rows import Bar, MatrixRow, PeerRow, rows_named
from .matrix_study import BASE, RUN, ModelStudy, Settings, file_name, read_json, write_json
from .matrix_table import Result, rich_table, table
from .measure import measure_models
from .process_cost import run_command
from .protocols import llama_perplexity, tokenizing
from .report import Report
from .scorer import INPUTS

TOOL = "llama.cpp"
SHARES = {"Q4_K_M": 0.75, "Q4_0": 0.75, "Q3_K_M": 0.65, "IQ4_XS": 0.65}  # 1 of others: never worse
NATS = {"Q2_K": 1.2}  # where rounding is hardly a language model any more
TYPES = (
    "Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_K_S", "Q4_K_M", "Q5_0", "Q5_K_M",
    "Q6_K", "Q8_0",
)  # fmt: skip
METHODS = {"round": (), "imatrix": (), "gptq": ("--method", "gptq")}


def _bar(kind: str) -> Bar:
    """What a type's GPTQ row is held to: the same type rounded with the importance matrix, which
    are llama-quantize's bytes (docs/gguf.md), so that it can be told without its programs too;
    with them, llama-quantize's own file (`_held_to_peer`)."""
    if kind in NATS:
        return Bar(NATS[kind], "nats")
    return Bar(SHARES.get(kind, 1.0), f"{kind}/imatrix")


ROWS = tuple(
    MatrixRow(
        kind, method, options=("--type", kind, *options),
        bar=_bar(kind) if method == "gptq" else None,
    )
    for kind in TYPES
    for method, options in METHODS.items()
)  # fmt: skip
PEER_ROWS = tuple(PeerRow(TOOL, kind, "imatrix") for kind in TYPES)


@dataclass(frozen=True)
class GGUFSettings(Settings):
    """llama-perplexity's windows."""

    windows: int = 40
    ctx: int = 512
    together: int = 2
    imatrix_samples: int = 0  # rows of the importance matrix; 0: as many as `samples`
    inputs: str = "llama.cpp"  # of evals/scorer.py's INPUTS


FAST = {"samples": 4, "seq_len": 64, "windows": 1, "ctx": 64}


class GGUFStudy(ModelStudy):
    """The rows of one model. tools: llama.cpp's programs, None where there are none."""

    def __init__(
        self, model: Path, folder: Path, settings: GGUFSettings, tools: LlamaTools | None
    ) -> None:
        super().__init__(model, folder, settings)
        self._tools, self._sizes = tools, settings

    def _command(self, row: MatrixRow | PeerRow, out: Path, pythons: dict[str, str]) -> list[str]:
        out.unlink(missing_ok=True)
        if isinstance(row, PeerRow):
            assert self._tools is not None, row
            return self._tools.quantize_command(self._float(), out, row.family, self._imatrix())
        options = [*row.options, *([] if row.method == "round" else self._weighed())]
        if row.method == "gptq":
            options += self._calibration(self.settings.samples)
        return [*_quantize("export"), str(self.model), "-o", str(out), *options]

    def _weighed(self) -> list[str]:
        return ["--imatrix", str(self._imatrix())]

    def _calibration(self, samples: int) -> list[str]:
        s = self.settings
        return ["--calib", s.calib, "--samples", str(samples), "--seq-len", str(s.seq_len)]

    def _imatrix(self) -> Path:
        """The importance matrix of the calibration text, for every row that is weighed."""
        samples = self._sizes.imatrix_samples or self._sizes.samples
        return self._made_once("imatrix.gguf", "imatrix", *self._calibration(samples))

    def _float(self) -> Path:
        """The model in F16, which llama.cpp's programs start from."""
        return self._made_once("F16.gguf", "export", "--type", "F16")

    def _made_once(self, name: str, command: str, *options: str) -> Path:
        path = self.folder / name
        if not path.exists():
            run = [*_quantize(command), str(self.model), "-o", str(path), *options]
            run_command(run, self.folder / f"{name}.log")
        return path

    def _measured_folder(self, row: MatrixRow | PeerRow) -> Path:
        """The file's values as a model folder; llama.cpp measures the file itself before."""
        path = self._checkpoint(row)
        if self._tools is not None and not self._llama_file(row).exists():
            text, s = self._text_file(), self.settings
            found = self._tools.divergence(path, text, self._logits(), s.ctx, s.windows)
            write_json(self._llama_file(row), found._asdict())
        return folder_of(path, lambda line: None, self._scratch)

    def _report(self, folders: dict[str, Path], caches: dict[str, str]) -> Report:
        s = self._sizes
        windows = llama_perplexity(tokenizing(self._tokenizer), s.windows, s.ctx)
        return measure_models(
            folders, self._evaluation_text(), windows, base=BASE, dtype=s.dtype, inputs=s.inputs
        )

    def _remove(self, row: MatrixRow | PeerRow) -> None:
        self._checkpoint(row).unlink()
        shutil.rmtree(self._scratch / "gguf", ignore_errors=True)  # all that was measured with it

    def results(self) -> dict[str, Result]:
        found = super().results()
        for key, result in found.items():
            path = self.folder / f"{file_name(key)}.llama.json"
            if path.exists():
                found[key] = replace(result, llama_kld=read_json(path)["kld"])
        return found

    def _logits(self) -> Path:
        """What llama.cpp predicts with the model in F16."""
        path, s = self.folder / "F16.logits", self.settings
        if not path.exists():
            assert self._tools is not None
            unfinished = path.with_suffix(".partial")
            text = self._text_file()
            self._tools.keep_base(self._float(), text, unfinished, s.ctx, s.windows)
            unfinished.replace(path)
        return path

    def _text_file(self) -> Path:
        path = self.folder / "text.txt"
        if not path.exists():
            text = load_text(self.settings.text, "evaluation", load_tokenizer(self.model)).text
            path.write_text(text, encoding="utf-8", newline="")
        return path

    def _checkpoint(self, row: MatrixRow | PeerRow) -> Path:
        path = super()._checkpoint(row)
        return path.with_name(f"{path.name}.gguf")

    def _llama_file(self, row: MatrixRow | PeerRow) -> Path:
        return self.folder / f"{file_name(row.key)}.llama.json"


def _quantize(command: str) -> list[str]:
    return [sys.executable, "-c", RUN, command]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", type=Path, required=True)
    parser.add_argument("--rows", default="", help="TYPE or TYPE/METHOD, separated by commas")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--llama-cpp", type=Path, help="the folder of llama.cpp's programs")
    parser.add_argument("--redo", default="", help="keys whose results are thrown away first")
    parser.add_argument("--markdown", type=Path, help="a page whose table is replaced")
    parser.add_argument("--fast", action="store_true", help="few rows and windows")
    parser.add_argument("--calib", default="wikitext")
    parser.add_argument("--text", default="wikitext")
    parser.add_argument("--inputs", default=GGUFSettings.inputs, choices=INPUTS)
    for name in ("samples", "imatrix_samples", "seq_len", "windows", "ctx", "together"):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=getattr(GGUFSettings, name)
        )
    return parser


def main() -> None:
    parser = _parser()
    try:
        failed = _run(parser.parse_args())
    except UserError as e:
        parser.exit(2, f"error: {e}\n")
    if failed:
        parser.exit(1, "\n".join(["failed rows:", *failed]) + "\n")


def _run(args: argparse.Namespace) -> list[str]:
    """Do what is asked for and show it; the failed rows, each with its reason."""
    from rich.console import Console

    rows = rows_named([name for name in args.rows.split(",") if name], ROWS)
    tools = None
    if args.llama_cpp is not None:
        tools = LlamaTools(args.llama_cpp, torch.get_num_threads())
        rows = [_held_to_peer(row) for row in rows]
    sizes = FAST if args.fast else {name: getattr(args, name) for name in FAST}
    settings = GGUFSettings(
        args.calib, args.text, sizes["samples"], sizes["seq_len"], sizes["windows"], sizes["ctx"],
        together=args.together, imatrix_samples=args.imatrix_samples, inputs=args.inputs,
    )  # fmt: skip
    studies: list[ModelStudy] = []
    failed = []
    for model in args.models:
        study = GGUFStudy(model, args.out / model.name, settings, tools)
        study.forget([name for name in args.redo.split(",") if name])
        studies.append(study)
        study.run([*rows, *_peers(rows, tools)], {})
        write_tables(studies, rows, args.out, args.markdown)
        lines = table(rows, model.name, study.results())
        Console(width=max(WIDTH, Console().width)).print(rich_table(model.name, lines))
        failed += [f"{model.name}, {k}: {r.error}" for k, r in study.results().items() if r.error]
    return failed


def _held_to_peer(row: MatrixRow) -> MatrixRow:
    if row.bar is None or row.bar.of == "nats":
        return row
    return replace(row, bar=Bar(row.bar.limit, "peers"))


def _peers(rows: Sequence[MatrixRow], tools: LlamaTools | None) -> list[PeerRow]:
    families = {row.family for row in rows}
    return [] if tools is None else [row for row in PEER_ROWS if row.family in families]


if __name__ == "__main__":
    main()
