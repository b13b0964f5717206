"""A measurement as `quantize eval` prints it: a table, then all that its numbers depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .definitions import definitions
from .divergence import ConfidenceBucket, Divergence
from .generation import Generation
from .report import Protocol, Report, Row, plain
from .size import SizeReport
from .speed import DecodeSpeed
from .tasks import TaskResult


def markdown(report: Report) -> str:
    """The whole of it; what was not measured has no column and no line."""
    rows = report.rows
    columns = [(title, [cell(r) for r in rows]) for title, cell in COLUMNS]
    shown = [(title, cells) for title, cells in columns if any(cells)]
    lines = [_line([title for title, _ in shown]), _line(["---"] * len(shown))]
    lines += [_line([cells[i] or "-" for _, cells in shown]) for i in range(len(rows))]
    return "\n".join([*lines, "", *(f"- {line}" for line in _facts(report)), ""])


def _facts(report: Report) -> Iterator[str]:
    p, w, e = report.protocol, report.protocol.windowing, report.environment
    packages = ", ".join(f"{name} {v}" for name, v in e.packages.items())
    yield f"text: {p.text_description}; sha256 {p.text_sha256}"
    yield (
        f"windows: {p.windows} of ctx {w.ctx}, stride {w.stride}, skip {w.skip}, BOS {w.bos}; "
        f"{p.scored_tokens} tokens scored, {p.positions} positions{_rules(p)}"
    )
    yield f"dtype {p.dtype}, device {e.device}, {e.threads} threads, {e.cpu}, {e.system}"
    yield f"versions: python {e.python}, {packages}"
    yield f"tokenizer: {p.tokenizer}; seed: {p.seed if p.seed is not None else 'none drawn'}"
    for row in report.rows:
        yield f"{row.name}: {row.path}{' (base)' if row.name == p.base else ''}{_engine(row)}"
    for row in report.rows:
        for line in _of_row(row):
            yield f"{row.name}, {line}"
    if report.noise_floor is not None:
        yield _floor(report.noise_floor)
    yield from definitions(plain(report))


def _of_row(row: Row) -> Iterator[str]:
    """What has no column."""
    if (s := row.speed) is not None:
        yield (
            f"speed: prompt {s.prompt_tokens}, {s.new_tokens} new tokens, {s.repeats} repeats, "
            f"{s.dtype}{_kernels(s)}; prefill {s.prefill:.1f} tokens/s"
        )
    if row.bench is not None:
        yield from _latency(row.bench)
    if row.divergence is not None:
        yield f"by how sure the base is: {_confidence(row.divergence.confidence)}"
    yield from (_task(task) for task in row.tasks or [])
    if row.generation is not None:
        yield _generation(row.generation)


def _engine(row: Row) -> str:
    if (engine := row.engine) is None:
        return ""
    told = "" if engine.top is None else f", which tells {engine.top} tokens of a position"
    return f", computed by {engine.name}{told}"


def _latency(bench: dict[str, Any]) -> Iterator[str]:
    """Of the loads of `quantize bench` that passed their check, and why another did not."""
    for load in bench["loads"]:
        asked, check = load["load"], load["check"]
        if check["failed"] is not None:
            yield f"latency: no numbers, {check['failed']}"
            continue
        ttft, tpot = (load[kind]["p50"]["median"] * 1e3 for kind in ("ttft", "tpot"))
        yield (
            f"latency, one client, {asked['requests']} requests, prompts of "
            f"{asked['prompt_high']}, answers of {asked['output_high']} tokens, {load['repeats']} "
            f"repeats: first token after {ttft:.1f} ms, each other {tpot:.2f} ms (medians)"
        )


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |"


def _rules(p: Protocol) -> str:
    """The protocol's name and the rules that are not the usual ones."""
    w = p.windowing
    rules = {
        "the next token alone": w.predictive, "a shorter window at the end": w.tail,
        "the tokenizer's special tokens before the text": w.special,
    }  # fmt: skip
    told = [] if p.name is None else [f"protocol {p.name}"]
    return "".join(f"; {rule}" for rule in [*told, *(r for r, holds in rules.items() if holds)])


