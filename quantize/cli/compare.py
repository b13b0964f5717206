"""`quantize compare`: several quantizations of one model, made, measured and put on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernels.errors import UserError
from ..presets import PRESETS
from ..recipe import Calibration
from ..sizes import parse_size
from .common import model_path, print_json, say, terminal, write_json
from .common_options import AsJson, Device, SourceModel
from .eval import WINDOWS
from .recipe_options import build_recipe

if TYPE_CHECKING:
    from ...evals.comparison import Candidate, CompareSettings, Comparison
    from ...evals.comparison_estimate import Estimate
    from ...evals.recommend import Wanted

SCHEMES = "W4A16,W8A8"
CTX = 2048


def compare(
    model: SourceModel,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="The folder for checkpoints, results and report.")
    ] = Path("lowbit-compare"),
    schemes: Annotated[
        str, typer.Option(help="Separated by commas: W4A16, FP8_DYNAMIC, ...; '' for none.")
    ] = SCHEMES,
    methods: Annotated[
        str,
        typer.Option(help="For each scheme: gptq, rtn, awq+gptq, ..., or fast, balanced, best."),
    ] = "balanced",
    gguf: Annotated[
        str, typer.Option(help="GGUF types: Q4_K_M, Q4_K_M+imatrix, Q4_K_M+gptq, ...")
    ] = "",
    group_size: Annotated[
        int | None, typer.Option(help="Of the schemes that have groups. [default: the scheme's]")
    ] = None,
    calib: Annotated[
        str, typer.Option(help="Calibration text: wikitext, pydoc, auto, FILE or a Hub id.")
    ] = Calibration.source,
    samples: Annotated[int, typer.Option(help="Calibration rows.")] = Calibration.samples,
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.")] = Calibration.seq_len,
    text: Annotated[str, typer.Option(help="What is measured on, named like --calib.")] = "auto",
    protocol: Annotated[
        str | None, typer.Option(help="Windows by name, as of quantize eval, in place of --ctx.")
    ] = None,
    ctx: Annotated[
        int | None, typer.Option(help=f"Tokens of a window. [default: {CTX}, or the model's limit]")
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(
            help=f"At most so many windows; 0: all. [default: {WINDOWS}; all of a --protocol]"
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of measuring: auto (float32 on a CPU), float32, bfloat16, float16.")
    ] = "auto",
    device: Device = "auto",
    speed: Annotated[
        bool, typer.Option("--speed", help="Also time the runtime's decode, one request.")
    ] = False,
    max_size: Annotated[
        str | None, typer.Option(help="Recommend what fits: at most 120MB, 4GiB, ...")
    ] = None,
    max_kld: Annotated[
        float | None, typer.Option(help="Recommend the smallest within so many nats.")
    ] = None,
    min_speed: Annotated[
        float | None, typer.Option(help="Recommend what decodes so many tokens/s (with --speed).")
    ] = None,
    together: Annotated[
        int, typer.Option(help="Checkpoints that are measured in one pass, all in memory.")
    ] = 2,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove each checkpoint once it is measured.")
    ] = False,
    estimate_only: Annotated[
        bool, typer.Option("--estimate-only", help="Say what it would give and take, and stop.")
    ] = False,
    no_timing: Annotated[
        bool, typer.Option("--no-timing", help="Leave the machine unmeasured: sizes alone.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make several quantizations of a model, measure each against it, and recommend one.

    Says first what that will take; the same command goes on where it was stopped. Leaves
    results.json, report.html and report.md beside the checkpoints.

    Example: quantize compare ./SmolLM2-135M-Instruct --schemes W4A16,W8A8 --gguf Q4_K_M --speed
    """
    from ...evals.comparison import Comparison, settings_of
    from ...evals.protocols import check_alone
    from ...evals.recommend import Wanted
    from ...evals.results import require_extra

    require_extra()
    size = None if max_size is None else parse_size(max_size, "--max-size")
    wanted = Wanted(size, max_kld, min_speed)
    if min_speed is not None and not speed:
        raise UserError("--min-speed needs the speeds: give --speed, too")
    check_alone(protocol, [] if ctx is None else ["ctx"])
    if together < 1 or (windows is not None and windows < 0):
        raise UserError(
            f"--together is 1 or more and --windows 0 or more, got {together}, {windows}"
        )
    calibration = {"source": calib, "samples": samples, "seq_len": seq_len}
    candidates = _candidates(schemes, methods, gguf, group_size, calibration)
    limit = (0 if protocol else WINDOWS) if windows is None else windows
    settings = settings_of({
        "calib": calib, "text": text, "samples": samples, "seq_len": seq_len, "windows": limit,
        "ctx": ctx or 0, "dtype": dtype, "together": together, "protocol": protocol,
        "device": device, "speed": speed, "keep": not remove,
    })  # fmt: skip
    folder = model_path(model)
    out.mkdir(parents=True, exist_ok=True)
    study = Comparison(folder, out, settings, say)
    foreseen = _estimate(folder, candidates, settings, study, not no_timing)
    for key, why in foreseen.refused.items():
        say(f"{key} is left out: {why}")
    candidates = [c for c in candidates if c.key not in foreseen.refused]
    if estimate_only:
        print_json(foreseen.to_dict()) if as_json else _show_estimate(foreseen)
        return
    _show_estimate(foreseen)
    study.run(candidates, {})
    _finish(study, candidates, foreseen.refused, wanted, out, as_json)


