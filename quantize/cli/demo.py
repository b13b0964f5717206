"""`quantize demo`: the main job end to end on a real model, with nothing to prepare."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..recipe import Calibration, Recipe, WeightPass
from .common import say, terminal, write_json

if TYPE_CHECKING:
    from ...evals.report import Report
    from ..gguf.export import ExportReport
    from ..runner import RunResult

QUESTION = "What is the capital of France? Answer in one sentence."
GGUF_TYPES = ("Q8_0", "Q4_0")


@dataclass(frozen=True)
class Size:
    """How much the demo does: calibration rows, evaluation windows, tokens of generation."""

    samples: int = 128
    seq_len: int = 512
    windows: int = 6
    ctx: int = 1024
    answer_tokens: int = 48
    speed_tokens: int = 32
    speed_repeats: int = 3


FULL = Size()
FAST = Size(samples=16, seq_len=128, windows=2, ctx=256, speed_tokens=8, speed_repeats=1)


class Outcome(NamedTuple):
    """What the demo made: runs by method, the measured report, the answer and the GGUF files.

    llama_cpp: the answer of llama.cpp for each file; None where xllamacpp is not installed.
    """

    source: str
    runs: dict[str, RunResult]
    report: Report
    answer: str
    ggufs: list[ExportReport]
    llama_cpp: dict[str, str] | None
    seconds: float
    peak_memory: int


def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Where everything is left.")] = Path(
        "lowbit-demo"
    ),
    model: Annotated[
        str | None, typer.Option(help="Another Llama-like model: a folder or a Hub id.")
    ] = None,
    text: Annotated[
        str, typer.Option(help="wikitext, pydoc, or auto: wikitext where the Hub answers.")
    ] = "auto",
    fast: Annotated[bool, typer.Option("--fast", help="Less of everything; for a check.")] = False,
) -> None:
    """Quantize SmolLM2-135M to 4 bits, measure it against the original, run it, export it.

    Leaves checkpoints, GGUF files, report.md and report.json in the output folder. Three to
    six minutes on two cores.

    Example: quantize demo --out ./lowbit-demo
    """
    outcome = _run(out, model, text, FAST if fast else FULL)
    (out / "report.md").write_text(_markdown(outcome), encoding="utf-8")
    write_json(out / "report.json", _facts(outcome))
    _print(outcome, out)


def _run(out: Path, model: str | None, text: str, size: Size) -> Outcome:
    from ...calib.source import model_folder
    from ...evals import llamacpp
    from ...evals.speed import peak_memory
    from ..gguf.demo_model import fetch_smollm2
    from ..gguf.export import export_gguf

    start = time.perf_counter()
    say("1/5 the model")
    folder, source = (model_folder(model), model) if model else fetch_smollm2()
    say(f"    {source}")
    out.mkdir(parents=True, exist_ok=True)
    say("2/5 quantize: round to nearest, then GPTQ")
    runs = {m: _quantize(folder, out / f"w4a16-{m.lower()}", m.lower(), text, size)
            for m in ("RTN", "GPTQ")}  # fmt: skip
    packed = runs["GPTQ"].out
    say("3/5 measure the original and both checkpoints")
    report = _measure(folder, runs, text, size)
    say("4/5 ask the packed checkpoint")
    prompt, answer = _ask(packed, size)
    say(f"    {QUESTION}\n    {answer}")
    say("5/5 export for llama.cpp")
    ggufs = [export_gguf(packed, out / f"w4a16-gptq-{t.lower()}.gguf", t, overwrite=True)
             for t in GGUF_TYPES]  # fmt: skip
    answers = None
    if llamacpp.available():
        answers = {g.path.name: _ask_llama_cpp(g.path, prompt, packed, size) for g in ggufs}
    else:
        say("    llama.cpp was not run: pip install xllamacpp")
    seconds = time.perf_counter() - start
    return Outcome(source, runs, report, answer, ggufs, answers, seconds, peak_memory())


def _quantize(folder: Path, out: Path, method: Any, text: str, size: Size) -> RunResult:
    from ..runner import quantize_model

    recipe = Recipe(
        passes=(WeightPass(method=method),),
        calibration=Calibration(source=text, samples=size.samples, seq_len=size.seq_len),
    )
    return quantize_model(folder, out, recipe, overwrite=True, restart=True,
                          say=lambda line: say(f"    {line}"))  # fmt: skip


def _measure(folder: Path, runs: dict[str, RunResult], text: str, size: Size) -> Report:
    from ...calib.text import load_text, load_tokenizer, tokenize
    from ...evals.measure import measure_models
    from ...evals.protocols import plan_windowing
    from ...evals.speed import SpeedPlan

    models = {"original": folder, **{f"W4A16 {name}": run.out for name, run in runs.items()}}
    evaluation = load_text(text, "evaluation")
    prompt = tokenize(evaluation.text, load_tokenizer(folder), 64).tolist()
    return measure_models(
        models, evaluation, plan_windowing([folder], ctx=size.ctx, windows=size.windows),
        base="original",
        speed=SpeedPlan(prompt, new_tokens=size.speed_tokens, repeats=size.speed_repeats),
    )  # fmt: skip


def _ask(packed: Path, size: Size) -> tuple[list[int], str]:
    """The prompt's token ids, through the chat template where there is one, and the answer."""
    from ...runtime import LLM, SamplingParams

    llm = LLM(packed)
    params = SamplingParams(max_tokens=size.answer_tokens, temperature=0.0)
    if getattr(llm.tokenizer, "chat_template", None):
        result = llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)[0]
    else:
        result = llm.generate(QUESTION, params, use_tqdm=False)[0]
    return result.prompt_token_ids, result.outputs[0].text.strip()


