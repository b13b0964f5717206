"""The worker that the layer loop drives: an adapter between a plan, the passes and the journal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from ..calib.layer_worker import InputGroup, LayerWorker
from ..calib.memory import release_free_memory
from ..calib.model import LayerCall, LayeredModel
from ..calib.stops import InputHook
from .activations import fake_quantize_input
from .checkpoint.journal import Journal
from .checkpoint.layouts import NATIVE, Layout
from .expert_calibration import dampened, why_rounded
from .layer_store import LayerStore
from .linear_names import fused_peers
from .linear_plan import Plan, PlannedLinear
from .passes.gptq import solve
from .passes.hqq import hqq_quantize
from .passes.kv_cache import KVObserver
from .passes.rtn import rtn_quantize
from .passes.settings import RTNSettings
from .passes.signround import check_learnable, nearest_start, signround_layer
from .quantized import Quantized
from .recipe import KVCachePass, Transform
from .smoothing import make_transform
from .spec import Channel, Group, LayerScheme

LARGE_BYTES = 1 << 27  # of a Hessian: beside its solver, trimming free memory costs little


class PassWorker(LayerWorker):
    """Quantizes the linears of a plan as the loop hands them over, layer by layer.

    `seconds`: pass -> layer -> seconds, of the layers that were worked on. Transforms read and
    change `weights`, those of the layer at work, and leave what they did in `transform_report`.
    """

    def __init__(
        self,
        model: LayeredModel,
        plan: Plan,
        journal: Journal,
        transforms: Sequence[Transform] = (),
        cache: KVCachePass | None = None,
        layout: Layout = NATIVE,
    ) -> None:
        self._plan = plan
        self.whole_layers = any(p.taken_by.method == "signround" for p in plan.linears.values())
        self.store = LayerStore(model, plan, journal, layout, self.whole_layers)
        self._layer = ""
        self._cache, self.watches_layers = None, cache is not None
        if cache is not None:
            settings = cache.kv_cache
            self._cache = KVObserver(settings.spec, settings, model.config)
        self.seconds: dict[str, dict[str, float]] = {}
        self.transforms = [
            make_transform(t, plan, self, model) for t in transforms if t.method != "rotate"
        ]

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(p.taken_by.needs for p in self._plan.linears.values()))

    def wants(self, name: str) -> bool:
        return name in self._plan.linears

    def begin(self, layer_name: str, layer: nn.Module) -> None:
        self._layer = layer_name
        self.store.begin(layer_name, layer)

    def peers(self, names: list[str]) -> list[list[str]]:
        return fused_peers(names)

    def quantize(self, group: InputGroup) -> None:
        for members in _by_pass(group.linears, self._plan):
            method = self._plan.linears[members[0]].taken_by.method
            with self.timed(method):
                run = {
                    "gptq": self._gptq,
                    "rtn": self._data_free,
                    "hqq": self._data_free,
                    "signround": self._signround_start,
                }[method]
                run(members, group)

    def quantize_layer(
        self,
        layer_name: str,
        layer: nn.Module,
        groups: list[InputGroup],
        calls: list[LayerCall],
        targets: list[Tensor],
    ) -> None:
        """Every linear is quantized on its own first; what signround takes is learned from there,
        with all else of the layer as it will be stored."""
        for group in groups:
            self.quantize(group)
        learned: dict[int, dict[str, InputGroup]] = {}
        for group in groups:
            for name in group.linears:
                taken_by = self._plan.linears[name].taken_by
                if taken_by.method == "signround":
                    learned.setdefault(id(taken_by), {})[name] = group
        with self.timed("signround"):
            for members in learned.values():
                self._signround(layer_name, layer, members, calls, targets)

    def finish(self, layer_name: str, dropped: list[int]) -> None:
        for name, scales in self._cache.take(layer_name).items() if self._cache else ():
            self.store.keep_cache_scales(name, scales)
        self.store.write(layer_name, dropped)

    def restore(self, layer_name: str, layer: nn.Module) -> bool:
        finished = self.store.finished(layer_name)
        if finished:
            self.store.restore(layer_name, layer)
        return finished

    @contextmanager
    def quantized_inputs(self, layer_name: str, layer: nn.Module) -> Iterator[None]:
        """Pre-hooks that round what quantized linears read, where their scheme says so."""

        def rounds(name: str) -> InputHook:
            spec = self._plan.linears[name].scheme.input_activations
            assert spec is not None

            def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
                if name not in self.store.input_scales:  # not quantized yet
                    return None
                return fake_quantize_input(args[0], spec, self.store.input_scales[name]), *args[1:]

            return hook

        handles = [
            module.register_forward_pre_hook(rounds(name))
            for name, module in layer.named_modules(prefix=layer_name)
            if self.wants(name) and self._plan.linears[name].scheme.input_activations
        ]
        cache = None if self.store.finished(layer_name) else self._cache
        watching = nullcontext() if cache is None else cache.watching(layer_name, layer)
        try:
            with watching:
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds what runs within to the seconds of the pass `what` in the present layer."""
        start = time.perf_counter()
        yield
        layers = self.seconds.setdefault(what, {})
        layers[self._layer] = layers.get(self._layer, 0.0) + time.perf_counter() - start

    def _data_free(self, members: list[str], group: InputGroup) -> None:
        """Linears that share an input are quantized together: an NVFP4 scale of the tensor is
        theirs in common."""
        planned = self._plan.linears[members[0]]
        taken_by, spec = planned.taken_by, planned.scheme.weights
        stacked, heights, dtype = self.store.stacked(members)
        if taken_by.method == "rtn":
            quantized = rtn_quantize(stacked, spec, dtype, taken_by.rtn)
        else:
            quantized = hqq_quantize(stacked, spec, dtype, taken_by.hqq)
        for name, part in zip(members, split_rows(quantized, heights), strict=True):
            self.store.keep(name, group, part, {"method": taken_by.method})

    def _gptq(self, members: list[str], group: InputGroup) -> None:
        """Linears that share an input share its factored Hessian; their rows are solved at once."""
        planned = self._plan.linears[members[0]]
        settings = planned.taken_by.gptq
        statistic = group.statistics["hessian"]
        if group.routed is not None:
            fallback = why_rounded(statistic.tokens, planned.shape[1])
            if fallback is not None:
                self._round_experts(members, group, fallback)
                return
            settings = dampened(settings, statistic.tokens, planned.shape[1])
        hessian, shift = statistic.mean(), group.statistics.get("input_shift")
        moved = shift.mean() if shift is not None and shift.tokens else None
        if hessian.nbytes > LARGE_BYTES:
            release_free_memory()
        stacked, heights, dtype = self.store.stacked(members)
        solved = solve(stacked, hessian, moved, planned.scheme.weights, dtype, settings)
        del stacked  # as the factor is gone: packing takes memory, too
        parts = zip(
            split_rows(solved.quantized, heights),
            solved.error.split(heights),
            solved.energy.split(heights),
            strict=True,
        )
        for name, (quantized, error, reference) in zip(members, parts, strict=True):
            self.store.keep(name, group, quantized, {
                "method": "gptq",
                "relative_error": float(error.sum() / reference.sum().clamp_(min=1e-30)),
                "dampening_frac": solved.dampening_frac,
                "dead_columns": solved.dead,
                "tokens": statistic.tokens,
            })  # fmt: skip

    def _signround_start(self, members: list[str], group: InputGroup) -> None:
        """What learned rounding begins with. The output head, which is in no layer, keeps it."""
        planned = self._plan.linears[members[0]]
        check_learnable(planned.scheme.weights)
        if planned.taken_by.signround.start == "gptq":
            self._gptq(members, group)
            return
        stacked, heights, dtype = self.store.stacked(members)
        importance = group.statistics["hessian"].mean().diagonal()
        start = nearest_start(stacked, planned.scheme.weights, dtype, importance)
        for name, part in zip(members, split_rows(start, heights), strict=True):
            self.store.keep(name, group, part, {"method": "rtn"})

    def _signround(
        self,
        layer_name: str,
        layer: nn.Module,
        members: dict[str, InputGroup],
        calls: list[LayerCall],
        targets: list[Tensor],
    ) -> None:
        """members: the linears that one pass takes, by name, with their groups."""
        inner = {name: name.removeprefix(f"{layer_name}.") for name in members}
        result = signround_layer(
            layer,
            {inner[name]: self.store.weights.get(f"{name}.weight") for name in members},
            {inner[name]: self.store.kept[name] for name in members},
            calls,
            targets,
            self._plan.linears[next(iter(members))].taken_by.signround,
        )
        for name, group in members.items():
            self.store.keep(name, group, result.quantized[inner[name]], {
                "method": "signround",
                "start": self.store.report[name],
                "start_error": result.start_error,
                "layer_error": result.error,
            })  # fmt: skip

    def _round_experts(self, members: list[str], group: InputGroup, why: str) -> None:
        """Round an expert's linears to nearest, with searched scales, for the reason given."""
        stacked, heights, dtype = self.store.stacked(members)
        spec = self._plan.linears[members[0]].scheme.weights
        quantized = rtn_quantize(stacked, spec, dtype, RTNSettings(scale_search="mse"))
        report = {"method": "rtn", "fallback": why, "tokens": group.statistics["hessian"].tokens}
        for name, part in zip(members, split_rows(quantized, heights), strict=True):
            self.store.keep(name, group, part, report)


def _by_pass(names: Iterable[str], plan: Plan) -> list[list[str]]:
    """`names` split into those that one pass quantizes to one scheme, and that can be stacked."""
    split: dict[tuple[int, LayerScheme, str], list[str]] = {}
    for name in names:
        planned = plan.linears[name]
        key = id(planned.taken_by), planned.scheme, "" if _stackable(planned) else name
        split.setdefault(key, []).append(name)
    return list(split.values())


def _stackable(planned: PlannedLinear) -> bool:
    """Whether rows of several linears may be quantized as those of one: no scale spans rows."""
    return isinstance(planned.scheme.weights.granularity, Channel | Group)


def split_rows(q: Quantized, heights: list[int]) -> list[Quantized]:
    """A stacked weight as its parts of `heights` rows."""
    if len(heights) == 1:  # whose scales may span rows
        return [q]
    zero_points = [None] * len(heights) if q.zero_point is None else q.zero_point.split(heights)
    parts = zip(q.codes.split(heights), q.scale.split(heights), zero_points, strict=True)
    return [q._replace(codes=codes, scale=scale, zero_point=zero) for codes, scale, zero in parts]
