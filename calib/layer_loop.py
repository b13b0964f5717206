"""The layer loop: run calibration rows through one decoder layer at a time and hand each input's
statistics to a worker that quantizes the linears that read it.

Transforms come first: for each, the rows run through the layer as it is, and the statistics of its
inputs decide how its weights are changed. Then the linears are quantized, in one of two orders.
Sequential: batches of rows go through the layer in step. Each stops at a linear until all have
reached it and its input's statistics are whole; the worker quantizes it, and the batches go on with
the quantized weight. So every linear is calibrated on what it will really read, and each runs once.
(A layer's experts are one such stop, or several: see stops.py.) Parallel: the batches go through
twice, first to observe the unquantized layer, then to hand its quantized output to the next one: no
batch is ever held half-way, in up to twice the time. A worker that quantizes whole layers sees all
batches at once instead.

The loop knows no method by name: a worker says which statistics it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .layer_worker import InputGroup, LayerWorker
from .memory import keep_freed_memory, release_free_memory
from .model import LayerCall, LayeredModel, forward_layer
from .observe import (
    SHIFT,
    FloatTwin,
    Observer,
    Watch,
    at_stops,
    new_statistics,
    observe_layer,
    pausable_pass,
)
from .row_guard import RowGuard
from .statistics import STATISTICS, InputShift
from .stops import find_stops, input_hooks, wanted_linears

Order = Literal["sequential", "parallel"]


def run_layers(
    model: LayeredModel,
    rows: Tensor | None,
    worker: LayerWorker,
    order: Order = "sequential",
    batch_size: int = 8,
    all_experts: bool = False,
    progress: Callable[[str], object] = lambda name: None,
    float_model: LayeredModel | None = None,
) -> None:
    """Drive `worker` through every decoder layer, then the output head where it is wanted.

    rows: token ids int64 [rows, seq], or None when the worker needs no statistics.
    batch_size: rows of one forward pass.
    all_experts: an expert's statistics are those of all tokens, not of those routed to it.
    progress: called with each finished layer's name.
    float_model: the model before what comes ahead of its layers was quantized, for workers that
    follow the float model; None: nothing was.
    """
    if rows is None:
        assert not worker.needs, "statistics need calibration rows"
        _without_data(model, worker, progress)
        return
    assert set(worker.needs) <= set(STATISTICS), worker.needs
    if order == "sequential":
        keep_freed_memory()
    with torch.inference_mode():
        batches = model.layer_calls(rows, batch_size)
        recorded = [next(iter(b.values())).hidden for b in batches]
        states = [hidden.clone() for hidden in recorded]  # each layer writes over them
        kwargs = [{name: call.kwargs for name, call in b.items()} for b in batches]
        del batches
        follow = worker.whole_layers or SHIFT in worker.needs  # the float model too
        targets = recorded if follow else []  # its hidden states
        del recorded
        if follow and float_model is not None:
            batches = float_model.layer_calls(rows, batch_size)
            targets = [next(iter(b.values())).hidden for b in batches]
            del batches
        watch = Watch(RowGuard(len(rows)), all_experts)
        head = model.head if model.head is not None and worker.wants(model.head) else None
        for number, name in enumerate(model.layers, 1):
            calls = [LayerCall(h, k[name]) for h, k in zip(states, kwargs, strict=True)]
            last = number == len(model.layers) and head is None and not worker.watches_layers
            with model.loaded(name) as layer:
                float_calls = [
                    LayerCall(h, k[name]) for h, k in zip(targets, kwargs, strict=follow)
                ]
                targets = [forward_layer(layer, call) for call in float_calls]
                moved = False
                if not worker.restore(name, layer):
                    worker.begin(name, layer)
                    for transform in worker.transforms:
                        groups = observe_layer(name, layer, calls, transform, watch)
                        transform.apply(name, layer, groups, calls)
                    if order == "sequential" and not worker.whole_layers:
                        onward = None if last else states
                        _sequential(name, layer, calls, float_calls, worker, watch, onward)
                        moved = True
                    else:
                        _observed(name, layer, calls, targets, worker, watch)
                    worker.finish(name, watch.guard.dropped)
                if not last and not moved:
                    with worker.quantized_inputs(name, layer):
                        for index, call in enumerate(calls):
                            _move_on(states, index, forward_layer(layer, call))
            release_free_memory()
            progress(name)
        if head is not None:
            _output_head(head, model, rows, states, worker, watch.guard)
            progress(head)


def _sequential(
    name: str,
    layer: nn.Module,
    calls: list[LayerCall],
    float_calls: list[LayerCall],
    worker: LayerWorker,
    watch: Watch,
    onward: list[Tensor] | None,
) -> None:
    """Quantize linear after linear, each on what the quantized ones before it give; `onward`, the
    calls' hidden states, become the layer's outputs. None: nobody reads those."""
    stops = find_stops(name, layer, calls[0], worker.wants, watch.all_experts)
    observe = Observer(stops, calls, worker, watch.guard)
    passes = [pausable_pass(layer, call) for call in calls]
    twin = FloatTwin(layer, stops, float_calls) if SHIFT in worker.needs else None

    def stop_at(index: int, args: tuple[Any, ...]) -> None:
        observe(index, args)
        passes[observe.batch].pause()

    try:
        # observed first, then rounded: a paused batch goes on with what was decided meanwhile
        with input_hooks(at_stops(stops, stop_at)), worker.quantized_inputs(name, layer):
            for index in range(len(stops)):
                for observe.batch, batch in enumerate(passes):
                    observe.float_x = twin.advance(observe.batch) if twin else None
                    batch.resume()
                for group in observe.take(index):
                    worker.quantize(group)
            if onward is not None:
                for index, batch in enumerate(passes):
                    _move_on(onward, index, batch.finish())
    finally:
        for batch in passes:
            batch.close()
        if twin is not None:
            twin.close()


def _move_on(states: list[Tensor], index: int, output: Tensor) -> None:
    """Put a layer's output in place of its input, in the same memory where it fits: what outlives
    layers then stays where it is and leaves no holes that add up."""
    there = states[index]
    same = there.shape == output.shape and there.dtype == output.dtype
    states[index] = there.copy_(output) if same else output


def _observed(
    name: str,
    layer: nn.Module,
    calls: list[LayerCall],
    targets: list[Tensor],
    worker: LayerWorker,
    watch: Watch,
) -> None:
    """Quantize what has been observed in the unquantized layer."""
    groups = observe_layer(name, layer, calls, worker, watch)
    if worker.whole_layers:
        worker.quantize_layer(name, layer, groups, calls, targets)
        return
    assert SHIFT not in worker.needs, "the recipe allows the shift of inputs in sequence only"
    for group in groups:
        worker.quantize(group)


def _without_data(
    model: LayeredModel, worker: LayerWorker, progress: Callable[[str], object]
) -> None:
    head = [model.head] if model.head is not None and worker.wants(model.head) else []
    for name in [*model.layers, *head]:
        with torch.inference_mode(), model.loaded(name) as layer:
            if not worker.restore(name, layer):
                worker.begin(name, layer)
                linears = wanted_linears(name, layer, worker.wants)
                for members in worker.peers(list(linears)):
                    worker.quantize(InputGroup({n: linears[n] for n in members}, {}))
                worker.finish(name, [])
        progress(name)


def _output_head(
    name: str,
    model: LayeredModel,
    rows: Tensor,
    states: list[Tensor],
    worker: LayerWorker,
    guard: RowGuard,
) -> None:
    with model.loaded(name) as head:
        assert isinstance(head, nn.Linear)
        if worker.restore(name, head):
            return
        worker.begin(name, head)
        statistics: dict[str, Any] = {}
        first_row = 0
        for x in model.head_inputs(rows, states):
            statistics = statistics or new_statistics(worker, x)
            finite = guard.finite_rows(first_row, LayerCall(x, {}), x)
            for statistic in statistics.values():
                if not isinstance(statistic, InputShift):  # not followed beyond the layers
                    statistic.add(finite)
            first_row += len(x)
        worker.quantize(InputGroup({name: head}, statistics))
        worker.finish(name, guard.dropped)
