"""LLVM IR by hand: what the tiles are made of. Addresses are 64-bit integers, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(n) for n in (8, 16, 32, 64))
Emitter = Callable[..., None]


def vector(element: Any, lanes: int) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def const(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def const_vector(element: Any, lanes: int, value: float) -> ir.Constant:
    return ir.Constant(vector(element, lanes), [value] * lanes)


def at(b: Any, address: Any, index: Any, size: int) -> Any:
    """The address of element `index`, a number or a value, of `size` bytes each."""
    if isinstance(index, int):
        return b.add(address, const(index * size)) if index else address
    return b.add(address, b.mul(index, const(size)))


def load(b: Any, address: Any, kind: Any, align: int = 4) -> Any:
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(b: Any, address: Any, value: Any, align: int = 4) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = align


def splat(b: Any, value: Any, lanes: int) -> Any:
    """A vector of `lanes` times `value`."""
    kind = vector(value.type, lanes)
    none = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(none, value, ir.Constant(I32, 0))
    return b.shuffle_vector(first, none, const_vector(I32, lanes, 0))


def part(b: Any, value: Any, lanes: Sequence[int]) -> Any:
    """Some lanes of a vector."""
    none = ir.Constant(value.type, ir.Undefined)
    return b.shuffle_vector(value, none, ir.Constant(vector(I32, len(lanes)), list(lanes)))


def joined(b: Any, first: Any, second: Any) -> Any:
    lanes = list(range(2 * first.type.count))
    return b.shuffle_vector(first, second, ir.Constant(vector(I32, len(lanes)), lanes))


def call(b: Any, name: str, result: Any, args: Sequence[Any]) -> Any:
    """The intrinsic or C function `name`."""
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of vectors of float32."""
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])


def prefetch(b: Any, address: Any) -> None:
    """Ask for a line of memory; the address may be beyond what there is."""
    place = b.inttoptr(address, I8.as_pointer())
    numbers = [ir.Constant(I32, n) for n in (0, 3, 1)]  # to read, into L2, of data
    call(b, "llvm.prefetch.p0", ir.VoidType(), [place, *numbers])


def total(b: Any, value: Any) -> Any:
    """The sum of a vector's lanes, in pairs: always in the same order."""
    while value.type.count > 1:
        half = value.type.count // 2
        low, high = (part(b, value, range(i, i + half)) for i in (0, half))
        value = b.fadd(low, high)
    return b.extract_element(value, ir.Constant(I32, 0))


def totals(b: Any, values: Sequence[Any]) -> Any:
    """A vector of the sums of up to 8 vectors of 8 float32, each of neighbours, then of pairs of
    them, then of halves (`vhaddps` twice): lane i is that of vector i."""
    kind = values[0].type
    level = [*values, *[ir.Constant(kind, [0.0] * 8)] * (8 - len(values))]

    def both(first: Any, second: Any, lanes: Sequence[int]) -> Any:
        return b.shuffle_vector(first, second, ir.Constant(vector(I32, 8), lanes))

    even, odd = (0, 2, 8, 10, 4, 6, 12, 14), (1, 3, 9, 11, 5, 7, 13, 15)
    for _ in range(2):
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [b.fadd(both(x, y, even), both(x, y, odd)) for x, y in pairs]
    first, second = level
    halves = [[*lanes, *(8 + lane for lane in lanes)] for lanes in (range(4), range(4, 8))]
    return b.fadd(*(both(first, second, lanes) for lanes in halves))


def counted(
    b: Any, end: Any, step: int, carried: Sequence[Any],
    body: Callable[[Any, list[Any]], Sequence[Any]],
) -> list[Any]:  # fmt: skip
    """for i in range(0, end, step): carried = body(i, carried); what is carried in the end."""
    before, function = b.block, b.function
    head, after = (function.append_basic_block(name) for name in ("loop", "after"))
    b.cbranch(b.icmp_signed("<", const(0), end), head, after)
    b.position_at_end(head)
    index, values = b.phi(I64), [b.phi(value.type) for value in carried]
    outs = list(body(index, list(values)))
    following, last = b.add(index, const(step)), b.block
    b.cbranch(b.icmp_signed("<", following, end), head, after)
    for phi, first, again in zip([index, *values], [const(0), *carried], [following, *outs],
                                 strict=True):  # fmt: skip
        phi.add_incoming(first, before)
        phi.add_incoming(again, last)
    b.position_at_end(after)
    results = []
    for first, out in zip(carried, outs, strict=True):
        phi = b.phi(first.type)
        phi.add_incoming(first, before)
        phi.add_incoming(out, last)
        results.append(phi)
    return results


def routine(count: int, emit: Emitter) -> Any:
    """What compiled code calls with a tuple of `count` integers: emit(b, *integers) is its code."""

    def signature(context: Any, args: Any) -> Any:
        def code(context: Any, b: Any, signature: Any, values: Sequence[Any]) -> Any:
            emit(b, *(b.extract_value(values[0], i) for i in range(count)))
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, count)), code

    return intrinsic(signature)
