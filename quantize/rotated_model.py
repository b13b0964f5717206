"""A rotated model: for the layer loop, or as a checkpoint of its own.

Which tensors a rotation changes follows from names; that the model still computes the same follows
from running it: one layer of each kind, before and after, must give the same up to the basis.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calib.model import LayeredModel, forward_layer
from ..calib.shards import Shards, TensorSource
from ..kernels.errors import UserError
from .checkpoint.files import fsync_path, write_text
from .checkpoint.load import read_config
from .checkpoint.manifest import write_manifest
from .checkpoint.raw import write_shards
from .checkpoint.save import check_output, made_tensor, put_in_place, to_store
from .checkpoint.side_files import copy_side_files
from .checkpoint.workspace import workspace
from .passes.settings import RotateSettings
from .rotated_source import RotatedSource

CHECKED_TOKENS = 16
TOLERANCE = 1e-3  # of what a layer adds to the residual stream; rounding alone gives 1e-6
ROUNDING = 1e-5  # of the residual stream itself, which may be far larger than what is added


def rotated_model(
    folder: Path,
    settings: RotateSettings,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    source: TensorSource | None = None,
    config: Any = None,
    verify: bool = True,
    stored: torch.dtype | None = None,
) -> tuple[LayeredModel, RotatedSource]:
    """The model in `folder` under R1 and R2, and its tensors.

    source, config: in place of the folder's own. stored: as of RotatedSource. verify: whether it
    is run before and after, which reads weights; without, names alone decide. Raises UserError for
    a model that the rotation cannot be fused into, before any of it is quantized.
    """
    plain = Shards(folder) if source is None else source
    original = LayeredModel(folder, torch.float32, device, plain, config)
    rotated = RotatedSource(plain, original, settings, stored)
    config = deepcopy(original.config)
    for part in (config, config.get_text_config()):
        for key, value in rotated.config_changes.items():
            setattr(part, key, value)
    model = LayeredModel(folder, torch.float32, device, rotated, config)
    if verify:
        check_rotation(original, model, rotated)
    if dtype != torch.float32:
        model = LayeredModel(folder, dtype, device, rotated, config)
    return model, rotated


@torch.inference_mode()
def check_rotation(original: LayeredModel, rotated: LayeredModel, source: RotatedSource) -> None:
    """UserError where a layer (one of each kind is run) is not the same up to the basis."""

    def turned(x: Tensor) -> Tensor:
        return x if source.residual is None else source.residual.apply(x)

    vocabulary = original.config.get_text_config().vocab_size
    rows = torch.linspace(0, vocabulary - 1, CHECKED_TOKENS).long()[None]
    before, after = original.layer_calls(rows, 1)[0], rotated.layer_calls(rows, 1)[0]
    for name in _one_of_each_kind(original):
        hidden = before[name].hidden
        with original.loaded(name) as layer:
            expected = turned(forward_layer(layer, before[name]))
        with rotated.loaded(name) as layer:
            got = forward_layer(layer, after[name]._replace(hidden=turned(hidden)))
        error = (got - expected).norm()
        added = (expected - turned(hidden)).norm()
        if not error < TOLERANCE * added + ROUNDING * hidden.norm():
            raise UserError(
                f"'{name}' of {type(original.model).__name__} does not compute the same once it is "
                f"rotated (relative error {float(error / added):.1e}): its structure is not the "
                "known one; leave the rotation out, or one of r1 and r2"
            )


def changed_tensors(
    source: RotatedSource, held: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, in the dtype that it is to be stored in, of what the rotation changed and
    is not `held` elsewhere (quantized): embedding, norms, head, linears that are left alone."""
    for name in source.changed:
        if name not in held:
            yield name, to_store(source, name)


def write_rotated(
    folder: Path,
    out: Path,
    settings: RotateSettings | None = None,
    overwrite: bool = False,
    stored: torch.dtype | None = None,
) -> RotatedSource:
    """Write the model in `folder`, rotated and otherwise as it is, as the checkpoint `out`.

    Tensors keep their dtypes, but those that change are `stored` in that one where it is named; one
    is in memory at a time. Returns the rotated tensors' source.
    """
    check_output(folder, out, overwrite)
    _, source = rotated_model(folder, settings or RotateSettings(), stored=stored)
    with workspace(out) as partial:
        assembled = partial / "assembled"
        assembled.mkdir()
        written = write_shards(assembled, (made_tensor(source, name) for name in source.names()))
        known = {**written.files, **copy_side_files(folder, assembled)}
        config = {**read_config(folder), **source.config_changes}
        text = json.dumps(config, indent=2) + "\n"
        known["config.json"] = write_text(assembled / "config.json", text)
        write_manifest(assembled, known)
        fsync_path(assembled)
        put_in_place(assembled, out)
    return source


def _one_of_each_kind(model: LayeredModel) -> list[str]:
    """The first layer of each set of parameter names, experts counted as one."""
    kinds: dict[frozenset[str], str] = {}
    for name, layer in model.layers.items():
        kind = frozenset(re.sub(r"\.\d+\.", ".N.", n) for n, _ in layer.named_parameters())
        kinds.setdefault(kind, name)
    return list(kinds.values())
