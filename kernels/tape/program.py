"""A tape: a step's ops in order, and the compiled function that walks through it.

An op is a row of integers: which op, and its operands. An operand is a number, an address that
stays (of weights, of pools), or a register, whose value the step sets: where the rows stand, how
many there are. Floats are kept as their bits.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numba import njit, types
from torch import Tensor
from tqdm import tqdm

from .disk import keep_on_disk, named
from .memory import float_of, int64s, next_job, wait_for_all
from .ops import attend_rows, gate_quantize, gate_rows, norm_quantize, norm_rows, store_rows
from .products import OPTIONS, float_linear, packed_linear, quantize_rows
from .team import Walker, team, team_size

MOST_REGISTERS = 1 << 10
WIDTH = 18  # operands of an op at most, with its number


class Op(IntEnum):
    """The ops of a tape; operands as the functions of products and ops name them."""

    NORM_QUANTIZE = 0
    NORM = 1
    QUANTIZE = 2
    PACKED = 3
    FLOAT = 4
    STORE = 5
    ATTEND = 6
    GATE_QUANTIZE = 7
    GATE = 8


class Register(IntEnum):
    """What a step sets: how many rows and sequences, where sequences begin, and where rows are.
    Those of each kind of layers come after."""

    ROWS = 0
    SEQUENCES = 1
    STARTS = 2
    STREAM = 3
    WIDE = 4
    INNER = 5
    UPDATE = 6
    NORMED = 7
    CODES = 8
    SCALES = 9
    SUMS = 10
    KINDS = 11


class KindRegister(IntEnum):
    """Of one kind of layers: counted from Register.KINDS + number of the kind * COUNT."""

    POSITIONS = 0
    SLOTS = 1
    LENGTHS = 2
    TABLES = 3
    TABLE_ROW = 4
    COUNT = 5


def float_bits(value: float) -> int:
    return struct.unpack("q", struct.pack("d", value))[0]


@functools.cache
def walker(dtype: str, formats: frozenset[tuple[int, bool]], ops: frozenset[Op]) -> Walker:
    """What runs a tape of `ops`, of pools and float weights of `dtype` and packed weights of
    `formats`, each the bits of a code and whether it has zero-points. What is not among them is not
    compiled. The first time on a machine this takes 5 to 20 seconds; the code is kept."""
    name = f"{dtype} {sorted(formats)} {sorted(ops)}"
    skip = njit(_skip)
    linear = float_linear(dtype) if Op.FLOAT in ops else skip
    store, attend = store_rows(dtype) if Op.STORE in ops else skip, skip
    if Op.ATTEND in ops:
        attend = attend_rows(dtype)
    packed4, packed4z, packed8, packed8z = (
        packed_linear(*kind) if kind in formats else skip
        for kind in ((4, False), (4, True), (8, False), (8, True))
    )

    @njit(**OPTIONS)
    @named(name)
    def packed(t, n, r, p):  # type: ignore[no-untyped-def]
        args = (t, n, r[Register.ROWS], r[Register.CODES], r[Register.SUMS], r[Register.SCALES],
                p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], r[p[11]] + p[12] * 4, p[13], p[14],
                np.float32(float_of(p[15])))  # fmt: skip
        if p[1] == 4:
            if p[2]:
                packed4z(*args)
            else:
                packed4(*args)
        elif p[2]:
            packed8z(*args)
        else:
            packed8(*args)

    @njit(**OPTIONS)
    @named(name)
    def step(t, n, r, p):  # type: ignore[no-untyped-def]
        op, rows = p[0], r[Register.ROWS]
        codes, scales, sums = r[Register.CODES], r[Register.SCALES], r[Register.SUMS]
        if op == Op.PACKED:
            packed(t, n, r, p)
        elif op == Op.FLOAT:
            linear(t, n, rows, r[p[1]], p[2], p[3], p[4], p[5], r[p[6]] + p[7] * 4, p[8], p[9],
                   np.float32(float_of(p[10])))  # fmt: skip
        elif op == Op.NORM_QUANTIZE:
            norm_quantize(t, n, rows, r[p[1]], p[2], p[3], np.float32(float_of(p[4])), p[5], p[6],
                          p[7], codes, scales, sums)  # fmt: skip
        elif op == Op.NORM:
            norm_rows(t, n, rows, r[p[1]] + p[2] * 4, p[3], p[4], p[5],
                      np.float32(float_of(p[6])), r[p[7]] + p[8] * 4, p[9], p[10],
                      np.float32(float_of(p[11])))  # fmt: skip
        elif op == Op.QUANTIZE:
            quantize_rows(t, n, rows, r[p[1]], p[2], p[3], p[4], p[5], codes, scales, sums)
        elif op == Op.GATE_QUANTIZE:
            gate_quantize(t, n, rows, r[Register.WIDE], p[1], p[2], p[3], p[4], p[5], codes, scales,
                          sums)  # fmt: skip
        elif op == Op.GATE:
            gate_rows(t, n, rows, r[Register.WIDE], p[1], p[2], r[Register.INNER])
        else:
            k = Register.KINDS + p[1] * KindRegister.COUNT
            positions, slots = r[k + KindRegister.POSITIONS], r[k + KindRegister.SLOTS]
            lengths, tables = r[k + KindRegister.LENGTHS], r[k + KindRegister.TABLES]
            if op == Op.STORE:
                store(t, n, rows, r[Register.WIDE], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9],
                      np.float32(float_of(p[10])), positions, slots, p[11], p[12],
                      p[13])  # fmt: skip
            else:
                attend(t, n, r[Register.SEQUENCES], r[Register.STARTS], lengths, tables,
                       r[k + KindRegister.TABLE_ROW], r[Register.WIDE], p[2], p[3], p[4], p[5],
                       p[6], p[7], p[8], np.float32(float_of(p[9])), np.float32(float_of(p[10])),
                       r[Register.INNER])  # fmt: skip

    @njit(**OPTIONS)
    @named(name)
    def walk(t, n, barrier, tape, count, registers):  # type: ignore[no-untyped-def]
        r = int64s(registers, MOST_REGISTERS)
        for i in range(count):
            step(t, n, r, int64s(tape + i * WIDTH * 8, WIDTH))
            wait_for_all(barrier, n)

    @njit(**OPTIONS)
    @named(name)
    def serve(t, n, barrier, job, own, last, spins):  # type: ignore[no-untyped-def]
        """Run what is posted for this walker, number `own`, until there is nothing for `spins`
        looks, or it is another's; the number of the last job that was run."""
        while True:
            number = next_job(job, last, spins)
            fields = int64s(job, 4)
            if number == last or fields[0] != own:
                return last
            walk(t, n, barrier, fields[1], fields[2], fields[3])
            last = number

    keep_on_disk(walk, name)
    keep_on_disk(serve, name)
    both, title = ((walk, 6), (serve, 7)), "compile the CPU's ops, kept for later runs"
    for function, count in tqdm(both, desc=title, delay=2, disable=None):
        function.compile((types.int64,) * count)
    return Walker(walk, serve)