def _listed(names: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


def _grouped(scheme: str, group_size: int | None) -> int | None:
    """The group size where the scheme has groups whose size may be chosen."""
    from ..spec import Group, scheme_from_name

    weights = scheme_from_name(scheme).weights
    chosen = isinstance(weights.granularity, Group) and weights.scale_dtype == "model"
    return group_size if chosen else None


def _candidates(
    schemes: str, methods: str, gguf: str, group_size: int | None, calibration: dict[str, Any]
) -> list[Candidate]:
    """Each scheme by each method, then the GGUF types; UserError for names that are none."""
    from ...evals.comparison import Candidate, gguf_candidate

    found = []
    for scheme in _listed(schemes):
        for method in _listed(methods):
            named = {"scheme": scheme, "group_size": _grouped(scheme, group_size)}
            preset = method if method in PRESETS else None
            named |= {} if preset else {"method": method}
            recipe = build_recipe(None, named, {}, calibration, {}, preset=preset)
            found.append(Candidate(scheme, method, recipe=recipe))
    found += [gguf_candidate(name) for name in _listed(gguf)]
    if not found:
        raise UserError("nothing to compare: name --schemes with --methods, or --gguf types")
    return found


def _estimate(
    folder: Path,
    candidates: list[Candidate],
    settings: CompareSettings,
    study: Comparison,
    timed: bool,
) -> Estimate:
    from ...evals.comparison_estimate import estimate

    return estimate(folder, candidates, settings, study.windowing(), timed)


def _show_estimate(foreseen: Estimate) -> None:
    from rich.table import Table

    from ..planning.foresee import duration

    table = Table("candidate", "MB", "bits/weight", "about", "peak, MB", title="estimate")
    for c in foreseen.candidates:
        table.add_row(
            c.key,
            "-" if c.tensor_bytes is None else f"{c.tensor_bytes / 1e6:.1f}",
            "-" if c.bits_per_weight is None else f"{c.bits_per_weight:.2f}",
            c.note or "-" if c.seconds is None else duration(c.seconds),
            "-" if c.peak_memory is None else f"{c.peak_memory / 1e6:.0f}",
        )
    terminal(stderr=True).print(table)
    if foreseen.measuring is not None and foreseen.seconds is not None:
        say(
            f"about {duration(foreseen.seconds)} for all whose time is known, of it "
            f"{duration(foreseen.measuring)} for measuring {foreseen.windows} windows each"
        )


def _finish(
    study: Comparison,
    candidates: list[Candidate],
    refused: dict[str, str],
    wanted: Wanted,
    out: Path,
    as_json: bool,
) -> None:
    """Write the results and the pages, say what failed and what to take."""
    from ...evals.recommend import recommendation
    from ...evals.report_markdown import markdown
    from ...evals.report_page import html
    from ...evals.results import check_results
    from ...evals.summary import summarize

    errors = study.errors(candidates)
    for key, why in errors.items():
        say(f"{key} failed: {why}")
    errors |= refused
    results = study.results_file(candidates)
    if wanted.anything:
        results["recommendation"] = recommendation(results["rows"], wanted)
    results["errors"] = errors
    check_results(results, out / "results.json")
    write_json(out / "results.json", results)
    summary = summarize([("results.json", results)])
    title = f"Quantizations of {study.model.name}"
    (out / "report.html").write_text(html(summary, title), encoding="utf-8")
    page = markdown(summary, title)
    (out / "report.md").write_text(page, encoding="utf-8")
    if as_json:
        print_json(results)
    else:
        typer.echo(page, nl=False)
    say(f"wrote {out / 'results.json'}, report.html, report.md")
    if errors:
        raise typer.Exit(2)
