"""Products of a step's rows with the weights of a linear, each thread a share of the outputs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit

from .disk import named
from .memory import float32_of, floats, int16s, int32s, keep
from .tiles import FEW_ROWS, LANES, dots, fetch_line, few_rows_tile, pair_tile, size_of, unpack_tile

CODE_LIMIT = np.float32(32767)  # of inputs as whole numbers
AT_ONCE = 48  # rows that meet the codes of a tile while they are unpacked
LEAST = np.float32(1e-30)
INFINITY = np.int32(0x7F800000)  # as bits

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


@njit(**OPTIONS)
def _largest(x):  # type: ignore[no-untyped-def]
    """The largest magnitude; not-a-number where one is not finite."""
    bits = x.view(np.int32)
    most = np.int32(0)
    for i in range(len(bits)):
        most = max(most, bits[i] & np.int32(0x7FFFFFFF))  # orders floats as their sizes
    return float32_of(most) if most < INFINITY else np.float32(np.nan)


@njit(**OPTIONS)
def quantize_group(x, codes, scales, sums, group):  # type: ignore[no-untyped-def]
    """x float32 [columns] as codes int16 [columns] times a scale, and their sum, kept as number
    `group` of scales float32 and sums int32. What is not finite makes the scale not-a-number."""
    largest = _largest(x)
    largest = LEAST if largest < LEAST else largest  # its inverse must not overflow
    inverse = CODE_LIMIT / largest
    total = np.int32(0)
    for i in range(len(x)):
        code = np.int32(np.rint(x[i] * inverse))
        codes[i] = code
        total += code
    scales[group] = largest / CODE_LIMIT
    sums[group] = total


@njit(**OPTIONS)
def quantize_token(x, codes, scales, sums, group):  # type: ignore[no-untyped-def]
    """x float32 [columns] as codes of 8 bits in int16 with one scale, its peak over 127.5
    (kernels/activations.py), told for each group."""
    largest = _largest(x)
    scale = largest / np.float32(127.5)
    scale = np.float32(1) if scale == 0 else scale
    for i in range(len(x)):
        code = np.rint(x[i] / scale)
        codes[i] = np.int16(min(max(code, np.float32(-128)), np.float32(127)))
    for g in range(len(scales)):
        total = np.int32(0)
        for i in range(g * group, (g + 1) * group):
            total += np.int32(codes[i])
        scales[g], sums[g] = scale, total


@njit(**OPTIONS)
def quantize_row(x, codes, scales, sums, group, by_token):  # type: ignore[no-untyped-def]
    """All groups of a row x float32 [columns], of 16 bits with a scale each or, by_token, of 8 bits
    with one; beyond it codes are 0."""
    columns, padded = len(x), len(codes)
    for i in range(columns, padded):
        codes[i] = 0
    if by_token:
        quantize_token(x, codes, scales, sums, group)
        return
    for g in range(padded // group):
        first, last = g * group, min((g + 1) * group, columns)
        quantize_group(x[first:last], codes[first:last], scales, sums, g)


@njit(**OPTIONS)
def quantize_nth(x, r, padded, group, by_token, codes, scales, sums):  # type: ignore[no-untyped-def]
    """x float32 [columns] as row r of codes int16 [rows, padded], and of scales and sums [rows,
    groups]; addresses."""
    groups = padded // group
    quantize_row(
        x, int16s(codes + r * padded * 2, padded), floats(scales + r * groups * 4, groups),
        int32s(sums + r * groups * 4, groups), group, by_token,
    )  # fmt: skip


@functools.cache
def packed_linear(bits: int, asymmetric: bool) -> Any:
    """(thread, threads, rows, codes, sums, scales, columns, group, words, weight scale, step, zero,
    outputs, bias, out, out row, onto, factor): outputs = the product of `rows` quantized inputs,
    int16 [rows, columns], with packed words; `columns` and `group` of them; addresses, see
    few_rows_tile. outputs: of which the last tile may have fewer than 16. bias: float32 or 0.
    onto: whether factor * outputs are added to `out`, float32 of `out row` floats a row."""
    unpack = unpack_tile(bits)
    tile6, tile4, tile2, tile1 = (pair_tile(rows, bits, asymmetric) for rows in (6, 4, 2, 1))
    few1, few2, few3, few4 = (few_rows_tile(r, bits, asymmetric) for r in range(1, FEW_ROWS + 1))
    column_bytes = 2 * bits  # of a tile's 16 outputs

    @njit(**OPTIONS)
    @named(bits, asymmetric)
    def few(rows, x, row, words, group, groups, sums, scales, scale, zero, step, out):  # type: ignore[no-untyped-def]
        args = (x, row, words, group, groups, sums, scales, groups * 4, scale, zero, step, out)
        if rows == 1:
            few1(args)
        elif rows == 2:
            few2(args)
        elif rows == 3:
            few3(args)
        else:
            few4(args)

    @njit(**OPTIONS)
    @named(bits, asymmetric)
    def many(rows, x, row, pairs, group, sums, scales, group_row, scale, zero, out):  # type: ignore[no-untyped-def]
        r = 0
        while r < rows:
            at = r * group_row
            args = (x + r * row, row, pairs, group, sums + at, scales + at, group_row, scale, zero,
                    out + r * LANES * 4)  # fmt: skip
            if rows - r >= 6:
                tile6(args)
                r += 6
            elif rows - r >= 4:
                tile4(args)
                r += 4
            elif rows - r >= 2:
                tile2(args)
                r += 2
            else:
                tile1(args)
                r += 1

    @njit(**OPTIONS)
    @named(bits, asymmetric)
    def linear(thread, threads, rows, codes, sums, scales, columns, group, words, scale, step, zero,
               outputs, bias, out, out_row, onto, factor):  # type: ignore[no-untyped-def]  # fmt: skip
        tiles, groups, row = (outputs + LANES - 1) // LANES, columns // group, columns * 2
        scales_of = LANES * 4 if step == 0 else groups * step
        most = max(1, min(rows, AT_ONCE))
        sums_of = np.empty(most * LANES, np.float32)
        pairs = np.empty(group * LANES + 32, np.int16)
        unpacked = (pairs.ctypes.data + 63) & ~63
        begin, end = tiles * thread // threads, tiles * (thread + 1) // threads
        for first in range(0, rows, AT_ONCE):
            count = min(rows - first, AT_ONCE)
            x, at = codes + first * row, first * groups * 4
            for tile in range(begin, end):
                tile_words = words + tile * columns * column_bytes
                tile_scale, tile_zero = scale + tile * scales_of, zero + tile * scales_of
                if count <= FEW_ROWS:
                    few(count, x, row, tile_words, group, groups, sums + at, scales + at,
                        tile_scale, tile_zero, step, sums_of.ctypes.data)  # fmt: skip
                else:
                    sums_of[: count * LANES] = 0
                    for g in range(groups):
                        unpack((tile_words + g * group * column_bytes, group, unpacked))
                        many(count, x + g * group * 2, row, unpacked, group, sums + at + g * 4,
                             scales + at + g * 4, groups * 4, tile_scale + g * step,
                             tile_zero + g * step, sums_of.ctypes.data)  # fmt: skip
                put(sums_of, first, count, tile * LANES, outputs, bias, out, out_row, onto, factor)
        keep(pairs)
        keep(sums_of)

    return linear


@njit(**OPTIONS)
def put(values, first, rows, begin, outputs, bias, out, out_row, onto, factor):  # type: ignore[no-untyped-def]
    """values float32 [rows, 16] as outputs from `begin` on of the rows from `first` on."""
    count = min(LANES, outputs - begin)
    for r in range(rows):
        line = floats(out + ((first + r) * out_row + begin) * 4, count)
        done = values[r * LANES : r * LANES + count]
        if bias != 0:
            added = floats(bias + begin * 4, count)
            for i in range(count):
                done[i] += added[i]
        if onto:
            for i in range(count):
                line[i] += done[i] * factor
        else:
            for i in range(count):
                line[i] = done[i]


@functools.cache
def many_dots(dtype: str, apart: bool = False) -> Any:
    """(rows, x, row, count, w, column, length, out, out row): products of `rows` rows of x with
    `count` rows of w, see dots. apart: a lone row of x meets those of w one after the other, as
    they are read fastest from memory."""
    dot11, dot21, dot31 = (dots(r, 1, dtype) for r in (1, 2, 3))
    dot14, dot24, dot34 = (dots(r, 4, dtype) for r in (1, 2, 3))

    @njit(**OPTIONS)
    @named(dtype, apart)
    def run(rows, x, row, count, w, column, length, out, out_row):  # type: ignore[no-untyped-def]
        r = 0
        while r < rows:
            tall, c = min(rows - r, 3), 0
            while c < count:
                args = (x + r * row, row, w + c * column, column, length,
                        out + r * out_row + c * 4, out_row)  # fmt: skip
                if count - c >= 4 and not (apart and rows == 1):
                    if tall == 1:
                        dot14(args)
                    elif tall == 2:
                        dot24(args)
                    else:
                        dot34(args)
                    c += 4
                else:
                    if tall == 1:
                        dot11(args)
                    elif tall == 2:
                        dot21(args)
                    else:
                        dot31(args)
                    c += 1
            r += tall

    return run


@functools.cache
def float_linear(dtype: str) -> Any:
    """(thread, threads, rows, x, columns, weight, outputs, bias, out, out row, onto, factor): the
    product of float32 rows [rows, columns] with a weight [outputs, columns] of `dtype`; else as
    packed_linear."""
    products, fetch = many_dots(dtype, apart=True), fetch_line()
    size = size_of(dtype)

    @njit(**OPTIONS)
    @named(dtype)
    def linear(thread, threads, rows, x, columns, weight, outputs, bias, out, out_row, onto,
               factor):  # type: ignore[no-untyped-def]  # fmt: skip
        tiles = (outputs + LANES - 1) // LANES
        values = np.empty(AT_ONCE * LANES, np.float32)
        begin, end = tiles * thread // threads, tiles * (thread + 1) // threads
        for first in range(0, rows, AT_ONCE):
            count = min(rows - first, AT_ONCE)
            for tile in range(begin, end):
                width = min(LANES, outputs - tile * LANES)
                if count > 1 and tile + 1 < end:
                    following = weight + (tile + 1) * LANES * columns * size
                    for line in range(0, LANES * columns * size, 64):
                        fetch((following + line,))
                products(count, x + first * columns * 4, columns * 4, width,
                         weight + tile * LANES * columns * size, columns * size, columns,
                         values.ctypes.data, LANES * 4)  # fmt: skip
                put(values, first, count, tile * LANES, outputs, bias, out, out_row, onto, factor)
        keep(values)

    return linear


@njit(**OPTIONS)
def quantize_rows(thread, threads, rows, x, columns, padded, group, by_token, codes, scales, sums):  # type: ignore[no-untyped-def]
    """Rows float32 [rows, columns] as int16 [rows, padded] with scales and sums [rows, groups]."""
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        line = floats(x + r * columns * 4, columns)
        quantize_nth(line, r, padded, group, by_token, codes, scales, sums)
