"""Every method on every model, beside the peers: one table, by one protocol.

    python -m lowbit.evals.accuracy_matrix --models DIR ... --calib FILE --text FILE --out DIR
        [--rows W4A16-g64,W8A8/gptq] [--peer llm-compressor=PYTHON] [--markdown docs/accuracy.md]

Each row is a `quantize run` of its own, timed as a whole process; its checkpoint is measured by
evals/measure.py and removed. A peer (evals/peers.py) runs in the Python that is given for it, on
the same calibration rows, and is measured the same way. A row's result is a JSON file below
`--out`: a run that was killed goes on with the rows that have none. `--fast` takes few rows and
windows, to see that everything works.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from ..kernels.errors import UserError
from .matrix_rows import ROWS, MatrixRow, chosen_rows, peers_of
from .matrix_study import FAST, ModelStudy, Settings, write_json
from .matrix_table import markdown_table, rich_table, table

WIDTH = 150  # characters that the table needs; a narrower terminal wraps its lines
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def write_tables(
    studies: Sequence[ModelStudy], rows: Sequence[MatrixRow], out: Path, markdown: Path | None
) -> None:
    """matrix.json and matrix.md below `out`; the table also between the marks of `markdown`."""
    sections, models = [], {}
    for study in studies:
        name, results = study.model.name, study.results()
        lines = table(rows, name, results)
        protocol = study.protocol()
        models[name] = {
            "protocol": protocol,
            "results": {key: asdict(result) for key, result in results.items()},
        }
        sections += [f"### {name}", "", markdown_table(lines), "", *_protocol_lines(study), ""]
    write_json(out / "matrix.json", models)
    text = "\n".join(sections)
    (out / "matrix.md").write_text(text, encoding="utf-8")
    if markdown is not None:
        page = markdown.read_text(encoding="utf-8")
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        markdown.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def _protocol_lines(study: ModelStudy) -> list[str]:
    """What the numbers depend on, as a list in Markdown."""
    found, s = study.protocol(), study.settings
    if found is None:
        return []
    p, e = found["protocol"], found["environment"]
    packages = ", ".join(f"{name} {v}" for name, v in e["packages"].items())
    lines = [
        f"calibration: first {s.samples} rows of {s.seq_len} tokens of {Path(s.calib).name}",
        f"text: {p['text_description']}; sha256 {p['text_sha256']}",
        f"windows: {p['windows']} of ctx {p['windowing']['ctx']}, stride "
        f"{p['windowing']['stride']}, skip {p['windowing'].get('skip', 0)}; {p['positions']} "
        f"positions; dtype {p['dtype']}",
        f"machine: {e['cpu']}, {e['threads']} threads; {e['system']}",
        f"versions: python {e['python']}, {packages}",
        "wall, CPU time and peak memory: of the whole command; * recorded before, not in this run",
    ]
    return [f"- {line}" for line in lines]


def _pythons(given: Iterable[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in given]
    for tool, equals, python in pairs:
        if not equals or not Path(python).is_file():
            raise UserError(f"--peer takes TOOL=PYTHON, the path of an interpreter, got '{tool}'")
    return {tool: python for tool, _, python in pairs}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", type=Path, default=[])
    parser.add_argument("--rows", default="", help="keys or families, separated by commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="TOOL=PYTHON")
    parser.add_argument("--redo", default="", help="keys whose results are thrown away first")
    parser.add_argument("--markdown", type=Path, help="a page whose table is replaced")
    parser.add_argument("--fast", action="store_true", help="few rows and windows")
    parser.add_argument("--list", action="store_true", help="show the rows' keys")
    parser.add_argument("--calib", default="wikitext")
    parser.add_argument("--text", default="wikitext")
    for name in ("samples", "seq_len", "windows", "ctx", "together"):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=getattr(Settings, name)
        )
    return parser


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.list:
        sys.stdout.write("\n".join(row.key for row in ROWS) + "\n")
        return
    if not args.models or args.out is None:
        parser.error("give --models and --out")
    try:
        failed = _run(args)
    except UserError as e:
        parser.exit(2, f"error: {e}\n")
    if failed:
        parser.exit(1, "\n".join(["failed rows:", *failed]) + "\n")


def _run(args: argparse.Namespace) -> list[str]:
    """Do what is asked for and show it; the failed rows, each with its reason."""
    from rich.console import Console

    rows = chosen_rows([name for name in args.rows.split(",") if name])
    pythons = _pythons(args.peer)
    every = [*rows, *peers_of(list(pythons), {row.family for row in rows})]
    asked = {name: getattr(args, name) for name in FAST}
    sizes = FAST if args.fast else asked
    settings = Settings(
        args.calib, args.text, sizes["samples"], sizes["seq_len"], sizes["windows"], sizes["ctx"],
        together=args.together,
    )  # fmt: skip
    studies, failed = [], []
    for model in args.models:
        study = ModelStudy(model, args.out / model.name, settings)
        study.forget([name for name in args.redo.split(",") if name])
        studies.append(study)
        study.run(every, pythons)
        write_tables(studies, rows, args.out, args.markdown)
        results = study.results()
        Console(width=max(WIDTH, Console().width)).print(
            rich_table(model.name, table(rows, model.name, results))
        )
        failed += [f"{model.name}, {k}: {r.error}" for k, r in results.items() if r.error]
    return failed


if __name__ == "__main__":
    main()
