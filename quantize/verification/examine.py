"""The whole examination of a checkpoint folder or a GGUF file, and its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels.errors import UserError
from .against import TensorError, compare
from .claims import examine_claims
from .config import examine_formats, examine_keys, read_config_object
from .findings import Finding, finding
from .gguf import examine_gguf
from .gguf_against import compare_gguf
from .opening import Opened, examine_fp8, open_quantized
from .peers import examine_cache, examine_order, examine_peers, examine_ties
from .readers import examine_readers
from .side_files import examine_side_files
from .stored import StoredTensors
from .structure import examine_structure
from .tensors import (
    Model,
    Wanted,
    build_model,
    examine_linears,
    examine_names,
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
    if not path.exists():
        raise UserError(f"no such checkpoint: {path}; give a model folder or a GGUF file")
    base = None if against is None else Path(against)
    if base is not None and not base.is_dir():
        raise UserError(f"no such folder of an original model: {base}")
    if path.is_file():
        return _verify_gguf(path, base)
    return _verify_folder(path, base)


def _verify_gguf(path: Path, base: Path | None) -> VerifyReport:
    found, tensors = examine_gguf(path)
    errors: tuple[TensorError, ...] = ()
    if base is not None and any(f.severity == "error" for f in found):
        told = "the file's own faults come first"
        found.append(finding("not compared", path.name, "a whole file", told))
    elif base is not None:
        compared = compare_gguf(path, base)
        errors = compared.errors
        found += compared.findings
    return VerifyReport(path, "gguf", tensors, 0, _sorted(found), errors)


def _verify_folder(folder: Path, base: Path | None) -> VerifyReport:
    structure = examine_structure(folder)
    config, found = read_config_object(folder)
    found = [*structure.findings, *found]
    stored = StoredTensors(folder, structure.headers)
    if not config or not stored.info:
        return VerifyReport(folder, None, len(stored.info), 0, _sorted(found))
    found += examine_keys(folder, config)
    found += examine_side_files(folder, config, base)
    opened = open_quantized(config, stored)
    found += opened.findings
    model, told = build_model(folder, config, opened.source)
    found += told
    wanted: dict[str, Wanted] = {}
    if opened.layout is not None:
        wanted, told = wanted_tensors(opened.layout, opened.schemes, model)
        found += told
    found += _examine_headers(folder, config, opened, wanted, model)
    gathered = Gathered()
    found += examine_fp8(config, opened, stored, gathered)
    found += _examine_contents(opened, wanted, model, found, gathered)
    found += [*examine_cache(config, stored, gathered), *gathered.findings()]
    errors: tuple[TensorError, ...] = ()
    if base is not None:
        compared = compare(folder, base, opened, model)
        errors = compared.errors
        found += compared.findings
    total, quantized = len(stored.info), len(opened.linears)
    return VerifyReport(folder, opened.name, total, quantized, _sorted(found), errors)


def _examine_headers(
    folder: Path,
    config: Mapping[str, Any],
    opened: Opened,
    wanted: Mapping[str, Wanted],
    model: Model,
) -> Iterator[Finding]:
    yield from examine_linears(wanted, opened.schemes, model.source)
    if opened.name is None:
        return
    yield from examine_names(opened.layout, wanted, opened.broken, model)
    if opened.name == "plain":
        return
    quantization, linears = config["quantization_config"], opened.linears | opened.broken
    plain = plain_linears(model, linears)
    yield from examine_claims(quantization, linears, plain, model.head, folder)
    yield from examine_formats(folder, quantization, opened.schemes, opened.source)
    yield from examine_order(quantization, opened.schemes, wanted, model.source)
    yield from examine_peers(opened.schemes, plain, model.source)
    if opened.layout is not None:
        yield from examine_readers(opened.layout, opened.schemes, quantization)


def _examine_contents(
    opened: Opened,
    wanted: Mapping[str, Wanted],
    model: Model,
    before: list[Finding],
    gathered: Gathered,
) -> Iterator[Finding]:
    """Every tensor's numbers, linear by linear, but those of linears with a fault before."""
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
    yield from examine_ties(model)


def _sorted(found: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda f: f.severity != "error"))
