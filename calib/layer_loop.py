"""The layer loop: run calibration rows through one decoder layer at a time and hand each input's
statistics to a worker that quantizes the linears that read it.

Transforms come first: for each, the rows run through the layer as it is, and the statistics of its
inputs decide how its weights are changed. Then the linears are quantized, in one of two orders. Sequential: batches of rows go through the layer in step. Each stops at a linear until
all have reached it and its input's statistics are whole; the worker quantizes it, and the batches
go on with the quantized weight. So every linear is calibrated on what it will really read, and each
runs once. Parallel: the batches go through twice, first to observe the unquantized layer, then to
hand its quantized output to the next one: no batch is ever held half-way, in up to twice the time.
A worker that quantizes whole layers sees all batches at once instead.

The loop knows no method by name: a worker says which statistics it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..kernels.errors import UserError
from .memory import release_free_memory, share_one_arena
from .model import LayerCall, LayeredModel
from .pausable import PausableCall
from .row_guard import RowGuard
from .statistics import STATISTICS

LAYERS_A_TRIM = (
    4  # trimming after each costs a tenth of the time, never lets memory grow with depth
)
Order = Literal["sequential", "parallel"]
InputHook = Callable[[nn.Module, tuple[Any, ...]], None]


class InputGroup(NamedTuple):
    """Linears (full name -> module) that read the same input, and that input's statistics."""

    linears: dict[str, nn.Linear]
    statistics: dict[str, Any]  # name in STATISTICS -> an instance of its class


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
    instead of their input groups to `quantize`.
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
    ) -> None:
        """Quantize all of the layer's wanted linears."""
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
    progress: Callable[[str], object] = lambda name: None,
) -> None:
    """Drive `worker` through every decoder layer, then the output head where it is wanted.

    rows: token ids int64 [rows, seq], or None when the worker needs no statistics.
    batch_size: rows of one forward pass.
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
        guard = RowGuard(len(rows))
        for number, name in enumerate(model.layers, 1):
            calls = [LayerCall(h, k[name]) for h, k in zip(states, kwargs, strict=True)]
            with model.loaded(name) as layer:
                if not worker.restore(name, layer):
                    worker.begin(name, layer)
                    for transform in worker.transforms:
                        groups = _observe(name, layer, calls, transform, guard)
                        transform.apply(name, layer, groups, calls)
                    if worker.whole_layers:
                        groups = _observe(name, layer, calls, worker, guard)
                        worker.quantize_layer(name, layer, groups, calls)
                        states = _forward(name, layer, calls, worker)
                    else:
                        step = _sequential if order == "sequential" else _parallel
                        states = step(name, layer, calls, worker, guard)
                    worker.finish(name, guard.dropped)
                else:
                    states = _forward(name, layer, calls, worker)
            if number % LAYERS_A_TRIM == 0:
                release_free_memory()
            progress(name)
        if model.head is not None and worker.wants(model.head):
            _output_head(model.head, model, rows, states, worker, guard)
            progress(model.head)


def forward_layer(layer: nn.Module, call: LayerCall) -> Tensor:
    """Hidden states [rows, seq, hidden] after the layer."""
    out = layer(call.hidden, **call.kwargs)
    return out[0] if isinstance(out, tuple) else out


def _forward(
    name: str, layer: nn.Module, calls: list[LayerCall], worker: LayerWorker
) -> list[Tensor]:
    """The quantized layer's outputs."""
    with worker.quantized_inputs(name, layer):
        return [forward_layer(layer, call) for call in calls]


def shared_inputs(
    name: str, layer: nn.Module, call: LayerCall, worker: Wants
) -> list[dict[str, nn.Linear]]:
    """The layer's wanted linears, grouped by the input that they read, in the order of their calls.

    Found by running one row and comparing what each linear was given.
    """
    seen: dict[str, Tensor] = {}  # holds the inputs: freed memory could be reused at one address
    linears = _wanted_linears(name, layer, worker)

    def note(linear_name: str) -> InputHook:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if linear_name in seen:
                raise UserError(
                    f"'{linear_name}' is called more than once in a layer; lowbit cannot quantize "
                    "it: add it to --ignore"
                )
            seen[linear_name] = args[0]

        return hook

    with _input_hooks({linears[n]: note(n) for n in linears}):
        forward_layer(layer, first_row(call))
    missed = [n for n in linears if n not in seen]
    if missed:
        raise UserError(
            f"'{missed[0]}' saw no calibration token in a forward pass of {name}; "
            "add it to --ignore or quantize it without calibration (--method rtn)"
        )
    groups: dict[tuple[int, torch.Size], dict[str, nn.Linear]] = {}
    for linear_name, x in seen.items():
        groups.setdefault((x.data_ptr(), x.shape), {})[linear_name] = linears[linear_name]
    return list(groups.values())


