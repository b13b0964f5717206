"""Which module feeds a group of linears, found by running one row, never by names.

A norm is the module whose very output the group reads. For a linear, its output channels are scaled
by random powers of two and the group's input is looked at: where each column comes out scaled by
the factor of one channel, that is the fold, whatever lies between. So grouped-query attention (one
value head feeds several heads of o_proj), fused qkv_proj and gate_up_proj need no case of their own
beyond which rows are tried. Then all folds are put to the test at once: the layer's output must not
change. Powers of two make these probes exact in every float format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..calib.experts import SplitExperts
from ..calib.model import LayerCall, forward_layer
from .folds import Fold, NoFold

TOLERANCE = 1e-4  # relative change of a layer's output by a fold; exact but for summation order


def find_folds(
    layer_name: str,
    layer: nn.Module,
    groups: Iterable[Sequence[str]],
    call: LayerCall,
) -> list[Fold | NoFold]:
    """The fold of each group (full names of linears that share an input), verified.

    call: a few rows, at best one; it is run several times. The layer is left as it was.
    """
    trace = _Trace(layer_name, layer, call)
    found = [_find_fold(trace, group) for group in groups]
    folds = [f for f in found if isinstance(f, Fold)]
    if trace.unchanged_by(folds):
        return found
    return [
        f
        if isinstance(f, NoFold) or trace.unchanged_by([f])
        else NoFold(f.readers, f"scaling {f.feeder} changes what the layer computes")
        for f in found
    ]


class _Trace:
    """One forward pass of a layer: what each module read and returned, in the order of calls."""

    def __init__(self, layer_name: str, layer: nn.Module, call: LayerCall) -> None:
        self.layer_name, self._layer, self._call = layer_name, layer, call
        self.modules = {n: m for n, m in layer.named_modules(prefix=layer_name) if m is not layer}
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        names = {module: name for name, module in self.modules.items()}
        self._experts = [n for n, m in self.modules.items() if isinstance(m, SplitExperts)]

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                self.inputs[names[module]], self.outputs[names[module]] = args[0], output

        with _hooks(m.register_forward_hook(note) for m in names):
            self._result = forward_layer(layer, call)
        self._generator = torch.Generator().manual_seed(0)

    def linears(self) -> list[str]:
        """Names of the linears that were called, in order."""
        return [n for n in self.inputs if isinstance(self.modules[n], nn.Linear)]

    def expert_of(self, name: str) -> str:
        """Name of the expert that the module is part of, "" outside of experts."""
        path = next((p for p in self._experts if name.startswith(f"{p}.")), None)
        return "" if path is None else f"{path}.{name[len(path) + 1 :].partition('.')[0]}"

    def biased(self, name: str) -> bool:
        return getattr(self.modules[name], "bias", None) is not None

    def random_factors(self, count: int) -> Tensor:
        """Powers of two from 1/4 to 4, float32 [count]."""
        exponents = torch.randint(-2, 3, (count,), generator=self._generator)
        return torch.exp2(exponents.float()).to(self._call.hidden.device)

    def run(
        self, outputs: dict[str, Tensor], inputs: dict[str, Tensor], watch: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output, and what `watch` reads, with some modules' outputs and inputs
        multiplied by factors [features]."""
        seen: list[Tensor] = []

        def multiply_output(factor: Tensor) -> Callable[..., Tensor]:
            return lambda module, args, output: output * factor.to(output.dtype)

        def multiply_input(factor: Tensor) -> Callable[..., tuple[Any, ...]]:
            return lambda module, args: (args[0] * factor.to(args[0].dtype), *args[1:])

        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen.append(args[0])

        handles = [
            *(
                self.modules[n].register_forward_hook(multiply_output(f))
                for n, f in outputs.items()
            ),
            *(
                self.modules[n].register_forward_pre_hook(multiply_input(f))
                for n, f in inputs.items()
            ),
        ]
        if watch is not None:
            handles.append(self.modules[watch].register_forward_pre_hook(look))
        with _hooks(handles):
            result = forward_layer(self._layer, self._call)
        return result, seen[0] if seen else None

    def unchanged_by(self, folds: list[Fold]) -> bool:
        """Whether the layer's output stays what it is under random scales in all of `folds`."""
        outputs: dict[str, Tensor] = {}
        inputs: dict[str, Tensor] = {}
        for fold in folds:
            factors = self.random_factors(len(fold.rows))
            width = self.outputs[fold.feeder].shape[-1]
            whole = outputs.setdefault(fold.feeder, factors.new_ones(width))
            whole[fold.rows] /= factors
            inputs |= dict.fromkeys(fold.readers, factors[fold.columns])
        result = self.run(outputs, inputs)[0].float()
        change = (result - self._result.float()).norm()
        own = (self._result.float() - self._call.hidden.float()).norm()  # without the residual
        return bool(change <= TOLERANCE * own)


