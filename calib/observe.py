"""How the inputs of a layer's linears are observed while batches of rows run through it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from .layer_worker import InputGroup, Wants
from .model import LayerCall, forward_layer
from .pausable import PausableCall
from .row_guard import RowGuard
from .statistics import STATISTICS, InputShift
from .stops import InputHook, LinearStop, Stop, find_stops, input_hooks

SHIFT = "input_shift"  # the statistic for which the float model is run beside


class Watch(NamedTuple):
    """How inputs are observed, see `run_layers`."""

    guard: RowGuard
    all_experts: bool


def observe_layer(
    name: str, layer: nn.Module, calls: list[LayerCall], wants: Wants, watch: Watch
) -> list[InputGroup]:
    """The layer's wanted linears by input, with the statistics of one pass of all batches."""
    stops = find_stops(name, layer, calls[0], wants.wants, watch.all_experts)
    if not wants.needs:
        return [InputGroup(group, {}) for stop in stops for group in stop.groups]
    observe = Observer(stops, calls, wants, watch.guard)
    with input_hooks(at_stops(stops, observe)):
        for observe.batch, call in enumerate(calls):
            forward_layer(layer, call)
    return [group for index in range(len(stops)) for group in observe.take(index)]


def at_stops(
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


class Observer:
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
                group.statistics.update(new_statistics(self._wants, x))
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


def pausable_pass(layer: nn.Module, call: LayerCall) -> PausableCall[Tensor]:
    return PausableCall(lambda: forward_layer(layer, call))


class FloatTwin:
    """The unquantized layer, run on what it reads in the float model, one stop after the other in
    step with the layer that is being quantized."""

    def __init__(self, layer: nn.Module, stops: list[Stop], calls: list[LayerCall]) -> None:
        twin = copy.deepcopy(layer)
        inside = dict(zip(layer.modules(), twin.modules(), strict=True))
        twins = {stop.module: inside[stop.module] for stop in stops}
        self._passes = [pausable_pass(twin, call) for call in calls]
        self._running = 0
        self._x: Tensor | None = None

        def stop_at(index: int, args: tuple[Any, ...]) -> None:
            self._x = args[0] if isinstance(stops[index], LinearStop) else None
            self._passes[self._running].pause()

        hooks = at_stops(stops, stop_at)
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


def new_statistics(worker: Wants, x: Tensor) -> dict[str, Any]:
    return {need: STATISTICS[need](x.shape[-1], x.device) for need in sorted(worker.needs)}
