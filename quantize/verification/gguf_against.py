"""A GGUF file against the original model, tensor by tensor, as lowbit's import reads the file."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from torch import Tensor

from ...kernels.errors import UserError
from ..checkpoint.load import read_config
from ..fp8_source import open_source
from ..gguf.reader import GGUFFile
from ..gguf.to_hf import Place, read_hyperparameters, read_tensor, tensor_table
from .against import Comparison, TensorError, outliers, strays
from .deviations import blockwise, relative_error
from .findings import Finding, finding
from .tensors import build_model

PRECISION = {"F32": 1e-5, "BF16": 1e-2, "F16": 1e-3}  # of what is stored as it was, rounded


def compare_gguf(path: Path, base: Path) -> Comparison:
    """Every tensor of the file, in all of its parts, against the original's in the folder `base`.

    UserError when that cannot be read.
    """
    try:
        file = GGUFFile(path)
        table = tensor_table(file, read_hyperparameters(file))
    except UserError as e:
        told = finding("not compared", path.name, "a file that lowbit imports", e)
        return Comparison((), [told])
    model, found = build_model(base, read_config(base), open_source(base))
    errors: list[TensorError] = []
    for name, place in table.items():
        if name not in model.source:
            found.append(finding("not in the original", name, "a tensor", "no such tensor"))
            continue
        theirs = model.source.get(name).float()
        try:
            ours = read_tensor(file, name, place, torch.float32)
        except UserError:
            continue  # said where its blocks are examined
        kind = file.tensors[place.target.name].kind
        found += _compare(name, kind, place, ours, theirs, errors)
        model.source.close()
    return Comparison(tuple(errors), [*found, *outliers(errors)])


def _compare(
    name: str, kind: str, place: Place, ours: Tensor, theirs: Tensor, errors: list[TensorError]
) -> list[Finding]:
    """kind: the type that the tensor is stored in; errors: takes that of one of blocks."""
    if ours.shape != theirs.shape:
        return [finding("shape", name, tuple(theirs.shape), tuple(ours.shape))]
    if kind in PRECISION:
        error = relative_error(ours, theirs)
        if error <= PRECISION[kind]:
            return []
        return [finding("changed tensor", name, "the original's values", f"{error:.3g} of them")]
    if place.target.transposed:
        ours, theirs = ours.T.contiguous(), theirs.T.contiguous()
    width, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    told = blockwise(ours, theirs, 8 * nbytes / width, width)
    role = f"{name.removesuffix('.weight').rpartition('.')[2]} {kind}"
    errors.append(TensorError(name, role, told.relative_error))
    return list(strays(name, told))