def _find_fold(trace: _Trace, group: Sequence[str]) -> Fold | NoFold:
    missed = [name for name in group if name not in trace.inputs]
    if missed:
        return NoFold(tuple(group), f"{missed[0]} read nothing of the row that was looked at")
    x = trace.inputs[group[0]]
    readers = tuple(n for n in trace.linears() if _same(trace.inputs[n], x))
    for name, y in trace.outputs.items():
        added = _added_to_weight(trace, name) if _same(y, x) else None
        if added is not None:
            channels = torch.arange(x.shape[-1], device=x.device)
            return Fold(readers, name, added, trace.biased(name), channels, channels)
    before = trace.linears()
    before = before[: before.index(readers[0])]
    expert = trace.expert_of(readers[0])  # an expert's linears feed none but their own kind
    for name in reversed([n for n in before if trace.expert_of(n) == expert]):
        fold = _linear_fold(trace, name, readers)
        if fold is not None:
            return fold
    return NoFold(readers, "no norm and no linear feeds them channel by channel")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()


def _added_to_weight(trace: _Trace, name: str) -> float | None:
    """0 or 1 where the module is a norm that multiplies with its weight [features] plus that, and
    adds nothing but a bias; None for any other module."""
    norm, x = trace.modules[name], trace.inputs[name]
    params = dict(norm.named_parameters())
    weight = params.get("weight")
    if weight is None or not set(params) <= {"weight", "bias"}:
        return None
    if any(p.shape != (x.shape[-1],) for p in params.values()):
        return None
    for added in (0.0, 1.0):
        silent = {n: torch.zeros_like(p) for n, p in params.items()}
        silent["weight"] -= added
        if not torch.func.functional_call(norm, silent, (x,)).any():
            return added
    return None


def _linear_fold(trace: _Trace, feeder: str, readers: tuple[str, ...]) -> Fold | None:
    """The fold into a linear whose output reaches the readers' input channel by channel."""
    x = trace.inputs[readers[0]]
    width, columns = trace.outputs[feeder].shape[-1], x.shape[-1]
    for rows in _row_choices(width, columns):
        rows = rows.to(x.device)
        factors = trace.random_factors(len(rows))
        whole = factors.new_ones(width)
        whole[rows] = factors
        _, scaled = trace.run({feeder: whole}, {}, readers[0])
        if scaled is None or scaled.shape != x.shape:
            return None
        for choice in _column_choices(len(rows), columns):
            choice = choice.to(x.device)
            if _proportional(scaled, x, factors[choice]):
                return Fold(readers, feeder, None, trace.biased(feeder), rows, choice)
    return None


def _proportional(scaled: Tensor, x: Tensor, factors: Tensor) -> bool:
    """Whether every column of `scaled` is that of x times its factor (and any is not zero)."""
    expected = x.float().flatten(0, -2) * factors
    error = (scaled.float().flatten(0, -2) - expected).norm(dim=0)
    size = expected.norm(dim=0)
    return bool((error <= TOLERANCE * size).all()) and bool(size.any())


def _row_choices(width: int, columns: int) -> Iterator[Tensor]:
    """Rows of a linear with `width` outputs that may feed `columns` input columns.

    All of them; the second or first half (gate and up fused); of a fused [query, key, value] its
    last part, or the last part of each of its heads, where each has n queries, a key and a value.
    """
    every = torch.arange(width)
    if columns % width == 0:
        yield every
    if width == 2 * columns:
        yield every[columns:]
        yield every[:columns]
    values, odd = divmod(width - columns, 2)
    if odd or values <= 0 or columns % values:
        return
    yield every[-values:]
    for head_dim in _divisors(values):
        heads = every.view(values // head_dim, -1)
        yield heads[:, -head_dim:].flatten()


def _column_choices(scales: int, columns: int) -> Iterator[Tensor]:
    """Which of `scales` channels may feed each of `columns` columns: each its own, or heads of some
    width that are repeated side by side (grouped-query attention)."""
    repeats = columns // scales
    for head_dim in [scales] if repeats == 1 else _divisors(scales):
        heads = torch.arange(scales).view(-1, 1, head_dim)
        yield heads.expand(-1, repeats, -1).flatten()


def _divisors(n: int) -> list[int]:
    """Largest first."""
    return [d for d in range(n, 0, -1) if n % d == 0]


@contextmanager
def _hooks(handles: Iterable[Any]) -> Iterator[None]:
    """Hooks that are registered while the context is open."""
    registered = list(handles)
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()
