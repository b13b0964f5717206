"""What an error in a linear's output does to the model's predictions, from one backward pass.

To second order, changing a linear's output at token t by d_t moves the model's distribution by
KL = 1/2 sum_t d_t^T F_t d_t, with F_t the Fisher information: the mean of g_t g_t^T, where g_t is
the gradient at that output of log p(y) summed over positions, each y drawn from the model's own
distribution there (Martens 2014, arXiv:1412.1193). Kept of it: how much each token and each output
matters, as the moments of `OutputFisher`.

The model is held one decoder layer at a time here too: the forward pass keeps the hidden states
before every k-th layer; going back, the layers between are run again and then differentiated, the
last one first. So memory holds 2 sqrt(layers) hidden states of the rows and one layer's graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .model import LayerCall, LayeredModel, forward_layer
from .statistics import Hessian


class OutputFisher:
    """Moments of a linear's input x [in] and output gradient g [out] over calibration tokens."""

    def __init__(self, linear: nn.Linear) -> None:
        self.guided = Hessian(linear.in_features, linear.weight.device)
        self._squares = linear.weight.new_zeros(linear.out_features, dtype=torch.float32)

    def add(self, x: Tensor, gradient: Tensor) -> None:
        """x [..., in] and gradient [..., out] of the same tokens."""
        g = gradient.detach().reshape(-1, gradient.shape[-1]).float()
        x = x.detach().reshape(-1, x.shape[-1]).float()
        self._squares += g.square().sum(0)
        self.guided.add(x * g.square().mean(1, keepdim=True).sqrt())

    def output_weight(self) -> Tensor:
        """float32 [out], mean 1: the share of each output in the mean of g^2."""
        return self._squares / self._squares.mean().clamp(min=torch.finfo(torch.float32).tiny)


class SharedInput(NamedTuple):
    """An input's Hessian and the names of the linears that read it."""

    readers: list[str]
    hessian: Hessian


class LayerFisher(NamedTuple):
    """What one decoder layer's linears read and weigh, by full name.

    `modules`: the wanted linears that saw a token.
    """

    name: str
    modules: dict[str, nn.Linear]
    inputs: list[SharedInput]
    fisher: dict[str, OutputFisher]


def run_backward(
    model: LayeredModel,
    rows: Tensor,
    wants: Callable[[str], bool],
    visit: Callable[[LayerFisher], object],
    batch_size: int = 4,
    seed: int = 0,
) -> list[Tensor]:
    """Hand every decoder layer, weights loaded, to `visit`, the last layer first; the gradients
    [rows, seq, hidden] at what enters the first one, batch by batch.

    rows: token ids int64 [rows, seq]. wants: whether a linear is measured, by full name. seed: of
    the draws of y.
    """
    names = list(model.layers)
    calls = {
        name: [_outside_inference(batch[name]) for batch in recorded]
        for recorded in [model.layer_calls(rows, batch_size)]
        for name in names
    }
    stride = max(1, math.isqrt(len(names)))
    states = [call.hidden for call in calls[names[0]]]
    kept = []
    for n, name in enumerate(names):
        if n % stride == 0:
            kept.append(states)
        states = _forward(model, name, calls[name], states)
    gradients = _head_gradients(model, rows, states, seed)
    for start in reversed(range(0, len(names), stride)):
        stretch = names[start : start + stride]
        before = [kept.pop()]
        for name in stretch[:-1]:
            before.append(_forward(model, name, calls[name], before[-1]))
        for name in reversed(stretch):
            gradients = _backward(model, name, calls[name], before.pop(), gradients, wants, visit)
    return gradients


@torch.no_grad()
def _forward(
    model: LayeredModel, name: str, calls: list[LayerCall], states: list[Tensor]
) -> list[Tensor]:
    with model.loaded(name) as layer:
        return [
            forward_layer(layer, LayerCall(hidden, call.kwargs))
            for call, hidden in zip(calls, states, strict=True)
        ]