def _ask_llama_cpp(gguf: Path, prompt: list[int], packed: Path, size: Size) -> str:
    from ...calib.text import load_tokenizer
    from ...evals import llamacpp

    ids = llamacpp.generate(gguf, prompt, size.answer_tokens)
    return load_tokenizer(packed).decode(ids, skip_special_tokens=True).strip()


def _markdown(o: Outcome) -> str:
    gptq = o.runs["GPTQ"]
    lines = [
        "# lowbit demo", "",
        f"Model: {o.source}.", "",
        o.report.to_markdown(), "",
        "## How the checkpoints were made", "",
        *(f"- {name}: {run.seconds:.0f} s, forward passes in {run.dtype}; {'; '.join(run.notes)}"
          for name, run in o.runs.items()),
        f"- calibration: {gptq.recipe.calibration.samples} rows of "
        f"{gptq.recipe.calibration.seq_len} tokens, sha256 of the text "
        f"{gptq.calibration.sha256 if gptq.calibration else 'none'}", "",
        "## What the packed checkpoint says", "",
        f"> {QUESTION}", "", _quoted(o.answer), "",
        "## GGUF files", "",
        "| file | bytes | bits per weight | layers carried over exactly | llama.cpp says |",
        "| --- | --- | --- | --- | --- |",
        *(_gguf_line(g, o.llama_cpp) for g in o.ggufs), "",
        f"The whole demo: {o.seconds:.0f} s, peak memory {o.peak_memory / 2**30:.2f} GiB.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _gguf_line(g: ExportReport, answers: dict[str, str] | None) -> str:
    said = "not run (xllamacpp is not installed)" if answers is None else answers[g.path.name]
    cells = (g.path.name, f"{g.nbytes:,}", f"{g.bits_per_weight:.3f}", f"{len(g.repacked)}",
             " ".join(said.split()).replace("|", "\\|"))  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines() or [""])


def _facts(o: Outcome) -> dict[str, Any]:
    return {
        **o.report.to_dict("demo"),
        "model": o.source,
        "runs": {
            name: {
                **vars(replace(run, calibration=None)),
                "recipe": run.recipe.to_dict(),
                "calibration": run.calibration and run.calibration._replace(text="")._asdict(),
            }
            for name, run in o.runs.items()
        },
        "question": QUESTION,
        "answer": o.answer,
        "gguf": [{**g._asdict(), "totals": {t: n._asdict() for t, n in g.totals.items()}}
                 for g in o.ggufs],
        "llama.cpp": o.llama_cpp,
        "seconds": o.seconds,
        "peak_memory_bytes": o.peak_memory,
    }  # fmt: skip


def _print(o: Outcome, out: Path) -> None:
    from rich.table import Table

    table = Table(
        title="original against 4 bits",
        caption="KLD: mean KL divergence from the original; top-1: same likeliest token; bits: per "
        "quantized weight; tok/s: decode, one request; MiB: peak of that process",
    )
    for column in ("model", "perplexity", "KLD", "top-1", "MB", "bits", "tok/s", "MiB"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for row in o.report.rows:
        d, s = row.divergence, row.speed
        assert row.size is not None, row
        bits = row.size.quantized_bits_per_weight or row.size.bits_per_weight
        table.add_row(
            row.name, f"{row.perplexity.perplexity:.2f}", f"{d.kld_mean:.4f}" if d else "-",
            f"{d.top1:.1%}" if d else "-", f"{row.size.file_bytes / 1e6:.1f}",
            f"{bits:.2f}" if bits else "-", f"{s.decode:.1f}" if s else "-",
            f"{s.peak_memory / 2**20:.0f}" if s else "-",
        )  # fmt: skip
    for g in o.ggufs:
        table.add_row(f"GGUF {g.file_type}", "-", "-", "-", f"{g.nbytes / 1e6:.1f}",
                      f"{g.bits_per_weight:.2f}", "-", "-")  # fmt: skip
    console = terminal()
    console.print(o.source, markup=False)
    console.print(table)
    for name, said in (o.llama_cpp or {}).items():
        console.print(f"llama.cpp, {name}: {said}", markup=False)
    console.print(f"the protocol and everything else: {out / 'report.md'}, {out / 'report.json'}")
    console.print(f"{o.seconds:.0f} s, peak memory {o.peak_memory / 2**30:.2f} GiB")