def _sequential(
    name: str, layer: nn.Module, calls: list[LayerCall], worker: LayerWorker, guard: RowGuard
) -> list[Tensor]:
    groups = shared_inputs(name, layer, calls[0], worker)
    statistics: list[dict[str, Any]] = [{} for _ in groups]
    observe = _Observer(statistics, calls, worker, guard)

    def forward(call: LayerCall) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.inference_mode():  # a thread has its own
                return forward_layer(layer, call)

        return run

    passes = [PausableCall(forward(call)) for call in calls]

    def stop_at(index: int) -> InputHook:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            observe(index, args[0])
            passes[observe.batch].pause()

        return hook

    stops = {next(iter(g.values())): stop_at(i) for i, g in enumerate(groups)}
    try:
        # observed first, then rounded: a paused batch goes on with what was decided meanwhile
        with _input_hooks(stops), worker.quantized_inputs(name, layer):
            for index, group in enumerate(groups):
                for observe.batch, batch in enumerate(passes):
                    batch.resume()
                worker.quantize(InputGroup(group, statistics[index]))
                statistics[index] = {}
            return [batch.finish() for batch in passes]
    finally:
        for batch in passes:
            batch.close()


def _parallel(
    name: str, layer: nn.Module, calls: list[LayerCall], worker: LayerWorker, guard: RowGuard
) -> list[Tensor]:
    for group in _observe(name, layer, calls, worker, guard):
        worker.quantize(group)
    return _forward(name, layer, calls, worker)


def _observe(
    name: str, layer: nn.Module, calls: list[LayerCall], wants: Wants, guard: RowGuard
) -> list[InputGroup]:
    """The layer's wanted linears by input, with the statistics of one pass of all batches."""
    groups = shared_inputs(name, layer, calls[0], wants)
    statistics: list[dict[str, Any]] = [{} for _ in groups]
    if not wants.needs:
        return [InputGroup(group, {}) for group in groups]
    observe = _Observer(statistics, calls, wants, guard)

    def look_at(index: int) -> InputHook:
        return lambda _, args: observe(index, args[0])

    with _input_hooks({next(iter(g.values())): look_at(i) for i, g in enumerate(groups)}):
        for observe.batch, call in enumerate(calls):
            forward_layer(layer, call)
    return [InputGroup(g, stats) for g, stats in zip(groups, statistics, strict=True)]


class _Observer:
    """Adds what the linears of a group read to its statistics. `batch`: the one that runs."""

    def __init__(
        self,
        statistics: list[dict[str, Any]],
        calls: list[LayerCall],
        wants: Wants,
        guard: RowGuard,
    ) -> None:
        self._statistics, self._calls, self._wants, self._guard = statistics, calls, wants, guard
        self.batch = 0

    def __call__(self, index: int, x: Tensor) -> None:
        stats = self._statistics[index] or _new_statistics(self._wants, x)
        self._statistics[index] = stats
        first_row = sum(len(call.hidden) for call in self._calls[: self.batch])
        finite = self._guard.finite_rows(first_row, self._calls[self.batch], x)
        for statistic in stats.values():
            statistic.add(finite)


def _without_data(
    model: LayeredModel, worker: LayerWorker, progress: Callable[[str], object]
) -> None:
    head = [model.head] if model.head is not None and worker.wants(model.head) else []
    for name in [*model.layers, *head]:
        with torch.inference_mode(), model.loaded(name) as layer:
            if not worker.restore(name, layer):
                worker.begin(name, layer)
                for linear_name, linear in _wanted_linears(name, layer, worker).items():
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
                statistic.add(finite)
            first_row += len(x)
        worker.quantize(InputGroup({name: head}, statistics))
        worker.finish(name, guard.dropped)


def _wanted_linears(name: str, layer: nn.Module, worker: Wants) -> dict[str, nn.Linear]:
    return {
        inner: module
        for inner, module in layer.named_modules(prefix=name)
        if isinstance(module, nn.Linear) and worker.wants(inner)
    }


def _new_statistics(worker: Wants, x: Tensor) -> dict[str, Any]:
    return {need: STATISTICS[need](x.shape[-1], x.device) for need in sorted(worker.needs)}


def first_row(call: LayerCall) -> LayerCall:
    """The call for its first row alone: tensors whose first dimension counts rows are cut."""
    rows = len(call.hidden)

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] % rows == 0:
            return value[: value.shape[0] // rows]
        return value

    return LayerCall(call.hidden[:1], {key: cut(value) for key, value in call.kwargs.items()})


@contextmanager
def _input_hooks(
    hooks: dict[Any, InputHook],
) -> Iterator[None]:
    """Forward pre-hooks on the modules while the context is open."""
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
