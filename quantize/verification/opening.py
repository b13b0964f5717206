"""The quantized part of a checkpoint under examination: its layout, its linears' schemes, and what
stands in the way of telling them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...calib.shards import TensorSource
from ...kernels.errors import UserError
from ..checkpoint.layouts import Layout, find_layout, layout_of
from ..fp8_source import SCALES, FP8Source, is_fp8
from ..spec import LayerScheme
from .findings import Finding, finding
from .stored import StoredTensors
from .tensors import half_linears
from .values import Gathered, examine_measured

WHERE = "config.json: quantization_config"


@dataclass(frozen=True)
class Opened:
    """name: how the linears are stored, "plain" where none are quantized, None where it cannot be
    told. layout: None for those two, and for FP8 that is read as the model that it stands for.
    schemes: of the linears of a layout. linears: all that are quantized. broken: those of which a
    part is missing. source: the tensors without theirs, FP8 that is no layout dequantized."""

    name: str | None
    layout: Layout | None
    source: TensorSource
    schemes: Mapping[str, LayerScheme] = field(default_factory=dict)
    linears: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()
    findings: tuple[Finding, ...] = ()


def open_quantized(config: Mapping[str, Any], source: StoredTensors) -> Opened:
    """What config.json says of the tensors `source`, as far as they bear it out."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return Opened("plain", None, source)
    if find_layout(quantization) is None and is_fp8(quantization):
        return _open_fp8(source)
    try:
        layout = layout_of(quantization)
    except UserError as e:
        told = finding("layout", WHERE, "a layout that lowbit reads", e)
        return Opened(None, None, source, findings=(told,))
    broken, found = half_linears(layout, source)
    lost = {f"{module}.{leaf}" for module in broken for leaf in layout.leaves}
    left = source.without(lost)
    try:
        schemes = layout.schemes(quantization, left)
    except UserError as e:
        found.append(finding("config", WHERE, "schemes that fit the tensors", e))
        return Opened(None, None, left, broken=frozenset(broken), findings=tuple(found))
    actual, warning = layout.relabelled(schemes, left)
    if warning is not None:
        found.append(finding("GPTQ label", WHERE, f"zero-points of {layout.name}", warning))
    return Opened(
        actual.name, actual, left, schemes, frozenset(schemes), frozenset(broken), tuple(found)
    )


def _open_fp8(source: StoredTensors) -> Opened:
    """FP8 that is no layout: examined as the model that it stands for."""
    try:
        opened = FP8Source(source.folder, source)
    except UserError as e:
        told = finding("config", WHERE, "FP8 matrices, each beside its scale", e)
        return Opened(None, None, source, findings=(told,))
    found: list[Finding] = []
    broken: set[str] = set()
    for weight, scale in opened.scales.items():
        try:
            opened.check_scale(weight)
        except UserError as e:
            broken.add(weight.removesuffix(".weight"))
            found.append(finding("shape", scale, "a scale of its weight", e))
    if broken:
        lost = {f"{module}.{leaf}" for module in broken for leaf in ("weight", *SCALES)}
        opened = FP8Source(source.folder, source.without(lost))
    linears = frozenset(weight.removesuffix(".weight") for weight in opened.scales)
    return Opened("fp8", None, opened, {}, linears, broken=frozenset(broken), findings=tuple(found))


def examine_fp8(
    config: Mapping[str, Any], opened: Opened, stored: StoredTensors, gathered: Gathered
) -> Iterator[Finding]:
    """The scales of FP8 that is no layout, and of its inputs where these are static."""
    if opened.layout is not None or not isinstance(opened.source, FP8Source):
        return
    static = config["quantization_config"].get("activation_scheme") == "static"
    for weight, scale in opened.source.scales.items():
        gathered.count(scale.rpartition(".")[2], stored.get(scale))
        inputs = f"{weight.removesuffix('.weight')}.input_scale"
        if inputs in stored:
            values = stored.get(inputs).float()
            yield from examine_measured(inputs, values)
            gathered.count("input_scale", values)
        elif static:
            yield finding("missing tensor", inputs, "the scale of its inputs", "no such tensor")
