"""Export with GPTQ, layer by layer into the file, each linear calibrated on what it will read.

The layer loop hands over the linears of a layer with the Hessians of their inputs; their blocks are
made, and the values that llama.cpp will read from them are what the rest of the model runs on. The
float model runs beside: a linear's weight first makes up for how its input has moved from what it
is there (passes/gptq.py, `corrected_weight`). A finished layer is written, so memory is that of one
layer, its statistics and the hidden states.
Tensors outside the decoder layers, and those that are no linear's, are rounded by themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...calib.layer_loop import run_layers
from ...calib.layer_worker import InputGroup, LayerWorker
from ...calib.model import LayeredModel
from ...calib.statistics import InputShift
from ...kernels.errors import UserError
from ...kernels.names import names_in_model
from ..checkpoint.load import Checkpoint
from ..expert_calibration import dampened, why_rounded
from ..layer_weights import LayerWeights
from ..passes.gptq import Factor, corrected_weight, factor_hessian, output_energy
from ..passes.settings import GPTQSettings
from .blocks import CODECS, Codec
from .blocks.scaled import ScaledCodec
from .encoding import Entry, encode
from .export import Encoded, Encoder, ExportReport, Write, export_gguf
from .gptq import block_order, gguf_gptq
from .imatrix_run import Settings, open_with_rows

SETTINGS = GPTQSettings(input_correction=0.5)  # more gains little, and loses where rows are few
SWEEPS = 4  # later looks at every code


def export_gptq(
    folder: str | Path, out: Path, file_type: str, settings: Settings, **options: Any
) -> ExportReport:
    """Write `out` from the model in `folder`, as export_gguf does with the same `options`, with
    GPTQ's codes for the linears of its decoder layers.

    UserError as of export_gguf, for a checkpoint that is quantized already, and for calibration
    text that cannot be had or is too short.
    """
    checkpoint = Checkpoint(Path(folder))
    if checkpoint.schemes:
        raise UserError(
            f"{folder} is quantized already, and GPTQ would round its codes again: give the "
            "original model, or leave --method out to carry the codes over"
        )
    model, rows, _ = open_with_rows(Path(folder), settings)
    encoder = layer_by_layer(model, checkpoint, rows, settings.batch_size)
    return export_gguf(folder, out, file_type, encoder=encoder, **options)


def layer_by_layer(
    model: LayeredModel, checkpoint: Checkpoint, rows: Tensor, batch_size: int = 8
) -> Encoder:
    """An encoder that calibrates on `rows`, token ids int64 [rows, seq]."""

    def run(entries: Sequence[Entry], write: Write) -> Encoded:
        worker = BlockWorker(model, checkpoint, entries, write)
        run_layers(model, rows, worker, batch_size=batch_size)
        worker.write_rest()
        return Encoded(worker.solved, worker.warnings())

    return run


class Place(NamedTuple):
    """Which of an entry's modules a linear is."""

    entry: Entry
    index: int


