"""Packed linear on a CPU with AVX2: inputs as whole numbers of 16 bits times codes of 4 or 8.

CPUs multiply pairs of 16-bit whole numbers twice as fast as float32, and codes need only be spread
to them. An input becomes codes int16 with one scale for each group of at most 128 columns of a
token: 2^-16 of the group's largest at most is lost, less than where inputs are bfloat16. Sums of a
group are exact, their sum over groups is in float32, always in the same order: a row has the same
bits in every batch. Codes of 2 and 3 bits are kept in 4 (kernels/tape has the layout).

Inputs that a scheme quantizes to 8 bits a token are those whole numbers in a tape; elsewhere, and
in other formats, they come fake-quantized and are rounded as all are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import ActivationFormat
from .compiled import decline_compiled
from .elements import int_elements
from .linear_ops import LinearKernel, LinearOperands, LinearProblem

INT8_TOKENS = ActivationFormat(int_elements(8))
GROUP = 128  # columns of an input that share a scale, at most: 128 * 128 * 32767 fits int32
LANES = 16  # outputs whose codes lie side by side


class Int16Layout(NamedTuple):
    """bits: of a packed code, 4 or 8. group: columns that share an input's scale; columns: those of
    the input, filled up to whole groups. by_channel: a row of the weight has one scale. by_token:
    inputs are what the scheme makes of them, 8 bits with one scale a token."""

    bits: int
    asymmetric: bool
    group: int
    columns: int
    by_channel: bool
    by_token: bool = False

    @property
    def inputs(self) -> tuple[int, int, int]:
        """How a tape's ops quantize inputs: columns, group, by_token."""
        return self.columns, self.group, self.by_token

    @classmethod
    def of(cls, problem: LinearProblem) -> Int16Layout:
        bits = 8 if problem.num_bits > 4 else 4
        by_channel = problem.group_size >= problem.in_features
        if by_channel:
            whole = [g for g in range(GROUP, 31, -8) if problem.in_features % g == 0]
            group = whole[0] if whole else 64
        else:
            group = min(problem.group_size, GROUP)
        columns = -(-problem.in_features // group) * group
        by_token = problem.activation == INT8_TOKENS
        return cls(bits, not problem.symmetric, group, columns, by_channel, by_token)


def _decline(problem: LinearProblem) -> str | None:
    if problem.device != "cpu":
        return f"runs on cpu, not {problem.device}"
    if problem.kind != "int":
        return "holds whole numbers, not floats"
    if problem.num_bits > 8:
        return f"holds codes of at most 8 bits, not {problem.num_bits}"
    if problem.dtype == torch.float64:
        return "computes in float32, not float64"
    if not problem.taped:
        return "is for layers that run as a tape, on threads of their own"
    size = problem.group_size
    if size < problem.in_features and (size % 8 or (size > GROUP and size % GROUP)):
        return f"takes groups of a multiple of 8 columns, over {GROUP} of it, not {size}"
    return decline_compiled()


def _pack(operands: LinearOperands, problem: LinearProblem) -> tuple[Tensor, ...]:
    """words int32 [tiles, columns * bits / 32, 16], scale float32 and zero int32 [tiles, groups or
    1, 16]; zero is empty where there is none."""
    layout = Int16Layout.of(problem)
    words = pack_codes(operands.codes, layout)

    def by_groups(x: Tensor) -> Tensor:
        if not layout.by_channel:
            x = x.repeat_interleave(problem.group_size // layout.group, 1)
            x = F.pad(x, (0, max(0, layout.columns // layout.group - x.shape[1])))
            x = x[:, : layout.columns // layout.group]
        x = F.pad(x, (0, 0, 0, -x.shape[0] % LANES)).view(-1, LANES, x.shape[1])
        return x.transpose(1, 2).contiguous()

    scale = by_groups(operands.float_scale().float())
    zero = torch.empty(0, dtype=torch.int32)
    if layout.asymmetric:
        assert operands.zero_point is not None
        zero = by_groups(operands.zero_point.int() + (1 << (layout.bits - 1)))
    return words, scale, zero


def pack_codes(codes: Tensor, layout: Int16Layout) -> Tensor:
    """Signed codes int8 [out, in] as words, see `_pack`; filled up with codes of 0."""
    bits, in_word = layout.bits, 32 // layout.bits
    rows, given = codes.shape
    whole = F.pad(codes, (0, layout.columns - given, 0, -rows % LANES)).int()
    tiles = (whole + (1 << (bits - 1))).view(-1, LANES, layout.columns // in_word, in_word)
    words = torch.zeros(tiles.shape[:3], dtype=torch.int32)
    for column in range(in_word):
        pair, half = divmod(column, 2)
        words |= tiles[..., column] << (bits * pair + 16 * half)
    return words.transpose(1, 2).contiguous()


def packed_op(
    problem: LinearProblem, tensors: tuple[Tensor, ...], bias: Tensor | None
) -> list[int]:
    """The operands of Op.PACKED that the weight gives: bits to bias. bias: float32."""
    layout, (words, scale, zero) = Int16Layout.of(problem), tensors
    step = 0 if layout.by_channel else LANES * 4
    return [
        layout.bits, layout.asymmetric, layout.columns, layout.group, words.data_ptr(),
        scale.data_ptr(), step, zero.data_ptr() if layout.asymmetric else 0, problem.out_features,
        0 if bias is None else bias.data_ptr(),
    ]  # fmt: skip


def _run(
    x: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, problem: LinearProblem
) -> Tensor:
    from .tape.program import run_packed

    rows = x.reshape(-1, problem.in_features)
    wide_bias = None if bias is None else bias.float().contiguous()
    y = run_packed(rows.float().contiguous(), packed_op(problem, tensors, wide_bias))
    return y.to(x.dtype).view(*x.shape[:-1], problem.out_features)


INT16_CPU = LinearKernel("int16_cpu", _decline, _pack, _run, note="inputs as int16 in groups")