def _head_gradients(
    model: LayeredModel, rows: Tensor, states: list[Tensor], seed: int
) -> list[Tensor]:
    """The gradient of sum log p(y) at the hidden states after the last decoder layer.

    Row by row: logits are the widest tensor of all.
    """
    draw = torch.Generator().manual_seed(seed)
    single = [row.clone().requires_grad_() for s in states for row in s.split(1)]
    for logits in model.logits(rows, single):
        # d log p(y) / d logits = one-hot(y) - p
        p = logits.detach()[0].float().softmax(-1)
        y = torch.multinomial(p.cpu(), 1, generator=draw).to(p.device)
        gradient = p.neg_().scatter_add_(1, y, p.new_ones(y.shape))
        logits.backward(gradient[None].to(logits.dtype))
    return list(torch.cat([_gradient(row) for row in single]).split(len(states[0])))


def _backward(
    model: LayeredModel,
    name: str,
    calls: list[LayerCall],
    states: list[Tensor],
    gradients: list[Tensor],
    wants: Callable[[str], bool],
    visit: Callable[[LayerFisher], object],
) -> list[Tensor]:
    """The gradients at the states before the layer; hands the layer's moments to `visit`."""
    with model.loaded(name) as layer:
        linears = {
            inner: module
            for inner, module in layer.named_modules(prefix=name)
            if isinstance(module, nn.Linear) and wants(inner)
        }
        watch = _Watch(linears)
        entering = []
        for call, hidden, gradient in zip(calls, states, gradients, strict=True):
            hidden = hidden.clone().requires_grad_()
            with watch.hooks():
                out = forward_layer(layer, LayerCall(hidden, call.kwargs))
            torch.autograd.backward(out, gradient)
            entering.append(_gradient(hidden))
        with torch.no_grad():
            visit(watch.result(name))
    return entering


class _Watch:
    """Adds what linears read and the gradients at their outputs to their moments."""

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        self._linears = linears
        self._fisher: dict[str, OutputFisher] = {}
        self._reads: dict[str, SharedInput] = {}
        self._held: dict[int, tuple[Tensor, SharedInput]] = {}  # inputs of this pass, by address

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Forward hooks on the linears while the context is open."""
        handles = [m.register_forward_hook(self._hook(n)) for n, m in self._linears.items()]
        try:
            yield
        finally:
            self._held.clear()
            for handle in handles:
                handle.remove()

    def result(self, name: str) -> LayerFisher:
        inputs = list({id(shared): shared for shared in self._reads.values()}.values())
        modules = {n: self._linears[n] for shared in inputs for n in shared.readers}
        return LayerFisher(name, modules, inputs, self._fisher)

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            assert isinstance(module, nn.Linear)
            x = args[0].detach()
            if not x.numel():  # an expert to which no token went
                return
            shared = self._shared_input(name, x)
            if shared.readers[0] == name:
                shared.hessian.add(x)
            fisher = self._fisher.setdefault(name, OutputFisher(module))
            out.register_hook(lambda gradient: fisher.add(x, gradient))

        return hook

    def _shared_input(self, name: str, x: Tensor) -> SharedInput:
        """What the linear reads; those that were given the same tensor share it."""
        shared = self._reads.get(name)
        if shared is None:
            new = SharedInput([], Hessian(x.shape[-1], x.device))
            _, shared = self._held.get(x.data_ptr(), (x, new))
            shared.readers.append(name)
            self._reads[name] = shared
        self._held[x.data_ptr()] = x, shared
        return shared


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None, "every hidden state takes part in the prediction"
    return x.grad


def _outside_inference(value: Any) -> Any:
    """`value` with tensors that autograd may save: those made in inference mode are copied."""
    match value:
        case Tensor() if value.is_inference():
            return value.clone()
        case LayerCall(hidden, kwargs):
            return LayerCall(_outside_inference(hidden), _outside_inference(kwargs))
        case dict():
            return {k: _outside_inference(v) for k, v in value.items()}
        case tuple() | list():
            return type(value)(_outside_inference(v) for v in value)
    return value
