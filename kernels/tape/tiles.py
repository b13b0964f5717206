"""The inner loops of products, for a few rows of inputs and 16 or fewer outputs.

Packed weights are multiplied as whole numbers: a pair of inputs of 16 bits with a pair of codes
gives 32 bits (`pmaddwd`), twice as many products an instruction as in float32. Codes are unsigned
and sums start at minus the zero-point times the inputs' sum. At the end of a group the sum is
multiplied with the scales of both and added in float32. Sums of whole numbers are exact and
groups are added in one order, so an output has the same bits whatever rows stand beside it.

Weights of floats are multiplied in float32, eight channels of a row of W at a time (`dots`), and
attention's values likewise (`mixtures`). 16-bit floats become wide in registers.

Layout of codes: 16 outputs lie side by side in words of 32 bits; a word has the codes of 32 / bits
neighbouring columns, pair i of them in its lower and its upper 16 bits, bits * i from their low
end.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir

from .emit import (
    F32,
    I16,
    I32,
    at,
    call,
    const,
    const_vector,
    counted,
    fma,
    joined,
    load,
    part,
    prefetch,
    routine,
    splat,
    store,
    total,
    totals,
    vector,
)

LANES = 16  # outputs of a tile of codes
AHEAD = 2048  # bytes of codes that are fetched before they are read
FEW_ROWS = 4  # up to which codes are unpacked in registers, not in memory
EXP_LEAST = -87.3
EXP_TERMS = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip
WORDS, FLOAT_LANES = vector(I32, LANES), vector(F32, LANES)


def host_features() -> dict[str, bool]:
    return dict(binding.get_host_cpu_features())


def _pairs(b: Any, x: Any, w: Any) -> Any:
    """Sums of pairs of products of 16-bit numbers: <16 x i32> of two seen as <32 x i16>."""
    if host_features().get("avx512bw"):
        wide = vector(I16, 2 * LANES)
        args = [b.bitcast(v, wide) for v in (x, w)]
        return call(b, "llvm.x86.avx512.pmaddw.d.512", WORDS, args)
    half, words = vector(I16, LANES), vector(I32, LANES // 2)
    outs = []
    for first in (0, LANES // 2):
        lanes = range(first, first + LANES // 2)
        args = [b.bitcast(part(b, v, lanes), half) for v in (x, w)]
        outs.append(call(b, "llvm.x86.avx2.pmadd.wd", words, args))
    return joined(b, *outs)


def _unpacked(b: Any, words: Any, bits: int) -> list[Any]:
    """The 16 / bits pairs of codes that each word has."""
    mask = const_vector(I32, LANES, ((1 << bits) - 1) * 0x10001)
    shifts = [const_vector(I32, LANES, bits * i) for i in range(16 // bits)]
    return [b.and_(b.lshr(words, s) if i else words, mask) for i, s in enumerate(shifts)]


def _start(b: Any, inputs: Any, zero: Any, asymmetric: bool, bits: int) -> Any:
    """Minus the zero-points, at `zero` where they differ, times the sum of inputs at `inputs`."""
    sums = splat(b, load(b, inputs, I32), LANES)
    points = load(b, zero, WORDS) if asymmetric else const_vector(I32, LANES, 1 << (bits - 1))
    return b.mul(sums, b.neg(points))


def _added(b: Any, sums: Any, scale: Any, input_scale: Any, onto: Any) -> Any:
    both = b.fmul(scale, splat(b, load(b, input_scale, F32), LANES))
    return fma(b, b.sitofp(sums, FLOAT_LANES), both, onto)


def unpack_tile(bits: int) -> Any:
    """(words, columns, out): codes of a group as pairs int16 [columns / 2, 16, 2] at `out`."""

    def emit(b: Any, words: Any, columns: Any, out: Any) -> None:
        def body(k: Any, _: list[Any]) -> list[Any]:
            place = at(b, words, k, 2 * bits)
            prefetch(b, b.add(place, const(AHEAD)))
            for i, pair in enumerate(_unpacked(b, load(b, place, WORDS), bits)):
                store(b, at(b, at(b, out, k, 32), 64 * i, 1), pair, 32)
            return []

        counted(b, columns, 32 // bits, [], body)

    return routine(3, emit)


def pair_tile(rows: int, bits: int, asymmetric: bool) -> Any:
    """(x, row, pairs, columns, sums, scales, group row, scale, zero, out): one group of `rows`
    inputs int16 at x, `row` bytes apart, times the pairs of unpack_tile, added to out, float32
    [rows, 16]. sums int32 and scales float32 of the inputs' groups, `group row` bytes apart a row;
    scale float32 and zero int32 [16] of the outputs'."""

    def emit(b: Any, x: Any, row: Any, pairs: Any, columns: Any, sums: Any, scales: Any,
             group_row: Any, scale: Any, zero: Any, out: Any) -> None:  # fmt: skip
        inputs = [b.add(x, b.mul(row, const(r))) for r in range(rows)]
        starts = [_start(b, at(b, sums, b.mul(group_row, const(r)), 1), zero, asymmetric, bits)
                  for r in range(rows)]  # fmt: skip

        def body(k: Any, accumulated: list[Any]) -> list[Any]:
            for i in range(2):
                w = load(b, at(b, at(b, pairs, k, 32), 64 * i, 1), WORDS, 32)
                for r in range(rows):
                    pair = load(b, at(b, at(b, inputs[r], k, 2), 4 * i, 1), I32, 2)
                    product = _pairs(b, splat(b, pair, LANES), w)
                    accumulated[r] = b.add(accumulated[r], product)
            return accumulated

        outs = counted(b, columns, 4, starts, body)
        weight_scale = load(b, scale, FLOAT_LANES)
        for r, done in enumerate(outs):
            place = at(b, out, LANES * r, 4)
            input_scale = at(b, scales, b.mul(group_row, const(r)), 1)
            store(b, place, _added(b, done, weight_scale, input_scale, load(b, place, FLOAT_LANES)))

    return routine(10, emit)


