"""How long calibration rows take through a layer of the model, timed on random weights."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import nn

from ...calib.model import LayerCall, LayeredModel, forward_layer
from ...calib.sample_call import layer_kinds, random_weights, sample_call
from ...kernels.errors import UserError
from .rates import random, seconds_of

LAYER_BYTES = 3 << 30  # of a layer that is filled with numbers for a timing, at most
QUICK = 0.15  # seconds of one row: with less, a whole batch is timed
BESIDE_PRODUCTS = 1.2  # attention, norms and activations of a wide layer, over its products
TIMED_ROWS = 2048  # output rows of a timed product, at most


class RowTimes(NamedTuple):
    """seconds: a layer of each kind -> of one row's way through it. note: how it was found where it
    was not by running the layers, "" otherwise."""

    seconds: dict[str, float]
    note: str = ""


def row_times(model: LayeredModel, rows: int, seq_len: int) -> RowTimes:
    """Time rows of `seq_len` tokens, `rows` in a batch, through a layer of each kind."""
    kinds = list(layer_kinds(model))
    largest = max(_bytes(model, name) for name in kinds)
    if largest > LAYER_BYTES:
        note = f"a layer of {largest / 1e9:.1f} GB is not run: its products alone are timed"
    else:
        try:
            return RowTimes(_run_layers(model, kinds, rows, seq_len))
        except UserError as e:
            note = f"{e}; its products alone are timed"
    seconds = {name: _products(model, name, seq_len) for name in kinds}
    return RowTimes(seconds, note)


def _run_layers(model: LayeredModel, names: list[str], rows: int, seq_len: int) -> dict[str, float]:
    single = sample_call(model, 1, seq_len)
    batch: dict[str, LayerCall] = {}
    seconds = {}
    for name in names:
        layer = model.model.get_submodule(name)
        with torch.inference_mode(), random_weights(layer, model.device):
            layer.to(model.device)  # buffers
            seconds[name] = _seconds(layer, single[name], model.device)
            if seconds[name] < QUICK and rows > 1:
                batch = batch or sample_call(model, rows, seq_len)
                seconds[name] = _seconds(layer, batch[name], model.device) / rows
    return seconds


def _seconds(layer: nn.Module, call: LayerCall, device: torch.device) -> float:
    start = time.perf_counter()
    run = lambda: forward_layer(layer, call)  # noqa: E731
    run()
    first = time.perf_counter() - start
    return first if first > 10 * QUICK else seconds_of(run, device, 1)


def _products(model: LayeredModel, name: str, seq_len: int) -> float:
    """Seconds of a row, from the products of the layer's shapes."""
    shapes: dict[tuple[int, int], int] = {}
    for parameter in model.model.get_submodule(name).parameters():
        if parameter.ndim == 2:
            key = parameter.shape[0], parameter.shape[1]
            shapes[key] = shapes.get(key, 0) + 1
    total = 0.0
    for (out, columns), count in shapes.items():
        timed = min(out, TIMED_ROWS)
        w = random(timed, columns, device=model.device, dtype=model.dtype)
        x = random(seq_len, columns, device=model.device, dtype=model.dtype)
        each = seconds_of(lambda x=x, w=w: nn.functional.linear(x, w), model.device, 1)
        total += count * each * out / timed
    return total * BESIDE_PRODUCTS


def _bytes(model: LayeredModel, name: str) -> int:
    parameters = model.model.get_submodule(name).parameters()
    return sum(p.numel() for p in parameters) * model.dtype.itemsize
