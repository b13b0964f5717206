"""The worker that the layer loop drives: an adapter between a plan, the passes and the journal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..calib.layer_loop import InputGroup
from ..calib.model import LayeredModel
from .checkpoint.compress import compress, decompress
from .checkpoint.journal import Journal
from .passes.gptq import factor_hessian, gptq_quantize
from .passes.rtn import rtn_quantize
from .plan import Plan
from .quantized import Quantized
from .spec import LayerScheme


class PassWorker:
    """Quantizes the linears of a plan as the loop hands them over, layer by layer."""

    def __init__(self, model: LayeredModel, plan: Plan, journal: Journal) -> None:
        self._model, self._plan, self._journal = model, plan, journal
        self._tensors: dict[str, Tensor] = {}
        self._report: dict[str, Any] = {}

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(p.taken_by.needs for p in self._plan.linears.values()))

    def wants(self, name: str) -> bool:
        return name in self._plan.linears

    def quantize(self, group: InputGroup) -> None:
        for members in _by_pass(group.linears, self._plan):
            method = self._plan.linears[members[0]].taken_by.method
            (self._gptq if method == "gptq" else self._rtn)(members, group)

    def finish(self, layer_name: str, dropped: list[int]) -> None:
        report = {"linears": self._report, "dropped_rows": dropped}
        self._journal.write(layer_name, self._tensors, report)
        self._tensors, self._report = {}, {}

    def restore(self, layer_name: str, layer: nn.Module) -> bool:
        if not self._journal.finished(layer_name):
            return False
        stored = self._journal.load(layer_name)
        for name, module in layer.named_modules(prefix=layer_name):
            if isinstance(module, nn.Linear) and self.wants(name):
                spec = self._plan.linears[name].scheme.weights
                stored_name = self.stored_name(name)
                _put(module, decompress(stored_name, stored, stored.__getitem__, spec))
        return True

    def _rtn(self, members: list[str], group: InputGroup) -> None:
        for name in members:
            weight, dtype = self._original(name)
            quantized = rtn_quantize(weight, self._plan.linears[name].scheme.weights, dtype)
            self._keep(name, group.linears[name], quantized, {"method": "rtn"})

    def _gptq(self, members: list[str], group: InputGroup) -> None:
        """Linears that share an input share its factored Hessian; their rows are solved at once."""
        planned = self._plan.linears[members[0]]
        settings = planned.taken_by.gptq
        statistic = group.statistics["hessian"]
        hessian = statistic.mean()
        factor = factor_hessian(hessian, settings)
        originals = [self._original(name) for name in members]
        stacked = torch.cat([weight for weight, _ in originals])
        result = gptq_quantize(stacked, factor, planned.scheme.weights, originals[0][1], settings)
        energy = ((stacked @ hessian) * stacked).sum(1)
        heights = [len(weight) for weight, _ in originals]
        parts = zip(
            _split(result.quantized, heights),
            result.error.split(heights),
            energy.split(heights),
            strict=True,
        )
        for name, (quantized, error, reference) in zip(members, parts, strict=True):
            self._keep(name, group.linears[name], quantized, {
                "method": "gptq",
                "relative_error": float(error.sum() / reference.sum().clamp_(min=1e-30)),
                "dampening_frac": factor.dampening_frac,
                "dead_columns": factor.dead,
                "tokens": statistic.tokens,
            })  # fmt: skip

    def _keep(
        self, name: str, linear: nn.Linear, quantized: Quantized, report: dict[str, Any]
    ) -> None:
        scheme = self._plan.linears[name].scheme
        self._tensors |= compress(self.stored_name(name), quantized, scheme)
        self._report[name] = report
        _put(linear, quantized)

    def stored_name(self, name: str) -> str:
        """What the shards call the linear (some leave the base model's prefix out)."""
        return self._model.tensor_name(f"{name}.weight").removesuffix(".weight")

    def _original(self, name: str) -> tuple[Tensor, torch.dtype]:
        """The original weight in float32 (whatever the forward passes' dtype), its stored dtype."""
        weight = self._model.shards.get(
            self._model.tensor_name(f"{name}.weight"), self._model.device
        )
        return weight.float(), weight.dtype


def _by_pass(names: Iterable[str], plan: Plan) -> list[list[str]]:
    """`names` split into those that one pass quantizes to one scheme."""
    split: dict[tuple[int, LayerScheme], list[str]] = {}
    for name in names:
        planned = plan.linears[name]
        split.setdefault((id(planned.taken_by), planned.scheme), []).append(name)
    return list(split.values())


def _split(q: Quantized, heights: list[int]) -> list[Quantized]:
    """A stacked weight as its parts of `heights` rows."""
    zero_points = [None] * len(heights) if q.zero_point is None else q.zero_point.split(heights)
    parts = zip(q.codes.split(heights), q.scale.split(heights), zero_points, strict=True)
    return [Quantized(codes, scale, zero_point, q.spec) for codes, scale, zero_point in parts]


def _put(linear: nn.Linear, q: Quantized) -> None:
    """The values that are stored, in the linear's dtype, as its weight."""
    linear.weight.data = q.dequantize(linear.weight.dtype)
