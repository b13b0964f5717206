"""Tables of a plan: the linears (those alike in one line), the totals, what to change."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.table import Table

from ..kv_names import describe_kv

if TYPE_CHECKING:
    from ..planning.modules import ModulePlan
    from ..planning.report import PlanReport
    from ..planning.runtimes import Answer

NUMBER = re.compile(r"\.\d+(?=\.|$)")
OUTSIDE = re.compile(r"^[^*]*?(?=[^.]*\.\*)")


def module_table(report: PlanReport, every: bool) -> Table:
    """How each kind of linear is stored; with `every`, each linear."""
    table = _linear_table(str(report.model), "shape", "stored as")
    for heading in ("MB", "to"):
        table.add_column(heading, justify="right")
    for members in _alike(report, every):
        before = sum(m.bytes_before for m in members) / 1e6
        after = sum(m.bytes_after for m in members) / 1e6
        first = members[0]
        table.add_row(
            *_named(members), f"{first.shape[0]} x {first.shape[1]}", _stored_as(first),
            f"{before:.1f}", f"{after:.1f}",
        )  # fmt: skip
    return table


def runtime_table(report: PlanReport, every: bool) -> Table:
    """Who can run each kind of linear, and for how many devices it can be cut."""
    table = _linear_table("who can run them", "lowbit", "vLLM", "GGUF", "devices")
    for members in _alike(report, every):
        first = members[0]
        table.add_row(
            *_named(members), _runs(first.lowbit), _runs(first.vllm), _blocks(first.llama_cpp),
            _devices(first),
        )  # fmt: skip
    return table


def total_table(report: PlanReport) -> Table:
    """Size, memory and time of the whole run."""
    foresight = report.foresight
    size, memory = foresight.totals, foresight.memory
    table = Table(show_header=False)
    table.add_row("format", report.layout)
    table.add_row(
        "size", f"{size.tensor_bytes_before / 1e6:.1f} to {size.tensor_bytes / 1e6:.1f} MB"
    )
    if report.recipe.kv_cache is not None:
        table.add_row("cache", describe_kv(report.recipe.kv_cache.kv_cache.spec))
    table.add_row("bits per weight", f"{size.bits_per_weight:.3f} over the whole model")
    if size.quantized_bits_per_weight is not None:
        table.add_row("", f"{size.quantized_bits_per_weight:.3f} over the quantized linears")
    worst = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
    table.add_row("peak memory", f"about {memory.host / 1e6:.0f} MB")
    if memory.device:
        table.add_row("", f"about {memory.device / 1e6:.0f} MB of {report.device}")
    table.add_row("", ", ".join(f"{name} {n / 1e6:.0f}" for name, n in worst if n))
    table.add_row("disk", f"{foresight.disk_bytes / 1e6:.0f} MB while it runs")
    if foresight.time is not None:
        from ..planning.foresee import duration

        table.add_row("time", f"about {duration(foresight.time.seconds)}")
        parts = sorted(foresight.time.parts.items(), key=lambda part: -part[1])[:4]
        table.add_row("", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts))
    fits = [str(n) for n, whole in report.devices().items() if whole]
    table.add_row("tensor parallel", f"{' or '.join(fits)} devices" if fits else "one device alone")
    return table


def advice_table(report: PlanReport) -> Table:
    """What does not fit, and what to change."""
    table = Table(title="what to look at")
    table.add_column("linears", justify="right")
    table.add_column("what")
    table.add_column("change")
    for advice in report.advice:
        table.add_row(str(advice.modules or ""), advice.trouble, advice.remedy)
    return table


def pattern(name: str) -> str:
    """The linear's name from its layer on, with a star for the layer's (and expert's) number."""
    return OUTSIDE.sub("", NUMBER.sub(".*", name))


def _linear_table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    table.add_column("", justify="right")
    table.add_column("linear", no_wrap=True)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _named(members: list[ModulePlan]) -> tuple[str, str]:
    """How many linears are alike, and what they are called."""
    if len(members) == 1:
        return "", members[0].name
    return str(len(members)), pattern(members[0].name)


def _alike(report: PlanReport, every: bool) -> list[list[ModulePlan]]:
    """Linears of one name but for the layer, and of the same facts."""
    groups: dict[object, list[ModulePlan]] = {}
    for m in report.modules:
        key = m.name if every else (pattern(m.name), m.shape, m.scheme, m.method, str(m.cuts))
        groups.setdefault(key, []).append(m)
    return list(groups.values())


def _stored_as(module: ModulePlan) -> str:
    """Like "int4 symmetric, 9 groups of 64; inputs int8"."""
    if module.scheme is None:
        return module.division
    weights, inputs = module.scheme.weights, module.scheme.input_activations
    kind = f"{weights.type}{weights.num_bits}"
    if weights.type == "int":
        kind += " symmetric" if weights.symmetric else " asymmetric"
    read = "" if inputs is None else f"; inputs {inputs.type}{inputs.num_bits}"
    return f"{kind}, {module.division.removesuffix(' columns')}{read}"


def _runs(answer: Answer | None) -> str:
    if answer is None:
        return "as it is"
    return ", ".join(name.partition(" (")[0] for name in answer.runs) or "no kernel"


def _blocks(answer: Answer) -> str:
    return "K-quants" if not answer.declined else f"no K, {answer.runs[0]}"


def _devices(module: ModulePlan) -> str:
    return " ".join(str(n) for n, why in module.cuts.items() if why is None) or "1 alone"
