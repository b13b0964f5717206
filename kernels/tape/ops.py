"""What stands between the products of a decoder's layer, each thread a share of the rows.

Definitions are those of norm_ops, kv_store_ops and attention_ops, computed in float32; attention
goes block by block with a running maximum (Milakov and Gimelshein 2018, arXiv:1805.02867).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import njit

from .disk import named
from .memory import copy_narrow, float32_of, floats, int32s, int64s, keep
from .products import OPTIONS, many_dots, quantize_nth
from .tiles import fetch_line, mixtures, shares_of_keys, size_of

FAST: dict[str, Any] = {**OPTIONS, "fastmath": {"nsz", "reassoc", "contract"}}
SILU, GELU, GELU_TANH = range(3)
GATES = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH}
ATTENDED_ROWS = 8  # of one sequence whose queries meet a block of keys together


@njit(**FAST)
def _square_sum(x):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for value in x:
        total += value * value
    return total


@njit(**OPTIONS)
def norm_into(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """RMS norm of x float32 [n]; out may be x."""
    factor = np.float32(1) / np.sqrt(_square_sum(x) / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = x[i] * factor * weight[i]


@njit(**OPTIONS)
def norm_quantize(thread, threads, rows, x, columns, weight, eps, padded, group, by_token, codes,
                  scales, sums):  # type: ignore[no-untyped-def]  # fmt: skip
    """The norm of rows float32 [rows, columns], quantized as quantize_rows."""
    weights, normed = floats(weight, columns), np.empty(columns, np.float32)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        norm_into(floats(x + r * columns * 4, columns), weights, eps, normed)
        quantize_nth(normed, r, padded, group, by_token, codes, scales, sums)


@njit(**OPTIONS)
def norm_rows(thread, threads, rows, x, row, columns, weight, eps, out, out_row, onto, factor):  # type: ignore[no-untyped-def]
    """The norm of rows of `columns` floats, `row` floats apart, as `out`, or factor times it added
    to that."""
    weights, normed = floats(weight, columns), np.empty(columns, np.float32)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        norm_into(floats(x + r * row * 4, columns), weights, eps, normed)
        line = floats(out + r * out_row * 4, columns)
        if onto:
            for i in range(columns):
                line[i] += normed[i] * factor
        else:
            line[:] = normed


@njit(**OPTIONS)
def exp32(x):  # type: ignore[no-untyped-def]
    """exp of a float32 up to 88, to 2e-7 of it, 0 below -87: 2^n by bits times a polynomial of the
    rest, without a branch, so that loops of it are vectors."""
    bounded = min(max(x, np.float32(-87.3)), np.float32(88.3))
    whole = np.rint(bounded * np.float32(1.44269504))
    rest = bounded - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    value = np.float32(1.9875691500e-4)
    value = value * rest + np.float32(1.3981999507e-3)
    value = value * rest + np.float32(8.3334519073e-3)
    value = value * rest + np.float32(4.1665795894e-2)
    value = value * rest + np.float32(1.6666665459e-1)
    value = value * rest + np.float32(5.0000001201e-1)
    value = value * rest * rest + rest + np.float32(1)
    power = float32_of((np.int32(whole) + np.int32(127)) << np.int32(23))
    return np.float32(0) if x <= np.float32(-87.3) else value * power  # not-a-number stays it


@njit(**OPTIONS)
def gate_into(gates, ups, kind, out):  # type: ignore[no-untyped-def]
    """act(gate) * up of float32 [n]."""
    one, half = np.float32(1), np.float32(0.5)
    if kind == SILU:
        for i in range(len(gates)):
            out[i] = gates[i] / (one + exp32(-gates[i])) * ups[i]
    elif kind == GELU_TANH:
        for i in range(len(gates)):
            g = gates[i]
            inner = np.float32(0.7978845608) * (g + np.float32(0.044715) * g * g * g)
            out[i] = g / (one + exp32(np.float32(-2) * inner)) * ups[i]
    else:
        for i in range(len(gates)):
            g = gates[i]
            out[i] = half * g * np.float32(1 + math.erf(g * 0.7071067811865476)) * ups[i]


@njit(**OPTIONS)
def gate_quantize(thread, threads, rows, gate_up, columns, kind, padded, group, by_token, codes,
                  scales, sums):  # type: ignore[no-untyped-def]  # fmt: skip
    """The gated activation of rows float32 [rows, 2 columns], quantized as quantize_rows; threads
    share out pieces of rows, groups where each has a scale of its own."""
    piece = padded if by_token else group
    pieces = padded // piece
    active = np.empty(piece, np.float32)
    for item in range(rows * pieces * thread // threads, rows * pieces * (thread + 1) // threads):
        r, first = item // pieces, item % pieces * piece
        count = max(0, min(piece, columns - first))
        line = floats(gate_up + r * columns * 8, 2 * columns)
        gates, ups = line[first : first + count], line[columns + first : columns + first + count]
        gate_into(gates, ups, kind, active[:count])
        quantize_nth(active[:count], item, piece, group, by_token, codes, scales, sums)


@njit(**OPTIONS)
def gate_rows(thread, threads, rows, gate_up, columns, kind, out):  # type: ignore[no-untyped-def]
    """The gated activation of rows float32 [rows, 2 columns] as float32 [rows, columns]."""
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        line = floats(gate_up + r * columns * 8, 2 * columns)
        gate_into(line[:columns], line[columns:], kind, floats(out + r * columns * 4, columns))


@njit(**OPTIONS)
def _turn(head, cos, sin):  # type: ignore[no-untyped-def]
    half = len(cos)
    for i in range(half):
        first, second = head[i], head[half + i]
        head[i] = first * cos[i] - second * sin[i]
        head[half + i] = second * cos[i] + first * sin[i]


@functools.cache
def store_rows(dtype: str) -> Any:
    """(thread, threads, rows, qkv, heads, kv heads, head dim, cos, sin, half, q norm, k norm, eps,
    positions, slots, keys, values, block): norms (0: none) and rotary embedding of queries and keys
    float32 [rows, heads + 2 kv heads, head dim] in place; keys and values as `dtype` into pools of
    blocks of `block` tokens. cos, sin: float32 [positions, half]."""
    copy, size = copy_narrow(dtype), size_of(dtype)

    @njit(**OPTIONS)
    @named(dtype)
    def store(thread, threads, rows, qkv, heads, kv_heads, head_dim, cos, sin, half, q_norm, k_norm,
              eps, positions, slots, keys, values, block):  # type: ignore[no-untyped-def]  # fmt: skip
        total = heads + 2 * kv_heads
        begin, end = rows * total * thread // threads, rows * total * (thread + 1) // threads
        where, places = int64s(positions, rows), int64s(slots, rows)
        for item in range(begin, end):
            r, h = item // total, item % total
            head = floats(qkv + item * head_dim * 4, head_dim)
            if h < heads + kv_heads:
                norm = q_norm if h < heads else k_norm
                if norm != 0:
                    norm_into(head, floats(norm, head_dim), eps, head)
                offset = where[r] * half * 4
                _turn(head, floats(cos + offset, half), floats(sin + offset, half))
            if h >= heads and places[r] >= 0:
                kv_head, pool = h - heads, keys
                if kv_head >= kv_heads:
                    kv_head, pool = kv_head - kv_heads, values
                at, offset = places[r] // block, places[r] % block
                copy(head, pool + ((at * kv_heads + kv_head) * block + offset) * head_dim * size)

    return store


@njit(**OPTIONS)
def _soften(logits, softcap):  # type: ignore[no-untyped-def]
    for i in range(len(logits)):
        logits[i] = softcap * np.float32(math.tanh(logits[i] / softcap))


@njit(**OPTIONS)
def _copy_queries(rows, source, row, count, scale, out):  # type: ignore[no-untyped-def]
    """`count` floats at `source` and at each `row` bytes from there, times scale, side by side."""
    for r in range(rows):
        line, place = floats(source + r * row, count), floats(out + r * count * 4, count)
        for i in range(count):
            place[i] = line[i] * scale


@njit(**OPTIONS)
def _begin(sums, largest, totals):  # type: ignore[no-untyped-def]
    for i in range(len(sums)):
        sums[i] = 0
    for q in range(len(totals)):
        largest[q] = -np.inf
        totals[q] = 0


@njit(**OPTIONS)
def _scale(shares, count, sums, head_dim, factor):  # type: ignore[no-untyped-def]
    """Multiply the first `count` shares and what is summed."""
    first, values = floats(shares, count), floats(sums, head_dim)
    for i in range(count):
        first[i] *= factor
    for d in range(head_dim):
        values[d] *= factor


@njit(**OPTIONS)
def _finish(sums, total, out):  # type: ignore[no-untyped-def]
    inverse = np.float32(1) / total if total != 0 else np.float32(0)  # 0: saw no key
    for d in range(len(sums)):
        out[d] = sums[d] * inverse


@functools.cache
def attend_rows(dtype: str) -> Any:
    """(thread, threads, sequences, starts, lengths, tables, table row, qkv, heads, kv heads, head
    dim, keys, values, block, window, scale, softcap, out): paged attention of the queries in qkv,
    see store_rows, as float32 [rows, heads, head dim]. starts int32 [sequences + 1], lengths int32,
    tables int32 of `table row` blocks a row; window: 0 for none; softcap: 0 for none."""
    products, size = many_dots(dtype), size_of(dtype)
    mix1, mix2, mix3 = (mixtures(rows, 16, dtype) for rows in (1, 2, 3))
    narrow1, narrow2, narrow3 = (mixtures(rows, 8, dtype) for rows in (1, 2, 3))
    share, fetch = shares_of_keys(), fetch_line()

    @njit(**OPTIONS)
    @named(dtype)
    def mix(rows, shares, row, v, token, tokens, head_dim, out):  # type: ignore[no-untyped-def]
        out_row, r = head_dim * 4, 0
        while r < rows:
            tall, d = min(rows - r, 3), 0
            while d < head_dim:
                args = (shares + r * row, row, v + d * size, token, tokens,
                        out + r * out_row + d * 4, out_row)  # fmt: skip
                wide = head_dim - d >= 16
                if tall == 3:
                    if wide:
                        mix3(args)
                    else:
                        narrow3(args)
                elif tall == 2:
                    if wide:
                        mix2(args)
                    else:
                        narrow2(args)
                elif wide:
                    mix1(args)
                else:
                    narrow1(args)
                d += 16 if wide else 8
            r += tall

    @njit(**OPTIONS)
    @named(dtype)
    def attend(thread, threads, sequences, starts, lengths, tables, table_row, qkv, heads, kv_heads,
               head_dim, keys, values, block, window, scale, softcap, out):  # type: ignore[no-untyped-def]  # fmt: skip
        shared, total = heads // kv_heads, heads + 2 * kv_heads
        start_of, length_of = int32s(starts, sequences + 1), int32s(lengths, sequences)
        most, token, turn = ATTENDED_ROWS * shared, head_dim * size, 0
        memory = np.empty(most * (2 * head_dim + block + 2), np.float32)
        queries = memory.ctypes.data
        sums = queries + most * head_dim * 4
        logits = sums + most * head_dim * 4
        most_at = logits + most * block * 4
        total_at = most_at + most * 4
        largest, totals = floats(most_at, most), floats(total_at, most)
        factor = np.empty(1, np.float32)
        for s in range(sequences):
            table = int32s(tables + s * table_row * 4, table_row)
            new = start_of[s + 1] - start_of[s]
            for first in range(0, new, ATTENDED_ROWS):
                count = min(new - first, ATTENDED_ROWS)
                row, last_key = start_of[s] + first, length_of[s] - new + first + count
                first_key = 0 if window == 0 else max(0, last_key - count - window + 1)
                for h in range(kv_heads):
                    turn += 1
                    if turn % threads != thread:
                        continue
                    source = qkv + (row * total + h * shared) * head_dim * 4
                    _copy_queries(count, source, total * head_dim * 4, shared * head_dim,
                                  scale, queries)  # fmt: skip
                    _begin(floats(sums, count * shared * head_dim), largest, totals)
                    for b in range(first_key // block, (last_key + block - 1) // block):
                        place, end = (table[b] * kv_heads + h) * block * token, last_key - b * block
                        end = min(block, end)
                        if last_key > (b + 1) * block:
                            ahead = (table[b + 1] * kv_heads + h) * block * token
                            for line in range(0, block * token, 64):
                                fetch((keys + ahead + line,))
                                fetch((values + ahead + line,))
                        products(count * shared, queries, head_dim * 4, end, keys + place, token,
                                 head_dim, logits, block * 4)  # fmt: skip
                        for q in range(count * shared):
                            position = last_key - count + q // shared
                            seen = min(block, position + 1 - b * block)
                            unseen = max(0, position - window + 1 - b * block) if window else 0
                            line = logits + q * block * 4
                            if softcap > 0:
                                _soften(floats(line, block), softcap)
                            for i in range(0, block, 16):
                                share((line + i * 4, unseen - i, seen - i, most_at + q * 4,
                                       total_at + q * 4, factor.ctypes.data))  # fmt: skip
                                if factor[0] != 1:
                                    _scale(line, i, sums + q * head_dim * 4, head_dim, factor[0])
                        mix(count * shared, logits, block * 4, values + place, token, end, head_dim,
                            sums)  # fmt: skip
                    for r in range(count):
                        place = ((row + r) * heads + h * shared) * head_dim * 4
                        for i in range(shared):
                            q = r * shared + i
                            _finish(floats(sums + q * head_dim * 4, head_dim), totals[q],
                                    floats(out + place + i * head_dim * 4, head_dim))  # fmt: skip
        keep(memory)
        keep(factor)

    return attend
