"""The contents of tensors: scales, zero-points, group indices, codes, and plain values.

One linear is in memory at a time. What only many linears together can tell (scales of exactly one
everywhere, the order in AWQ's words) is gathered on the way and judged at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...calib.shards import TensorSource
from ...kernels.errors import UserError
from ...kernels.packing import pack_bits, packed_words, unpack_bits
from ..checkpoint.layouts import Layout
from ..checkpoint.layouts.awq import AWQ
from ..checkpoint.layouts.gptq import GPTQ
from ..quantized import Quantized, elements
from ..spec import LayerScheme
from .awq_order import Sums, judge, order_sums
from .findings import Finding, finding
from .tensors import Wanted

CHUNK = 1 << 20  # values that are looked at together
POSITIVE = ("weight_global_scale", "input_scale", "input_global_scale")
AWQ_SAMPLE = 1 << 20  # groups that are enough to tell the order
SMALLEST_MATRIX = 64  # values; smaller ones may well be zero
FP8 = torch.float8_e4m3fn
LARGEST = 65504.0  # that a half float holds; numbers of models are far below
MASKED = ("masked_bias",)  # what old checkpoints put in place of minus infinity


@dataclass
class Gathered:
    """What is judged once all linears have been seen. ones: kind of scale -> [tensors that are one
    everywhere, tensors]."""

    ones: dict[str, list[int]] = field(default_factory=dict)
    awq: list[Sums] = field(default_factory=list)

    def count(self, kind: str, scale: Tensor) -> None:
        counts = self.ones.setdefault(kind, [0, 0])
        counts[0] += bool((scale.float() == 1).all())
        counts[1] += 1

    def findings(self) -> Iterator[Finding]:
        for kind, (ones, count) in self.ones.items():
            if ones == count:
                yield finding(
                    "uncalibrated scales", f"{kind} of all {count} modules",
                    "scales of what was measured", "1.0 everywhere",
                )  # fmt: skip
        orders = judge(self.awq)
        for name, plain in orders._asdict().items():
            if plain:
                yield finding(
                    "AWQ order", f"{name} of {len(self.awq)} linears",
                    "0, 2, 4, 6, 1, 3, 5, 7 in each word", "0 to 7, by the statistics of scales",
                )  # fmt: skip


def examine_linear(
    module: str,
    layout: Layout,
    scheme: LayerScheme,
    wanted: Wanted,
    source: TensorSource,
    gathered: Gathered,
) -> Iterator[Finding]:
    """The contents of one quantized linear, whose tensors have the right shapes and dtypes."""
    found = [*_scales(module, layout, source, gathered), *_groups(module, scheme, wanted, source)]
    found += _gptq_zeros(module, layout, scheme, source)
    yield from found
    if any(f.severity == "error" for f in found):
        return  # what follows would say the same again
    try:
        q = layout.decompress(module, source, source.get, scheme.weights)
    except UserError as e:
        yield finding("packing", module, f"codes of {wanted.shape}", e)
        return
    if tuple(q.codes.shape) != wanted.shape:
        yield finding("packing", module, f"codes of {wanted.shape}", tuple(q.codes.shape))
        return
    yield from _codes(module, q)
    yield from _sizes(module, q)
    yield from _padding(module, q, source)
    if isinstance(layout, AWQ) and sum(s.count for s in gathered.awq) < AWQ_SAMPLE:
        sums = order_sums(q)
        gathered.awq += [] if sums is None else [sums]


def _scales(
    module: str, layout: Layout, source: TensorSource, gathered: Gathered
) -> Iterator[Finding]:
    name = f"{module}.{layout.scale_leaf}"
    scale = source.get(name)
    exponents = scale.dtype == torch.uint8
    values = scale.float()
    bad = scale == 255 if exponents else ~torch.isfinite(values)
    if bad.any():
        found = f"{int(bad.sum())} of {bad.numel()}: first {_first(scale, bad)}"
        yield finding("scale not finite", name, "finite numbers", found)
    if not exponents and source.info[name].dtype != FP8 and f"{module}.weight" in source:
        gathered.count(layout.scale_leaf, values)
    for leaf in POSITIVE:
        name = f"{module}.{leaf}"
        if name in source:
            values = source.get(name).float()
            yield from examine_measured(name, values)
            if leaf == "input_scale":
                gathered.count(leaf, values)


def examine_measured(name: str, values: Tensor) -> Iterator[Finding]:
    """Scales of what calibration has seen, float32. A global one divides."""
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        yield finding("scale not positive", name, "positive numbers", values.tolist())
        return
    worth = values.reciprocal() if "global" in name.rpartition(".")[2] else values
    if float(worth.max()) > LARGEST:
        yield finding("value too large", name, f"numbers worth at most {LARGEST:g}", _peak(values))


def _sizes(module: str, q: Quantized) -> Iterator[Finding]:
    """Scales that make weights beyond a half float's range."""
    widest = float(q.float_scale().abs().max())
    if widest * 2 * elements(q.spec).highest <= LARGEST:
        return  # no code could
    peak = _peak(q.dequantize())
    if not peak <= LARGEST:
        expected = f"weights of at most {LARGEST:g}"
        yield finding("value too large", f"{module} (scales)", expected, f"{peak:g}")