def few_rows_tile(rows: int, bits: int, asymmetric: bool) -> Any:
    """(x, row, words, columns, groups, sums, scales, group row, scale, zero, step, out): all groups
    of `rows` inputs, as pair_tile; out is overwritten. step: bytes from a group's scale, and from
    its zero-points, to the next."""

    def emit(b: Any, x: Any, row: Any, words: Any, columns: Any, groups: Any, sums: Any,
             scales: Any, group_row: Any, scale: Any, zero: Any, step: Any,
             out: Any) -> None:  # fmt: skip
        chains = 2 if rows < 3 else 1

        def group(g: Any, sofar: list[Any]) -> list[Any]:
            first = b.mul(g, columns)
            inputs = [b.add(at(b, x, first, 2), b.mul(row, const(r))) for r in range(rows)]
            base, offset = at(b, words, first, 2 * bits), b.mul(g, step)
            rest = [at(b, at(b, a, g, 4), b.mul(group_row, const(r)), 1)
                    for a in (sums, scales) for r in range(rows)]  # fmt: skip
            starts = [
                _start(b, place, b.add(zero, offset), asymmetric, bits) for place in rest[:rows]
            ]
            starts += [const_vector(I32, LANES, 0)] * (rows * (chains - 1))

            def body(k: Any, accumulated: list[Any]) -> list[Any]:
                place = at(b, base, k, 2 * bits)
                prefetch(b, b.add(place, const(AHEAD)))
                for i, w in enumerate(_unpacked(b, load(b, place, WORDS), bits)):
                    for r in range(rows):
                        pair = load(b, at(b, at(b, inputs[r], k, 2), 4 * i, 1), I32, 2)
                        product = _pairs(b, splat(b, pair, LANES), w)
                        chain = r + rows * (i % chains)
                        accumulated[chain] = b.add(accumulated[chain], product)
                return accumulated

            outs = counted(b, columns, 32 // bits, starts, body)
            if chains == 2:
                outs = [b.add(*both) for both in zip(outs[:rows], outs[rows:], strict=True)]
            weight_scale = load(b, b.add(scale, offset), FLOAT_LANES)
            return [
                _added(b, done, weight_scale, place, before)
                for done, place, before in zip(outs, rest[rows:], sofar, strict=True)
            ]

        zeros = [const_vector(F32, LANES, 0.0)] * rows
        for r, done in enumerate(counted(b, groups, 1, zeros, group)):
            store(b, at(b, out, LANES * r, 4), done)

    return routine(12, emit)


def _wide(b: Any, address: Any, dtype: str, lanes: int) -> Any:
    """`lanes` floats of `dtype` as float32."""
    if dtype == "float32":
        return load(b, address, vector(F32, lanes))
    bits = load(b, address, vector(I16, lanes), 2)
    if dtype == "float16":
        return b.fpext(b.bitcast(bits, vector(ir.HalfType(), lanes)), vector(F32, lanes))
    wide = b.shl(b.zext(bits, vector(I32, lanes)), const_vector(I32, lanes, 16))
    return b.bitcast(wide, vector(F32, lanes))


def size_of(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def dots(rows: int, columns: int, dtype: str) -> Any:
    """(x, row, w, column, length, out, out row): out[r, c] = the product of row r of x, float32,
    `row` bytes apart, with row c of w, `dtype`, `column` bytes apart; length: a multiple of 8;
    columns: 1 or 4. The order of a sum is the same for all numbers of rows and columns."""

    def emit(b: Any, x: Any, row: Any, w: Any, column: Any, length: Any, out: Any,
             out_row: Any) -> None:  # fmt: skip
        inputs = [b.add(x, b.mul(row, const(r))) for r in range(rows)]
        weights = [b.add(w, b.mul(column, const(c))) for c in range(columns)]

        def body(k: Any, sums: list[Any]) -> list[Any]:
            values = [load(b, at(b, place, k, 4), vector(F32, 8)) for place in inputs]
            for c, place in enumerate(weights):
                wide = _wide(b, at(b, place, k, size_of(dtype)), dtype, 8)
                for r in range(rows):
                    sums[r * columns + c] = fma(b, values[r], wide, sums[r * columns + c])
            return sums

        sums = counted(b, length, 8, [const_vector(F32, 8, 0.0)] * (rows * columns), body)
        places = [b.add(out, b.mul(out_row, const(r))) for r in range(rows)]
        if columns == 1:
            for place, done in zip(places, sums, strict=True):
                store(b, place, b.extract_element(totals(b, [done]), ir.Constant(I32, 0)))
            return
        for r in range(0, rows, 2):
            done = totals(b, sums[r * columns : (r + 2) * columns])
            for i, place in enumerate(places[r : r + 2]):
                store(b, place, part(b, done, range(4 * i, 4 * i + 4)))

    return routine(7, emit)


def mixtures(rows: int, lanes: int, dtype: str) -> Any:
    """(p, row, v, token, tokens, out, out row): out[r, 0:lanes] += the sum over tokens of
    p[r, token], float32, `row` bytes apart, times v[token, 0:lanes], `dtype`, `token` bytes
    apart."""

    def emit(b: Any, p: Any, row: Any, v: Any, token: Any, tokens: Any, out: Any,
             out_row: Any) -> None:  # fmt: skip
        shares = [b.add(p, b.mul(row, const(r))) for r in range(rows)]
        places = [b.add(out, b.mul(out_row, const(r))) for r in range(rows)]

        def body(t: Any, sums: list[Any]) -> list[Any]:
            wide = _wide(b, b.add(v, b.mul(t, token)), dtype, lanes)
            for r in range(rows):
                share = splat(b, load(b, at(b, shares[r], t, 4), F32), lanes)
                sums[r] = fma(b, share, wide, sums[r])
            return sums

        starts = [load(b, place, vector(F32, lanes)) for place in places]
        for place, done in zip(places, counted(b, tokens, 1, starts, body), strict=True):
            store(b, place, done)

    return routine(7, emit)


def fetch_line() -> Any:
    """(address): have its line of memory fetched, which is read soon."""
    return routine(1, prefetch)


def shares_of_keys() -> Any:
    """(logits, begin, end, largest, total, factor): logits float32 [16] of keys, of which `begin`
    to `end` are seen, become exp(logit - largest), 0 for others. largest, total: addresses of a
    float32, the largest logit so far and the sum of exponentials, which are brought up to date;
    factor: where what has been summed with them must be multiplied by is put."""

    def emit(b: Any, logits: Any, begin: Any, end: Any, largest: Any, total_at: Any,
             factor: Any) -> None:  # fmt: skip
        lanes = ir.Constant(WORDS, list(range(LANES)))
        low, high = (splat(b, b.trunc(v, I32), LANES) for v in (begin, end))
        seen = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
        values = load(b, logits, FLOAT_LANES)
        unseen = const_vector(F32, LANES, float("-inf"))
        values = b.select(seen, values, unseen)
        before = load(b, largest, F32)
        most = call(b, "llvm.vector.reduce.fmax.v16f32", F32, [values])
        most = b.select(b.fcmp_ordered(">", most, before), most, before)
        exponentials = exp_lanes(b, b.fsub(values, splat(b, most, LANES)))
        exponentials = b.select(seen, exponentials, const_vector(F32, LANES, 0.0))
        store(b, logits, exponentials)
        change = exp_lanes(b, b.fsub(splat(b, before, 8), splat(b, most, 8)))
        same = b.fcmp_ordered("==", before, most)  # also before any key is seen
        scale = b.extract_element(change, ir.Constant(I32, 0))
        scale = b.select(same, ir.Constant(F32, 1.0), scale)
        summed = b.fmul(load(b, total_at, F32), scale)
        store(b, total_at, b.fadd(summed, total(b, exponentials)))
        store(b, largest, most)
        store(b, factor, scale)

    return routine(6, emit)


def exp_lanes(b: Any, x: Any) -> Any:
    """exp of float32 lanes up to 88, to 2e-7 of it, 0 below -87: 2^n by its bits times a polynomial
    of the rest (Cephes' expf); not-a-number stays it."""
    lanes = x.type.count

    def of(value: float) -> Any:
        return const_vector(F32, lanes, value)

    def unary(name: str, *args: Any) -> Any:
        return call(b, f"llvm.{name}.v{lanes}f32", x.type, args)

    bounded = unary("minnum", unary("maxnum", x, of(EXP_LEAST)), of(-EXP_LEAST))
    whole = unary("rint", b.fmul(bounded, of(1.44269504)))
    rest = fma(b, whole, of(-0.693359375), bounded)
    rest = fma(b, whole, of(2.12194440e-4), rest)
    value = of(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        value = fma(b, value, rest, of(term))
    value = b.fadd(fma(b, value, b.fmul(rest, rest), rest), of(1.0))
    bias = const_vector(I32, lanes, 127)
    power = b.shl(b.add(b.fptosi(whole, vector(I32, lanes)), bias), const_vector(I32, lanes, 23))
    result = b.fmul(value, b.bitcast(power, x.type))
    result = b.select(b.fcmp_ordered("<", x, of(EXP_LEAST)), of(0.0), result)
    return b.select(b.fcmp_unordered("uno", x, x), x, result)
