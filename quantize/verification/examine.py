"""The whole examination of a checkpoint folder or a GGUF file, and its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels.errors import UserError
from ..checkpoint.layouts import Layout, find_layout, layout_of
from ..fp8_source import is_fp8
from ..spec import LayerScheme
from .against import TensorError, compare
from .config import examine_keys, examine_widths, left_quantized, read_config_object
from .findings import Finding, finding
from .gguf import examine_gguf
from .peers import examine_cache, examine_peers, examine_ties
from .side_files import examine_side_files
from .stored import StoredTensors
from .structure import examine_structure
from .tensors import (
    Model,
    Wanted,
    build_model,
    examine_linears,
    examine_names,
    half_linears,
    plain_linears,
    wanted_tensors,
)
from .values import Gathered, examine_linear, examine_plain


@dataclass(frozen=True)
class VerifyReport:
    """What was found in a checkpoint.

    layout: the name of how its linears are stored, "plain" where none are quantized, "gguf", or
    None where it could not be told. quantized: how many linears are. errors: tensor -> relative
    error against the original, where one was given. findings: errors first.
    """

    path: Path
    layout: str | None
    tensors: int
    quantized: int
    findings: tuple[Finding, ...]
    errors: tuple[TensorError, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong; warnings may be there."""
        return not any(f.severity == "error" for f in self.findings)


def verify(path: str | Path, against: str | Path | None = None) -> VerifyReport:
    """Examine the checkpoint `path`, a folder of safetensors in any layout or a GGUF file.

    against: the original model's folder, to compare every tensor with. Faults are findings of the
    report, never exceptions; UserError when there is no such folder or file. The memory that it
    takes is about that of the largest tensor.
    """
    path = Path(path)
    if path.is_file():
        if against is not None:
            raise UserError("a GGUF file is compared with nothing; verify it without --against")
        found, tensors = examine_gguf(path)
        return VerifyReport(path, "gguf", tensors, 0, _sorted(found))
    if not path.is_dir():
        raise UserError(f"no such checkpoint: {path}; give a model folder or a GGUF file")
    base = None if against is None else Path(against)
    if base is not None and not base.is_dir():
        raise UserError(f"no such folder of an original model: {base}")
    return _verify_folder(path, base)


def _verify_folder(folder: Path, base: Path | None) -> VerifyReport:
    structure = examine_structure(folder)
    config, found = read_config_object(folder)
    found = [*structure.findings, *found]
    source = StoredTensors(folder, structure.headers)
    if not config or not source.info:
        return VerifyReport(folder, None, len(source.info), 0, _sorted(found))
    found += examine_keys(folder, config)
    found += examine_side_files(folder, config, base)
    opened = _open_layout(config, source)
    found += opened.findings
    model, told = build_model(folder, config, opened.source)
    found += told
    wanted: dict[str, Wanted] = {}
    if opened.layout is not None:
        wanted, told = wanted_tensors(opened.layout, opened.schemes, model)
        found += told
    found += _examine_headers(folder, config, opened, wanted, model)
    found += _examine_contents(config, opened, wanted, model, found)
    errors: tuple[TensorError, ...] = ()
    if base is not None:
        compared = compare(folder, base, opened.layout, opened.schemes, model)
        errors = compared.errors
        found += compared.findings
    name = "plain" if config.get("quantization_config") is None else None
    layout = opened.layout.name if opened.layout is not None else name
    total = len(source.info)
    return VerifyReport(folder, layout, total, len(opened.schemes), _sorted(found), errors)


@dataclass(frozen=True)
class _Opened:
    """The quantized part of a checkpoint. broken: linears of which a part is missing; source: the
    tensors without theirs."""

    layout: Layout | None
    schemes: Mapping[str, LayerScheme]
    broken: set[str]
    source: StoredTensors
    findings: list[Finding]


def _open_layout(config: Mapping[str, Any], source: StoredTensors) -> _Opened:
    quantization = config.get("quantization_config")
    if quantization is None or (find_layout(quantization) is None and is_fp8(quantization)):
        return _Opened(None, {}, set(), source, [])
    where = "config.json: quantization_config"
    try:
        layout = layout_of(quantization)
    except UserError as e:
        told = finding("layout", where, "a layout that lowbit reads", e)
        return _Opened(None, {}, set(), source, [told])
    broken, found = half_linears(layout, source)
    lost = {f"{module}.{leaf}" for module in broken for leaf in layout.leaves}
    left = source.without(lost)
    try:
        schemes = layout.schemes(quantization, left)
    except UserError as e:
        found.append(finding("config", where, "schemes that fit the tensors", e))
        return _Opened(None, {}, broken, left, found)
    actual, warning = layout.relabelled(schemes, left)
    if warning is not None:
        found.append(finding("GPTQ label", where, f"zero-points of {layout.name}", warning))
    return _Opened(actual, schemes, broken, left, found)


def _examine_headers(
    folder: Path,
    config: Mapping[str, Any],
    opened: _Opened,
    wanted: Mapping[str, Wanted],
    model: Model,
) -> Iterator[Finding]:
    yield from examine_linears(wanted, opened.schemes, model.source)
    readable = opened.layout is not None or config.get("quantization_config") is None
    if readable:
        yield from examine_names(opened.layout, wanted, opened.broken, model)
    if opened.layout is not None:
        yield from examine_widths(opened.schemes)
        linears = {*opened.schemes, *opened.broken}
        plain = plain_linears(model, linears)
        yield from left_quantized(config["quantization_config"], plain, model.head, folder)
        yield from examine_peers(opened.schemes, plain, model.source)


def _examine_contents(
    config: Mapping[str, Any],
    opened: _Opened,
    wanted: Mapping[str, Wanted],
    model: Model,
    before: list[Finding],
) -> Iterator[Finding]:
    """Every tensor's numbers, linear by linear, but those of linears with a fault before."""
    gathered = Gathered()
    at_fault = {f.where for f in before if f.severity == "error"}
    done: set[str] = set()
    for module, linear in wanted.items():
        assert opened.layout is not None
        done.update(f"{module}.{leaf}" for leaf in opened.layout.leaves)
        if at_fault.isdisjoint({module, *linear.tensors}):
            scheme = opened.schemes[module]
            yield from examine_linear(module, opened.layout, scheme, linear, model.source, gathered)
    for name in opened.source.names():
        if name not in done:
            yield from examine_plain(name, opened.source)
    yield from examine_cache(config, model.source, gathered)
    yield from examine_ties(model)
    yield from gathered.findings()


def _sorted(found: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda f: f.severity != "error"))
