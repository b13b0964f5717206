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

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .memory import release_free_memory, share_one_arena
from .model import LayerCall, LayeredModel, forward_layer
from .pausable import PausableCall
from .row_guard import RowGuard
from .statistics import STATISTICS, InputShift
from .stops import InputHook, LinearStop, Stop, find_stops, input_hooks, wanted_linears

LAYERS_A_TRIM = (
    4  # trimming after each costs a tenth of the time, never lets memory grow with depth
)
SHIFT = "input_shift"  # the statistic for which the float model is run beside
Order = Literal["sequential", "parallel"]


class InputGroup(NamedTuple):
    """Linears (full name -> module) that read the same input, and that input's statistics (name in
    STATISTICS -> an instance of its class).

    routed: for the linears of an expert, how many tokens the model's router gives it.
    """

    linears: dict[str, nn.Linear]
    statistics: dict[str, Any]
    routed: int | None = None


class Wants(Protocol):
    """Who asks for statistics (`needs`: names of STATISTICS) of which linears' inputs."""

    @property
    def needs(self) -> frozenset[str]: ...

    def wants(self, name: str) -> bool: ...


class LayerTransform(Wants, Protocol):
    """A change of a layer's weights before they are quantized."""

    def apply(
        self,
        layer_name: str,
        layer: nn.Module,
        groups: list[InputGroup],
        calls: list[LayerCall],
    ) -> None:
        """Change the weights of the loaded layer, unquantized until then."""
        ...


class LayerWorker(Wants, Protocol):
    """What the loop drives; it `wants` the linears that are to be quantized.

    transforms: what changes a layer's weights before. whole_layers: layers go to `quantize_layer`
    instead of their input groups to `quantize`, together with what the float model puts out there.
    """

    transforms: Sequence[LayerTransform] = ()
    whole_layers: bool = False

    def begin(self, layer_name: str, layer: nn.Module) -> None:
        """Called with each loaded layer that is not finished, before all else."""

    def quantize(self, group: InputGroup) -> None:
        """Quantize the group's linears and put the values that are stored into their weights."""
        ...

    def quantize_layer(
        self,
        layer_name: str,
        layer: nn.Module,
        groups: list[InputGroup],
        calls: list[LayerCall],
        targets: list[Tensor],
    ) -> None:
        """Quantize all of the layer's wanted linears.

        targets: the layer's outputs in the float model, where no layer before is quantized.
        """
        raise NotImplementedError

    def quantized_inputs(self, layer_name: str, layer: nn.Module) -> AbstractContextManager[None]:
        """While open, a linear that is quantized rounds its input where its scheme says so."""
        return nullcontext()

    def finish(self, layer_name: str, dropped: list[int]) -> None:
        """Called when all linears of a layer are quantized: store them.

        dropped: the calibration rows left out as non-finite up to here.
        """
        ...

    def restore(self, layer_name: str, layer: nn.Module) -> bool:
        """Put the stored weights of a finished layer into it; False: it is not finished."""
        ...


def run_layers(
    model: LayeredModel,
    rows: Tensor | None,
    worker: LayerWorker,
    order: Order = "sequential",
    batch_size: int = 8,
    all_experts: bool = False,
    progress: Callable[[str], object] = lambda name: None,
) -> None:
    """Drive `worker` through every decoder layer, then the output head where it is wanted.

    rows: token ids int64 [rows, seq], or None when the worker needs no statistics.
    batch_size: rows of one forward pass.
    all_experts: an expert's statistics are those of all tokens, not of those routed to it.
    progress: called with each finished layer's name.
    """
    if rows is None:
        assert not worker.needs, "statistics need calibration rows"
        _without_data(model, worker, progress)
        return
    assert set(worker.needs) <= set(STATISTICS), worker.needs
    if order == "sequential":
        share_one_arena()
    with torch.inference_mode():
        batches = model.layer_calls(rows, batch_size)
        states = [next(iter(b.values())).hidden for b in batches]
        kwargs = [{name: call.kwargs for name, call in b.items()} for b in batches]
        del batches
        targets = states  # the hidden states of the float model, kept where a worker wants them
        watch = _Watch(RowGuard(len(rows)), all_experts)
        for number, name in enumerate(model.layers, 1):
            calls = [LayerCall(h, k[name]) for h, k in zip(states, kwargs, strict=True)]
            with model.loaded(name) as layer:
                float_calls = [LayerCall(h, k[name]) for h, k in zip(targets, kwargs, strict=True)]
                if worker.whole_layers or SHIFT in worker.needs:
                    targets = [forward_layer(layer, call) for call in float_calls]
                if not worker.restore(name, layer):
                    worker.begin(name, layer)
                    for transform in worker.transforms:
                        groups = _observe(name, layer, calls, transform, watch)
                        transform.apply(name, layer, groups, calls)
                    if worker.whole_layers:
                        groups = _observe(name, layer, calls, worker, watch)
                        worker.quantize_layer(name, layer, groups, calls, targets)
                        states = _forward(name, layer, calls, worker)
                    else:
                        step = _sequential if order == "sequential" else _parallel
                        states = step(name, layer, calls, float_calls, worker, watch)
                    worker.finish(name, watch.guard.dropped)
                else:
                    states = _forward(name, layer, calls, worker)
            if number % LAYERS_A_TRIM == 0:
                release_free_memory()
            progress(name)
        if model.head is not None and worker.wants(model.head):
            _output_head(model.head, model, rows, states, worker, watch.guard)
            progress(model.head)


