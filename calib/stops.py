"""Where in a layer's forward pass the inputs of its linears are at hand.

Linears that read the same input form a group, which is found by running one row and comparing what
each linear was given. One row cannot show the experts of a mixture: most see none of its tokens.
Their groups follow from structure instead: the first linears of an expert share an input, its down
projection has one of its own, and both can be computed as soon as the layer calls its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..kernels.errors import UserError
from .experts import SplitExperts
from .model import LayerCall, forward_layer

HELD_BYTES = 1 << 30  # of the Hessians of experts that are observed at the same time

Linears = dict[str, nn.Linear]
InputHook = Callable[[nn.Module, tuple[Any, ...]], Any]


class Observed(NamedTuple):
    """x: what a group reads, [..., in_features]. routed: how many tokens the model gives to the
    expert that the group belongs to, None for linears that read all tokens."""

    x: Tensor
    routed: int | None


class Stop(Protocol):
    """A call of `module` at which the inputs of `groups` are at hand."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def groups(self) -> list[Linears]: ...

    def observe(self, args: tuple[Any, ...]) -> Iterator[Observed]:
        """The input of each group when the module is called with `args`."""
        ...


class LinearStop(NamedTuple):
    """The first call of some linears that share an input."""

    module: nn.Module
    groups: list[Linears]

    def observe(self, args: tuple[Any, ...]) -> Iterator[Observed]:
        yield Observed(args[0], None)


class ExpertsStop(NamedTuple):
    """The call of a layer's experts. experts: the number of each group's expert. down: whether the
    groups are down projections, whose inputs the first linears make as they are by then.

    all_tokens: observe every token in every expert; what the layer computes stays as it is.
    """

    module: SplitExperts
    groups: list[Linears]
    experts: list[int]
    down: bool
    all_tokens: bool

    def observe(self, args: tuple[Any, ...]) -> Iterator[Observed]:
        hidden, top_k_index = args[:2]
        routed = {route.expert: route.tokens for route in self.module.routes(top_k_index)}
        nobody = torch.empty(0, dtype=torch.int64, device=hidden.device)
        for expert in self.experts:
            tokens = routed.get(expert, nobody)
            x = hidden if self.all_tokens else hidden[tokens]
            yield Observed(self.module.inner(expert, x) if self.down else x, len(tokens))


def find_stops(
    name: str,
    layer: nn.Module,
    call: LayerCall,
    wants: Callable[[str], bool],
    all_tokens: bool = False,
) -> list[Stop]:
    """The stops of the layer `name`, in the order of its forward pass, for all linears that
    `wants` asks for.

    call: its first row is run. all_tokens: see ExpertsStop. UserError for a linear that is called
    more than once, or never.
    """
    experts = {
        path: module
        for path, module in layer.named_modules(prefix=name)
        if isinstance(module, SplitExperts)
    }
    inside = tuple(f"{path}." for path in experts)
    linears = wanted_linears(name, layer, wants)
    alone = {n: linear for n, linear in linears.items() if not n.startswith(inside)}
    seen = _first_inputs(name, layer, call, {**alone, **experts})
    stops: list[Stop] = []
    groups: dict[tuple[int, torch.Size], Linears] = {}
    for path, x in seen.items():
        if path in experts:
            stops += _experts_stops(path, experts[path], linears, all_tokens)
            continue
        key = x.data_ptr(), x.shape
        if key not in groups:
            groups[key] = {}
            stops.append(LinearStop(alone[path], [groups[key]]))
        groups[key][path] = alone[path]
    return stops


def wanted_linears(name: str, layer: nn.Module, wants: Callable[[str], bool]) -> Linears:
    """The linears in the module `name` (or itself) that `wants` asks for, by full name."""
    return {
        inner: module
        for inner, module in layer.named_modules(prefix=name)
        if isinstance(module, nn.Linear) and wants(inner)
    }


def first_row(call: LayerCall) -> LayerCall:
    """The call for its first row alone: tensors whose first dimension counts rows are cut, also
    those in a tuple (position embeddings)."""
    rows = len(call.hidden)

    def cut(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(cut, value))
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] % rows == 0:
            return value[: value.shape[0] // rows]
        return value

    return LayerCall(call.hidden[:1], {key: cut(value) for key, value in call.kwargs.items()})


@contextmanager
def input_hooks(hooks: dict[nn.Module, InputHook]) -> Iterator[None]:
    """Forward pre-hooks on the modules while the context is open."""
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_inputs(
    name: str, layer: nn.Module, call: LayerCall, modules: dict[str, nn.Module]
) -> dict[str, Tensor]:
    """What each of `modules` (by full name) is given, in the order of their calls. Held together:
    the memory of one that is freed could be reused at the same address for another."""
    seen: dict[str, Tensor] = {}

    def note(path: str) -> InputHook:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if path in seen:
                raise UserError(
                    f"'{path}' is called more than once in a layer; lowbit cannot quantize "
                    "it: add it to --ignore"
                )
            seen[path] = args[0]

        return hook

    with input_hooks({module: note(path) for path, module in modules.items()}):
        forward_layer(layer, first_row(call))
    missed = [path for path in modules if path not in seen]
    if missed:
        raise UserError(
            f"'{missed[0]}' saw no calibration token in a forward pass of {name}; "
            "add it to --ignore or quantize it without calibration (--method rtn)"
        )
    return seen


def _experts_stops(
    path: str, experts: SplitExperts, wanted: Linears, all_tokens: bool
) -> Iterator[ExpertsStop]:
    """First the linears that read the experts' inputs, then the down projections, each for as many
    experts at once as their Hessians may take memory."""
    for down, leaves in ((False, experts.names.inner), (True, (experts.names.down,))):
        groups = {
            expert: {n: wanted[n] for leaf in leaves if (n := f"{path}.{expert}.{leaf}") in wanted}
            for expert in range(experts.num_experts)
        }
        groups = {expert: group for expert, group in groups.items() if group}
        columns = [next(iter(group.values())).in_features for group in groups.values()]
        together = max(1, HELD_BYTES // (4 * max(columns, default=1) ** 2))
        numbers = list(groups)
        for start in range(0, len(numbers), together):
            chosen = numbers[start : start + together]
            yield ExpertsStop(experts, [groups[e] for e in chosen], chosen, down, all_tokens)
