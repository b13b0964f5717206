"""A decoder's layers as a tape of compiled ops, for CPUs (kernels/tape).

What a layer is, DecoderLayer says; here its ops are written down once, with the addresses of
weights and pools, and a step fills in its rows. The residual stream is float32 from the embedding
to the last norm, whatever the model's dtype. Layers that a tape has no op for are declined, and run
op by op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...kernels.attention_ops import PagedBatch
from ...kernels.compiled import decline_compiled
from ...kernels.kv_store_ops import NewTokens
from ...kernels.linear_int16 import INT8_TOKENS, Int16Layout, packed_op
from ..attending import WatchedBatch
from ..linear import PackedLinear
from .projection import Linear, PlainLinear

if TYPE_CHECKING:
    from .decoder import DecoderLayer, KVPools, Norm

FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def decline_layers(layers: Sequence[DecoderLayer], pools: Sequence[KVPools]) -> str | None:
    """None, or why a tape cannot run these layers over these pools."""
    if pools[0].keys.codes.device.type != "cpu":
        return "runs on cpu"
    if (reason := decline_compiled()) is not None:
        return reason
    dtypes = {pool.codes.dtype for pair in pools for pool in pair if pool.fmt is None}
    if len(dtypes) != 1 or any(pool.fmt is not None for pair in pools for pool in pair):
        return "keeps keys and values as floats of one dtype"
    dtype = dtypes.pop()
    if dtype not in FLOATS:
        return f"has no {dtype}"
    if any(pair.keys.block_size % 16 for pair in pools):
        return "takes blocks of a multiple of 16 tokens"
    reasons = (_decline_layer(layer, dtype) for layer in layers)
    return next((reason for reason in reasons if reason is not None), None)


def _decline_layer(layer: DecoderLayer, dtype: torch.dtype) -> str | None:
    if layer.mlp is None:
        return "has no op for a mixture of experts"
    rotary = layer.store.rotary
    if rotary is None or rotary.interleaved:
        return "turns halves of heads against each other, not neighbours"
    if layer.head_dim % 8:
        return f"takes heads of a multiple of 8 channels, not {layer.head_dim}"
    linears = [*layer.qkv.linears, layer.out, *layer.mlp.gate_up.linears, layer.mlp.down]
    reasons = (_decline_linear(linear, dtype) for linear in linears)
    return next((reason for reason in reasons if reason is not None), None)


def _decline_linear(linear: Linear, dtype: torch.dtype) -> str | None:
    if isinstance(linear, PackedLinear):
        if linear.report.kernel != "int16_cpu":
            return f"has no op for {linear.report.kernel}"
        if linear.reorders:
            return "reads columns in their order"
        if linear.problem.activation not in (None, INT8_TOKENS):
            return f"has no inputs of {linear.problem.activation}"
        return None
    weight = _float_weight(linear)
    if weight is None or weight.dtype != dtype or not weight.is_contiguous():
        return "takes float weights as they are, in the dtype of keys and values"
    if weight.shape[1] % 8:
        return f"takes a multiple of 8 inputs, not {weight.shape[1]}"
    return None


def _float_weight(linear: Any) -> Tensor | None:
    if isinstance(linear, PlainLinear):
        return None if linear.kernel.repacks else linear.packed
    return linear.weight if type(linear) is nn.Linear else None


class TapedLayers:
    """Layers that `decline_layers` does not decline, over their pools. kinds: of each layer, the
    number of its batch."""

    def __init__(
        self, layers: Sequence[DecoderLayer], kinds: Sequence[int], pools: Sequence[KVPools]
    ) -> None:
        from ...kernels.tape.program import Tape

        script = _Script()
        for layer, kind, pair in zip(layers, kinds, pools, strict=True):
            script.layer(layer, kind, pair)
        self._widths = script.widths
        self._rows = 0
        self._buffers: dict[int, Tensor] = {}
        self._tape = Tape(FLOATS[pools[0].keys.codes.dtype], script.ops, script.keep)
        self._registers = np.zeros(
            script.kinds_at + (max(kinds) + 1) * script.kind_registers, np.int64
        )

    def __call__(
        self, stream: Tensor, batches: Sequence[PagedBatch], new: Sequence[NewTokens]
    ) -> Tensor:
        """The stream float32 [tokens, hidden] behind the last layer: `stream`, written to."""
        from ...kernels.tape.program import KindRegister, Register

        rows, registers = stream.shape[0], self._registers
        self._grow(rows)
        keep = [batches[0].cu_seqlens_q.contiguous()]
        registers[Register.ROWS], registers[Register.STREAM] = rows, stream.data_ptr()
        registers[Register.SEQUENCES] = batches[0].context_lens.shape[0]
        registers[Register.STARTS] = keep[0].data_ptr()
        for kind, (batch, tokens) in enumerate(zip(batches, new, strict=True)):
            at = Register.KINDS + kind * KindRegister.COUNT
            tensors = [
                tokens.positions.contiguous(), tokens.slots.contiguous(),
                batch.context_lens.contiguous(), batch.block_tables.contiguous(),
            ]  # fmt: skip
            registers[at : at + 4] = [tensor.data_ptr() for tensor in tensors]
            registers[at + KindRegister.TABLE_ROW] = batch.block_tables.shape[1]
            keep += tensors
        self._tape.run(registers)
        return stream

    def _grow(self, rows: int) -> None:
        """Memory for so many rows between the ops, kept for the next step."""
        if rows <= self._rows:
            return
        self._rows = rows
        with torch.inference_mode(False):
            for register, (width, dtype) in self._widths.items():
                self._buffers[register] = torch.empty(rows * width, dtype=dtype)
                self._registers[register] = self._buffers[register].data_ptr()


def takes_batches(batches: Sequence[PagedBatch]) -> bool:
    """Whether a tape may run a step: nobody looks on."""
    return not any(isinstance(batch, WatchedBatch) for batch in batches)


class _Script:
    """The ops of layers, written one after the other. widths: of a row in each buffer."""

    def __init__(self) -> None:
        from ...kernels.tape import ops, program

        self._op, self._register, self._gates = program.Op, program.Register, ops.GATES
        self._bits = program.float_bits
        self.kinds_at = int(program.Register.KINDS)
        self.kind_registers = int(program.KindRegister.COUNT)
        self.ops: list[list[int]] = []
        self.keep: list[Any] = []
        self.widths: dict[int, tuple[int, torch.dtype]] = {}

    def layer(self, layer: DecoderLayer, kind: int, pools: KVPools) -> None:
        register, mlp = self._register, layer.mlp
        assert mlp is not None
        attention_norm, attention_out, mlp_norm, mlp_out = layer.norms
        heads = layer.heads + 2 * layer.kv_heads
        self._normed(attention_norm, layer.qkv.linears, register.WIDE, heads * layer.head_dim)
        self._attention(layer, kind, pools, heads)
        inner = layer.heads * layer.head_dim
        self._widen(register.INNER, inner)
        if isinstance(layer.out, PackedLinear):
            inputs = self._quantized(layer.out).inputs
            self.ops.append([self._op.QUANTIZE, register.INNER, inner, *inputs])
        self._onto(layer.out, register.INNER, attention_out, layer.multiplier)
        gate_up = mlp.gate_up.linears
        inner = sum(_features(linear)[0] for linear in gate_up) // 2
        self._normed(mlp_norm, gate_up, register.WIDE, 2 * inner)
        gate = self._gates[mlp.gate]
        if isinstance(mlp.down, PackedLinear):
            inputs = self._quantized(mlp.down).inputs
            self.ops.append([self._op.GATE_QUANTIZE, inner, gate, *inputs])
        else:
            self._widen(register.INNER, inner)
            self.ops.append([self._op.GATE, inner, gate])
        self._onto(mlp.down, register.INNER, mlp_out, layer.multiplier)

    def _attention(self, layer: DecoderLayer, kind: int, pools: KVPools, heads: int) -> None:
        dim, options = layer.head_dim, layer.attend
        rotary, norm = layer.store.rotary, layer.store.norm
        assert rotary is not None
        parts = ((0, layer.heads), (layer.heads, layer.kv_heads))
        for wide, (first, count) in zip(layer.wide_norms or (), parts, strict=False):
            self.ops.append([
                self._op.NORM, self._register.WIDE, first * dim, heads * dim, count * dim,
                self._float(wide.weight), self._bits(wide.eps),
                self._register.WIDE, first * dim, heads * dim, 0, 0,
            ])  # fmt: skip
        norms = (0, 0, 0)
        if norm is not None:
            norms = self._float(norm.q_weight), self._float(norm.k_weight), self._bits(norm.eps)
        keys, values = pools.keys.codes, pools.values.codes
        self.keep += [keys, values]
        sizes = [layer.heads, layer.kv_heads, dim]
        self.ops.append([
            self._op.STORE, kind, *sizes, self._float(rotary.cos), self._float(rotary.sin),
            rotary.cos.shape[1], *norms, keys.data_ptr(), values.data_ptr(), keys.shape[2],
        ])  # fmt: skip
        self.ops.append([
            self._op.ATTEND, kind, *sizes, keys.data_ptr(), values.data_ptr(), keys.shape[2],
            options.sliding_window or 0, self._bits(options.scale),
            self._bits(options.softcap or 0.0),
        ])  # fmt: skip

    def _normed(self, norm: Norm | None, linears: Sequence[Linear], out: int, out_row: int) -> None:
        """The products of the stream's norm with linears, side by side."""
        register = self._register
        self._widen(out, out_row)
        layouts = [self._quantized(x) if isinstance(x, PackedLinear) else None for x in linears]
        first, source = layouts[0], register.STREAM
        together = first is not None and all(x and x.inputs == first.inputs for x in layouts)
        width = _features(linears[0])[1]
        if norm is not None and together:
            assert first is not None
            self.ops.append([
                self._op.NORM_QUANTIZE, source, width, self._float(norm.weight),
                self._bits(norm.eps), *first.inputs,
            ])  # fmt: skip
        elif norm is not None:
            self._widen(register.NORMED, width)
            self.ops.append([
                self._op.NORM, source, 0, width, width, self._float(norm.weight),
                self._bits(norm.eps), register.NORMED, 0, width, 0, 0,
            ])  # fmt: skip
            source = register.NORMED
        begin = 0
        for i, (linear, layout) in enumerate(zip(linears, layouts, strict=True)):
            if layout is not None and not together or (together and norm is None and i == 0):
                assert layout is not None
                self.ops.append([self._op.QUANTIZE, source, width, *layout.inputs])
            self._product(linear, source, out, begin, out_row, 0, 0.0)
            begin += _features(linear)[0]

    def _onto(self, linear: Linear, source: int, norm: Norm | None, multiplier: float) -> None:
        """The stream and, on it, multiplier * norm(a product). source: of its inputs where they are
        floats; quantized ones are in their place already."""
        (width, _), register = _features(linear), self._register
        if norm is None:
            self._product(linear, source, register.STREAM, 0, width, 1, multiplier)
            return
        self._widen(register.UPDATE, width)
        self._product(linear, source, register.UPDATE, 0, width, 0, 0.0)
        self.ops.append([
            self._op.NORM, register.UPDATE, 0, width, width, self._float(norm.weight),
            self._bits(norm.eps), register.STREAM, 0, width, 1, self._bits(multiplier),
        ])  # fmt: skip

    def _product(
        self, linear: Any, source: int, out: int, begin: int, row: int, onto: int, factor: float
    ) -> None:
        """The op of one linear; source: of its inputs where they are floats."""
        target = [out, begin, row, onto, self._bits(factor)]
        bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        self.keep.append(bias)
        if isinstance(linear, PackedLinear):
            self.keep.append(linear.tensors)
            weight = packed_op(linear.problem, linear.tensors, bias)
            self.ops.append([self._op.PACKED, *weight, *target])
            return
        weight, address = _float_weight(linear), 0 if bias is None else bias.data_ptr()
        assert weight is not None
        self.keep.append(weight)
        outputs, columns = weight.shape
        self.ops.append(
            [self._op.FLOAT, source, columns, weight.data_ptr(), outputs, address, *target]
        )

    def _quantized(self, linear: PackedLinear) -> Int16Layout:
        """How the inputs of a linear are kept, and memory for them."""
        layout, register = Int16Layout.of(linear.problem), self._register
        groups = layout.columns // layout.group
        self._widen(register.CODES, layout.columns, torch.int16)
        self._widen(register.SCALES, groups)
        self._widen(register.SUMS, groups, torch.int32)
        return layout

    def _widen(self, register: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        before = self.widths.get(int(register), (0, dtype))[0]
        self.widths[int(register)] = max(before, width), dtype

    def _float(self, tensor: Tensor) -> int:
        """The address of a tensor as float32, which is kept."""
        wide = tensor.detach().float().contiguous()
        self.keep.append(wide)
        return wide.data_ptr()


def _features(linear: Any) -> tuple[int, int]:
    return linear.out_features, linear.in_features