def _forward(
    name: str, layer: nn.Module, calls: list[LayerCall], worker: LayerWorker
) -> list[Tensor]:
    """The quantized layer's outputs."""
    with worker.quantized_inputs(name, layer):
        return [forward_layer(layer, call) for call in calls]


class _Watch(NamedTuple):
    """How inputs are observed, see `run_layers`."""

    guard: RowGuard
    all_experts: bool


def _sequential(
    name: str,
    layer: nn.Module,
    calls: list[LayerCall],
    float_calls: list[LayerCall],
    worker: LayerWorker,
    watch: _Watch,
) -> list[Tensor]:
    stops = find_stops(name, layer, calls[0], worker.wants, watch.all_experts)
    observe = _Observer(stops, calls, worker, watch.guard)
    passes = [_pausable_pass(layer, call) for call in calls]
    twin = _FloatTwin(layer, stops, float_calls) if SHIFT in worker.needs else None

    def stop_at(index: int, args: tuple[Any, ...]) -> None:
        observe(index, args)
        passes[observe.batch].pause()

    try:
        # observed first, then rounded: a paused batch goes on with what was decided meanwhile
        with input_hooks(_at_stops(stops, stop_at)), worker.quantized_inputs(name, layer):
            for index in range(len(stops)):
                for observe.batch, batch in enumerate(passes):
                    observe.float_x = twin.advance(observe.batch) if twin else None
                    batch.resume()
                for group in observe.take(index):
                    worker.quantize(group)
            return [batch.finish() for batch in passes]
    finally:
        for batch in passes:
            batch.close()
        if twin is not None:
            twin.close()


def _pausable_pass(layer: nn.Module, call: LayerCall) -> PausableCall[Tensor]:
    def run() -> Tensor:
        with torch.inference_mode():  # a thread has its own
            return forward_layer(layer, call)

    return PausableCall(run)


class _FloatTwin:
    """The unquantized layer, run on what it reads in the float model, one stop after the other in
    step with the layer that is being quantized."""

    def __init__(self, layer: nn.Module, stops: list[Stop], calls: list[LayerCall]) -> None:
        twin = copy.deepcopy(layer)
        inside = dict(zip(layer.modules(), twin.modules(), strict=True))
        twins = {stop.module: inside[stop.module] for stop in stops}
        self._passes = [_pausable_pass(twin, call) for call in calls]
        self._running = 0
        self._x: Tensor | None = None

        def stop_at(index: int, args: tuple[Any, ...]) -> None:
            self._x = args[0] if isinstance(stops[index], LinearStop) else None
            self._passes[self._running].pause()

        hooks = _at_stops(stops, stop_at)
        self._handles = [
            twins[module].register_forward_pre_hook(_on_behalf_of(module, hook))
            for module, hook in hooks.items()
        ]

    def advance(self, batch: int) -> Tensor | None:
        """What the linears of the batch's next stop read; None where tokens are routed."""
        self._running = batch
        self._passes[batch].resume()
        return self._x

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for batch in self._passes:
            batch.close()