def _skip(*_):  # type: ignore[no-untyped-def]
    return None


class Tape:
    """Ops that are run together. dtype: of pools and of float weights, by torch's name. keep: what
    their addresses are in."""

    def __init__(self, dtype: str, ops: Sequence[Sequence[int]], keep: Sequence[Any] = ()) -> None:
        self._keep = list(keep)
        self._ops = np.zeros((len(ops), WIDTH), np.int64)
        for row, op in zip(self._ops, ops, strict=True):
            row[: len(op)] = op
        packed = frozenset((int(op[1]), bool(op[2])) for op in ops if op[0] == Op.PACKED)
        self._walk = walker(dtype, packed, frozenset(Op(op[0]) for op in ops))

    def run(self, registers: np.ndarray) -> None:
        """Walk through it on `team_size` threads. registers: int64, see Register."""
        team(team_size()).run(self._walk, self._ops, registers)


def _on_rows(tape: Tape, x: Tensor, outputs: int, columns: int, group: int) -> Tensor:
    """What a tape makes of x float32 [rows, in], taken as the stream, in WIDE: [rows, outputs]."""
    rows, groups = x.shape[0], columns // group
    y = torch.empty(rows, outputs)
    codes = torch.empty(rows, columns, dtype=torch.int16)
    scales, sums = torch.empty(rows, groups), torch.empty(rows, groups, dtype=torch.int32)
    registers = np.zeros(Register.KINDS, np.int64)
    registers[Register.ROWS] = rows
    for register, tensor in (
        (Register.STREAM, x), (Register.WIDE, y), (Register.CODES, codes),
        (Register.SCALES, scales), (Register.SUMS, sums),
    ):  # fmt: skip
        registers[register] = tensor.data_ptr()
    tape.run(registers)
    return y


@functools.lru_cache(maxsize=1024)
def _tape_of(dtype: str, *ops: tuple[int, ...]) -> Tape:
    return Tape(dtype, ops)


def run_packed(x: Tensor, weight: Sequence[int]) -> Tensor:
    """x float32 [rows, in] times a packed weight: [rows, out]. weight: operands of Op.PACKED up to
    its bias."""
    columns, group, outputs = weight[2], weight[3], weight[8]
    quantize = (Op.QUANTIZE, Register.STREAM, x.shape[1], columns, group, 0)
    product = (Op.PACKED, *weight, Register.WIDE, 0, outputs, 0, 0)
    return _on_rows(_tape_of("float32", quantize, product), x, outputs, columns, group)


def run_floats(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x float32 [rows, in] times weight [out, in] of 16 or 32-bit floats: float32 [rows, out].
    bias: float32."""
    outputs, columns = weight.shape
    product = (
        Op.FLOAT, Register.STREAM, columns, weight.data_ptr(), outputs,
        0 if bias is None else bias.data_ptr(), Register.WIDE, 0, outputs, 0, 0,
    )  # fmt: skip
    dtype = str(weight.dtype).removeprefix("torch.")
    return _on_rows(_tape_of(dtype, product), x, outputs, 8, 8)