def _peak(values: Tensor) -> float:
    return float(values.abs().max())


def _groups(
    module: str, scheme: LayerScheme, wanted: Wanted, source: TensorSource
) -> Iterator[Finding]:
    """g_idx, under whichever name."""
    for name in (f"{module}.g_idx", f"{module}.weight_g_idx"):
        if name not in source:
            continue
        g_idx, groups = source.get(name), scheme.weights.groups(wanted.shape[1])
        if g_idx.is_floating_point() or not g_idx.numel():
            yield finding("dtype", name, torch.int32, g_idx.dtype)
        elif name.endswith("weight_g_idx") and bool((g_idx == -1).all()):
            continue  # compressed-tensors: not set
        elif int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
            found = f"{int(g_idx.min())} to {int(g_idx.max())}"
            yield finding("g_idx range", name, f"0 to {groups - 1}", found)


def _gptq_zeros(
    module: str, layout: Layout, scheme: LayerScheme, source: TensorSource
) -> Iterator[Finding]:
    """Zero-points as GPTQ stores them: version 1 minus one, so that a stored maximum has wrapped;
    in the middle of the range where config.json says sym."""
    if not isinstance(layout, GPTQ):
        return
    name, bits = f"{module}.qzeros", scheme.weights.num_bits
    words = source.get(name)
    stored = unpack_bits(words, bits, words.shape[1] * 32 // bits).short() + (1 << (bits - 1))
    zeros = stored + (layout.version == 1)
    if int(zeros.max()) >= 1 << bits:
        found = f"{int((zeros >= 1 << bits).sum())} that are {1 << bits}"
        yield finding("zero-point range", name, f"0 to {(1 << bits) - 1}", found)
    elif scheme.weights.symmetric and bool((zeros != 1 << (bits - 1)).any()):
        found = f"{int(zeros.min())} to {int(zeros.max())}"
        yield finding("symmetric zero-point", name, 1 << (bits - 1), found)


def _codes(module: str, q: Quantized) -> Iterator[Finding]:
    allowed = elements(q.spec)
    codes = f"{module} (codes)"
    if q.spec.type == "float":
        bad = torch.isnan(q.codes.float())
        if bad.any():
            yield finding("value not finite", codes, "numbers", f"{int(bad.sum())} NaN")
    for where, fault, values in (
        (codes, "code range", q.codes),
        (f"{module} (zero-points)", "zero-point range", q.zero_point),
    ):
        if values is None or q.spec.type == "float":
            continue
        low, high = int(values.min()), int(values.max())
        if low < allowed.lowest or high > allowed.highest:
            expected = f"{allowed.lowest:.0f} to {allowed.highest:.0f}"
            yield finding(fault, where, expected, f"{low} to {high}")
    yield from _zero_scales(module, q)


def _zero_scales(module: str, q: Quantized) -> Iterator[Finding]:
    """Scales of zero whose groups have other codes than that of zero; an all-zero group is right
    whatever its scale."""
    scale = q.float_scale()
    if bool((scale != 0).all()):
        return
    ones = q._replace(scale=torch.ones_like(scale), global_scale=None)
    lost = (ones.dequantize() != 0) & (q.dequantize() == 0)
    if lost.any():
        zero = int((scale == 0).sum())
        found = f"{zero} of {scale.numel()} are 0, over {int(lost.sum())} codes that are not"
        yield finding("scale zero", f"{module} (scales)", "numbers other than 0", found)


def _padding(module: str, q: Quantized, source: TensorSource) -> Iterator[Finding]:
    """The bits of compressed-tensors' last words that hold no code."""
    name, bits = f"{module}.weight_packed", q.spec.num_bits
    columns = q.codes.shape[1]
    unused = columns * bits % 32
    if name not in source or q.spec.type == "float" or not unused:
        return
    words = source.get(name)
    if words.shape[1] == packed_words(columns, bits) and not torch.equal(
        words[:, -1], pack_bits(q.codes, bits)[:, -1]
    ):
        yield finding("padding bits", name, f"zero above bit {unused}", "other bits")


def examine_plain(name: str, source: TensorSource) -> Iterator[Finding]:
    """A tensor that is stored as it is."""
    tensor = source.get(name)
    if not tensor.is_floating_point() or not tensor.numel():
        return
    peak = 0.0
    for part in tensor.reshape(-1).split(CHUNK):
        values = part.float()
        bad = ~torch.isfinite(values)
        if bad.any():
            found = f"{_first(part, bad)} among {part.numel()} values"
            yield finding("value not finite", name, "finite numbers", found)
            return
        peak = max(peak, _peak(values))
    if peak > LARGEST and name.rpartition(".")[2] not in MASKED:
        yield finding("value too large", name, f"numbers of at most {LARGEST:g}", f"{peak:g}")
    matrix = tensor.dim() > 1 and "bias" not in name.rpartition(".")[2]
    if not peak and matrix and tensor.numel() >= SMALLEST_MATRIX:
        yield finding("all zero", name, "a matrix of other numbers too", "zeros alone")


def _first(values: Tensor, where: Tensor) -> str:
    return f"{values[where].reshape(-1)[0].float().item():g}"