def _parallel(
    name: str,
    layer: nn.Module,
    calls: list[LayerCall],
    float_calls: list[LayerCall],
    worker: LayerWorker,
    watch: _Watch,
) -> list[Tensor]:
    assert SHIFT not in worker.needs, "the recipe allows the shift of inputs in sequence only"
    for group in _observe(name, layer, calls, worker, watch):
        worker.quantize(group)
    return _forward(name, layer, calls, worker)


def _observe(
    name: str, layer: nn.Module, calls: list[LayerCall], wants: Wants, watch: _Watch
) -> list[InputGroup]:
    """The layer's wanted linears by input, with the statistics of one pass of all batches."""
    stops = find_stops(name, layer, calls[0], wants.wants, watch.all_experts)
    if not wants.needs:
        return [InputGroup(group, {}) for stop in stops for group in stop.groups]
    observe = _Observer(stops, calls, wants, watch.guard)
    with input_hooks(_at_stops(stops, observe)):
        for observe.batch, call in enumerate(calls):
            forward_layer(layer, call)
    return [group for index in range(len(stops)) for group in observe.take(index)]


def _at_stops(
    stops: list[Stop], act: Callable[[int, tuple[Any, ...]], None]
) -> dict[nn.Module, InputHook]:
    """Hooks that call `act` with the number of each stop that a call of its module is, in order,
    and with the call's arguments."""
    numbers: dict[nn.Module, list[int]] = {}
    for index, stop in enumerate(stops):
        numbers.setdefault(stop.module, []).append(index)

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        for index in numbers[module]:
            act(index, args)

    return dict.fromkeys(numbers, hook)


def _on_behalf_of(original: nn.Module, hook: InputHook) -> InputHook:
    """`hook` for a copy of the module that it knows."""
    return lambda _, args: hook(original, args)


class _Observer:
    """Adds what the groups of each stop read to their statistics. `batch`: the one that runs;
    `float_x`: what it reads at the stop in the float model, where that is followed."""

    def __init__(
        self, stops: list[Stop], calls: list[LayerCall], wants: Wants, guard: RowGuard
    ) -> None:
        self._stops, self._calls, self._wants, self._guard = stops, calls, wants, guard
        self._seen = [[InputGroup(group, {}) for group in stop.groups] for stop in stops]
        self.batch = 0
        self.float_x: Tensor | None = None

    def __call__(self, index: int, args: tuple[Any, ...]) -> None:
        """Stop number `index` is reached by a call with `args`."""
        first_row = sum(len(call.hidden) for call in self._calls[: self.batch])
        for number, (x, routed) in enumerate(self._stops[index].observe(args)):
            group = self._seen[index][number]
            if not group.statistics:
                group.statistics.update(_new_statistics(self._wants, x))
            if routed is not None:
                self._seen[index][number] = group._replace(routed=(group.routed or 0) + routed)
            finite = self._guard.finite_rows(first_row, self._calls[self.batch], x)
            for statistic in group.statistics.values():
                if not isinstance(statistic, InputShift):
                    statistic.add(finite)
                elif self.float_x is not None and len(finite) == len(x):  # no row was dropped
                    statistic.add_pair(x, self.float_x)

    def take(self, index: int) -> Iterator[InputGroup]:
        """The groups of a stop with their statistics, which are not held any longer."""
        groups, self._seen[index] = self._seen[index], []
        while groups:
            yield groups.pop(0)


def _without_data(
    model: LayeredModel, worker: LayerWorker, progress: Callable[[str], object]
) -> None:
    head = [model.head] if model.head is not None and worker.wants(model.head) else []
    for name in [*model.layers, *head]:
        with torch.inference_mode(), model.loaded(name) as layer:
            if not worker.restore(name, layer):
                worker.begin(name, layer)
                for linear_name, linear in wanted_linears(name, layer, worker.wants).items():
                    worker.quantize(InputGroup({linear_name: linear}, {}))
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
            statistics = statistics or _new_statistics(worker, x)
            finite = guard.finite_rows(first_row, LayerCall(x, {}), x)
            for statistic in statistics.values():
                if not isinstance(statistic, InputShift):  # not followed beyond the layers
                    statistic.add(finite)
            first_row += len(x)
        worker.quantize(InputGroup({name: head}, statistics))
        worker.finish(name, guard.dropped)


def _new_statistics(worker: Wants, x: Tensor) -> dict[str, Any]:
    return {need: STATISTICS[need](x.shape[-1], x.device) for need in sorted(worker.needs)}