def _confidence(found: tuple[ConfidenceBucket, ...]) -> str:
    return ", ".join(
        f"{b.low:.0%}-{b.high:.0%} {b.positions} positions"
        + ("" if b.kld_mean is None else f" KLD {b.kld_mean:.4f} top-1 {b.top1:.1%}")
        for b in found
    )


def _task(t: TaskResult) -> str:
    right = _with_error(t.accuracy, t.accuracy_stderr, ".2%")
    norm = _with_error(t.accuracy_norm, t.accuracy_norm_stderr, ".2%")
    told = f"task {t.task}, {t.questions} questions: {right}, by length {norm}"
    if (p := t.paired) is None:
        return told
    return (
        f"{told}; right alone: base {p.only_base}, model {p.only_model}, McNemar p {p.p_value:.3f}"
    )


def _generation(g: Generation) -> str:
    told = (
        f"generation, {g.prompts} prompts, up to {g.new_tokens} tokens: runs of four repeated "
        f"{g.repetition:.1%}, loops {g.loops}"
    )
    if g.same is None:
        return told
    place = g.first_difference
    first = "" if place is None else f", the first other token at {place:g} (median)"
    return f"{told}, as the base {g.same}{first}"


def _floor(d: Divergence) -> str:
    return (
        f"noise floor: KLD {_with_error(d.kld_mean, d.kld_mean_stderr, '.6f')}, 99.9% "
        f"{d.kld_p999:.5f}, max {d.kld_max:.4f}, top-1 {d.top1:.2%}, RMS of probabilities "
        f"{d.probability_rms:.3%}"
    )


def _with_error(value: float, error: float | None, form: str) -> str:
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form}}")


def _of_divergence(cell: Callable[[Divergence], str]) -> Callable[[Row], str]:
    return lambda row: "" if row.divergence is None else cell(row.divergence)


def _of_speed(cell: Callable[[DecodeSpeed], str]) -> Callable[[Row], str]:
    return lambda row: "" if row.speed is None else cell(row.speed)


def _bits(size: SizeReport | None) -> str:
    if size is None:
        return ""
    bits = (size.quantized_bits_per_weight, size.bits_per_weight)
    return " / ".join("-" if b is None else f"{b:.2f}" for b in bits) if any(bits) else ""


def _kernels(speed: DecodeSpeed) -> str:
    return "".join(f", {n} linears on {kernel}" for kernel, n in speed.kernels.items())


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}"


COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("model", lambda r: r.name),
    (
        "perplexity",
        lambda r: _with_error(r.perplexity.perplexity, r.perplexity.perplexity_stderr, ".3f"),
    ),
    ("KLD mean", _of_divergence(lambda d: _with_error(d.kld_mean, d.kld_mean_stderr, ".5f"))),
    ("median", _of_divergence(lambda d: f"{d.kld_median:.5f}")),
    ("90%", _of_divergence(lambda d: f"{d.kld_p90:.4f}")),
    ("99%", _of_divergence(lambda d: f"{d.kld_p99:.4f}")),
    ("99.9%", _of_divergence(lambda d: f"{d.kld_p999:.4f}")),
    ("max", _of_divergence(lambda d: f"{d.kld_max:.3f}")),
    ("top-1", _of_divergence(lambda d: f"{d.top1:.2%}")),
    ("top-5", _of_divergence(lambda d: f"{d.top5_overlap:.2%}")),
    ("RMS of probabilities", _of_divergence(lambda d: f"{d.probability_rms:.2%}")),
    (
        "NLL less base",
        _of_divergence(lambda d: _with_error(d.nll_difference, d.nll_difference_stderr, ".4f")),
    ),
    ("weights file, MB", lambda r: "" if r.size is None else _megabytes(r.size.file_bytes)),
    ("bits/weight, linears / whole", lambda r: _bits(r.size)),
    ("KV cache", lambda r: r.kv or ""),
    ("inputs", lambda r: r.inputs or ""),
    (
        "decode, tokens/s",
        _of_speed(lambda s: f"{s.decode:.1f} ({s.decode_min:.1f}-{s.decode_max:.1f})"),
    ),
    ("peak memory, MB", _of_speed(lambda s: _megabytes(s.peak_memory))),
]
