"""Make an importance matrix: run calibration rows through a model one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ...calib.layer_loop import run_layers
from ...calib.layer_worker import InputGroup, LayerWorker
from ...calib.model import LayeredModel
from ...calib.statistics import SquareSum
from ...calib.text import Text
from ...kernels.device import resolve_device
from ...kernels.errors import UserError
from ...kernels.float32_linears import float32_linears
from ...kernels.names import names_in_model
from ..checkpoint.load import Checkpoint, read_config
from ..fp8_source import is_fp8, open_model
from ..prepare import calibration_rows, forward_dtype
from ..recipe import Calibration, Recipe
from .export import read_hyperparameters
from .hparams import Hyperparameters
from .imatrix import Imatrix, Importance
from .names import targets


class Coverage(NamedTuple):
    """A stack of experts of which some saw no token: its tensor's name, and how many of all."""

    name: str
    unseen: int
    experts: int


class Settings(NamedTuple):
    """Of a run: the calibration text and its rows, and how they run through the model."""

    source: str = Calibration.source
    samples: int = Calibration.samples
    seq_len: int = Calibration.seq_len
    batch_size: int = 8
    dtype: str = "float32"
    device: str = "auto"


class SquareCollector(LayerWorker):
    """Keeps the sums of squares of what the linears `names` read, and changes nothing."""

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self.seen: dict[str, SquareSum] = {}

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"square_sum"})

    def wants(self, name: str) -> bool:
        return name in self._names

    def quantize(self, group: InputGroup) -> None:
        statistic = group.statistics.get("square_sum")
        for name, linear in group.linears.items():
            self.seen[name] = statistic or SquareSum(linear.in_features)

    def finish(self, layer_name: str, dropped: list[int]) -> None:
        pass

    def restore(self, layer_name: str, layer: nn.Module) -> bool:
        return False


def imatrix_of_model(folder: Path, settings: Settings, progress: bool = True) -> Imatrix:
    """The importance matrix of the model in `folder`. UserError for an architecture that
    llama.cpp does not know, and for text that cannot be had or is too short."""
    h = read_hyperparameters(Checkpoint(folder))
    model, rows, text = open_with_rows(folder, settings)
    with tqdm(total=len(model.layers), desc="imatrix", unit="layer", disable=not progress) as bar:
        return collect_imatrix(
            model, h, rows, text.description, settings.batch_size, lambda _: bar.update()
        )


def open_with_rows(folder: Path, settings: Settings) -> tuple[LayeredModel, Tensor, Text]:
    """The model, its calibration rows int64 [samples, seq_len], and their text. UserError where the
    text cannot be had or is too short."""
    quantization = read_config(folder).get("quantization_config")
    if quantization and not is_fp8(quantization):
        raise UserError(
            f"{folder} is quantized: calibrate on the original model, whose importance matrix "
            "serves exports of this one as well"
        )
    calibration = Calibration(settings.source, settings.samples, settings.seq_len)
    recipe = replace(Recipe(), calibration=calibration)
    recipe = replace(recipe, execution=replace(recipe.execution, dtype=settings.dtype))
    device = resolve_device(settings.device)
    model = open_model(folder, forward_dtype(recipe, device, folder), device)
    return model, *calibration_rows(model, recipe)


def collect_imatrix(
    model: LayeredModel,
    h: Hyperparameters,
    rows: Tensor,
    dataset: str,
    batch_size: int = 8,
    progress: Callable[[str], Any] = lambda name: None,
) -> Imatrix:
    """The importance matrix of every linear in the decoder layers.

    rows: token ids int64 [rows, seq]. progress: called with each finished layer's name.
    """
    matrices = [t for t in targets(h) if t.part == "weight" and not t.float32]
    layers = tuple(f"{layer}." for layer in model.layers)
    names = names_in_model(model.model, [m for t in matrices for m in t.modules])
    inside = {name for name in names.values() if name.startswith(layers)}
    collector = SquareCollector(inside)
    with float32_linears():
        run_layers(model, rows, collector, batch_size=batch_size, progress=progress)
    entries = {}
    for matrix in matrices:
        seen = [collector.seen.get(names[module]) for module in matrix.modules]
        if any(s is not None for s in seen):
            entries[matrix.name] = stacked([s or empty_like(seen) for s in seen])
    return Imatrix(entries, [dataset], len(rows), rows.shape[1])


def stacked(seen: list[SquareSum]) -> Importance:
    """The sums of one matrix, or of each expert's."""
    sums = torch.stack([s.total.float().cpu() for s in seen])
    return Importance(sums, torch.tensor([float(s.tokens) for s in seen]))


def empty_like(seen: list[SquareSum | None]) -> SquareSum:
    return SquareSum(next(len(s.total) for s in seen if s is not None))


def partial_coverage(imatrix: Imatrix) -> list[Coverage]:
    """The stacks of which some experts saw no token: those count every column alike."""
    return [
        Coverage(name, entry.unseen, len(entry.counts))
        for name, entry in imatrix.entries.items()
        if entry.unseen
    ]