class BlockWorker(LayerWorker):
    """Makes the blocks of a layer's linears and hands over the file's tensors, in its order.

    `solved`: as of Encoded, of what is written.
    """

    def __init__(
        self, model: LayeredModel, checkpoint: Checkpoint, entries: Sequence[Entry], write: Write
    ) -> None:
        self._model, self._checkpoint, self._write = model, checkpoint, write
        self._pending = deque(entries)
        self._layers = list(model.layers)
        self._blocks: dict[str, Tensor] = {}  # of the layer at work, by the checkpoint's module
        self._errors: dict[str, tuple[float, float]] = {}  # squared, of its outputs' squares
        self._rounded: list[str] = []  # for want of tokens
        self._unknown: set[str] = set()  # tensors of types that GPTQ does not know
        self._dropped = 0
        self._places = _places(model, entries)
        self.solved: dict[str, float] = {}

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"hessian", "input_shift"})

    def wants(self, name: str) -> bool:
        return name in self._places

    def begin(self, layer_name: str, layer: nn.Module) -> None:
        self._weights = LayerWeights(self._model, layer_name, layer)

    def quantize(self, group: InputGroup) -> None:
        by_codec: dict[type[Codec], list[str]] = {}
        for name in group.linears:
            by_codec.setdefault(self._places[name].entry.planned.codec, []).append(name)
        factors: dict[int, Factor] = {}
        for codec, names in by_codec.items():
            if not issubclass(codec, ScaledCodec):
                self._unknown |= {self._places[name].entry.planned.name for name in names}
            elif not self._too_few_tokens(names, group):
                if codec.block not in factors:
                    factors[codec.block] = _factor(group, codec.block)
                self._solve(names, factors[codec.block], codec, group.statistics["input_shift"])
                continue
            for name in names:
                self._round(name, group)

    def finish(self, layer_name: str, dropped: list[int]) -> None:
        self._dropped = len(dropped)
        prefix = f"blk.{self._layers.index(layer_name)}."
        own = [i for i, e in enumerate(self._pending) if e.planned.name.startswith(prefix)]
        for _ in range(own[-1] + 1):
            self._hand_over(self._pending.popleft())
        assert not self._blocks, f"of no tensor: {list(self._blocks)}"

    def restore(self, layer_name: str, layer: nn.Module) -> bool:
        return False

    def write_rest(self) -> None:
        """Hand over what comes after the layers."""
        while self._pending:
            self._hand_over(self._pending.popleft())

    def warnings(self) -> list[str]:
        """What calibration lacked."""
        notes = []
        if self._dropped:
            notes.append(f"{self._dropped} calibration rows with non-finite values were left out")
        if self._rounded:
            notes.append(
                f"{len(self._rounded)} linears of experts that saw too few tokens were rounded, "
                f"first {self._rounded[0]}; more --samples would calibrate them"
            )
        if self._unknown:
            notes.append(
                f"{len(self._unknown)} matrices have types that GPTQ does not know and were "
                f"rounded, first {min(self._unknown)}"
            )
        return notes

    def _too_few_tokens(self, names: list[str], group: InputGroup) -> bool:
        """Whether the linears are of an expert that calibration hardly reached."""
        if group.routed is None:
            return False
        statistic = group.statistics.get("hessian")
        columns = group.linears[names[0]].in_features
        if statistic is not None and why_rounded(statistic.tokens, columns) is None:
            return False
        self._rounded += names
        return True

    def _solve(
        self, names: list[str], factor: Factor, codec: type[ScaledCodec], shift: InputShift
    ) -> None:
        """Linears that share an input, solved at once."""
        placed = [self._placed(name) for name in names]
        stacked, heights = torch.cat(placed), [len(rows) for rows in placed]
        del placed
        if shift.tokens:
            stacked = corrected_weight(stacked, factor, shift.mean(), SETTINGS.input_correction)
        blocks, errors = gguf_gptq(stacked, factor, codec, SWEEPS)
        energies = output_energy(stacked, factor.damped())
        parts = (t.split(heights) for t in (blocks, errors, energies))
        for name, own, error, energy in zip(names, *parts, strict=True):
            self._keep(name, own)
            tensor = self._places[name].entry.planned.name
            before = self._errors.get(tensor, (0.0, 0.0))
            self._errors[tensor] = before[0] + float(error.sum()), before[1] + float(energy.sum())

    def _round(self, name: str, group: InputGroup) -> None:
        """One linear by its codec alone, errors weighed by what calibration says of its input
        where no importance matrix does."""
        entry, index = self._places[name]
        statistic = group.statistics.get("hessian")
        importance = None if entry.importance is None else entry.importance[index]
        if importance is None and statistic is not None and statistic.tokens:
            importance = statistic.mean().diagonal().contiguous()
        placed = self._placed(name)
        if importance is not None:
            importance = importance.to(placed.device)
        self._keep(name, entry.planned.codec.encode(placed, importance))

    def _placed(self, name: str) -> Tensor:
        """The linear's weight with its rows as they lie in the file, float32 [out, in]."""
        return self._places[name].entry.target.place(self._weights.get(f"{name}.weight"))

    def _keep(self, name: str, blocks: Tensor) -> None:
        """Note a linear's blocks, and let the model go on with the values that they hold."""
        entry, index = self._places[name]
        values = entry.target.take(entry.planned.codec.decode(blocks))
        self._weights.put(f"{name}.weight", values)
        self._blocks[entry.modules[index]] = blocks.cpu()

    def _hand_over(self, entry: Entry) -> None:
        found = [self._blocks.pop(module, None) for module in entry.modules]
        made = [blocks for blocks in found if blocks is not None]
        if entry.target.part != "weight" or not made:
            self._write(entry, *encode(self._checkpoint, entry))
            return
        assert len(made) == len(found), entry.planned.name
        self._write(entry, torch.cat(made), None)
        if entry.planned.name in self._errors:
            error, energy = self._errors.pop(entry.planned.name)
            self.solved[entry.planned.name] = error / max(energy, 1e-30)


def _places(model: LayeredModel, entries: Sequence[Entry]) -> dict[str, Place]:
    """The linears of the decoder layers that are stored in blocks, by their names in the model.

    UserError where none is in a type that GPTQ knows.
    """
    found = [
        Place(e, i)
        for e in entries
        if e.target.part == "weight" and e.planned.codec.block > 1
        for i in range(len(e.modules))
    ]
    names = names_in_model(model.model, [p.entry.target.modules[p.index] for p in found])
    inside = tuple(f"{layer}." for layer in model.layers)
    named = [(names[p.entry.target.modules[p.index]], p) for p in found]
    places = {name: place for name, place in named if name.startswith(inside)}
    if not any(issubclass(p.entry.planned.codec, ScaledCodec) for p in places.values()):
        known = ", ".join(name for name, c in CODECS.items() if issubclass(c, ScaledCodec))
        raise UserError(
            "--method gptq has nothing to do: no matrix of the decoder layers gets a type that it "
            f"knows ({known}); choose another --type, or leave --method out"
        )
    assert all(isinstance(model.model.get_submodule(name), nn.Linear) for name in places)
    return places


def _factor(group: InputGroup, block: int) -> Factor:
    """The group's Hessian, factored in an order that keeps blocks together."""
    statistic = group.statistics["hessian"]
    hessian, settings = statistic.mean(), SETTINGS
    if group.routed is not None:
        settings = dampened(settings, statistic.tokens, len(hessian))
    return factor_hessian(hessian, settings, block_order(hessian.diagonal(), block))
