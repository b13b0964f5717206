"""Memory as compiled code sees it: views of addresses, 16-bit floats, and a barrier for threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from .disk import named
from .emit import F32, I16, I32, I64, call, const

SPINS = 2000  # at a barrier before the thread lets others run


def _pointer(kind: Any) -> Any:
    """What makes an address a pointer to `kind`."""

    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def code(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return b.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), code

    return pointer


def _view(kind: Any) -> Any:
    pointer = _pointer(kind)

    @njit(inline="always")
    @named(str(kind))
    def view(address, count):  # type: ignore[no-untyped-def]
        return carray(pointer(address), count)

    return view


floats, int16s, int32s, int64s, bits16 = map(
    _view, (types.float32, types.int16, types.int32, types.int64, types.uint16)
)


def _unary(result: Any, argument: Any, emit: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def function(context: Any, value: Any) -> Any:
        return result(argument), lambda c, b, s, args: emit(b, args[0])

    return function


float_of = _unary(types.float64, types.int64, lambda b, v: b.bitcast(v, ir.DoubleType()))
"""The float64 whose bits are an int64."""

float32_of = _unary(types.float32, types.int32, lambda b, v: b.bitcast(v, F32))
"""The float32 whose bits are an int32."""


def _to_bfloat16(b: Any, value: Any) -> Any:
    """Rounded to the nearest, ties to even; not-a-number stays it."""
    bits = b.bitcast(value, I32)
    odd = b.and_(b.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
    rounded = b.lshr(b.add(b.add(bits, odd), ir.Constant(I32, 0x7FFF)), ir.Constant(I32, 16))
    nan = b.fcmp_unordered("uno", value, value)
    return b.trunc(b.select(nan, ir.Constant(I32, 0x7FC0), rounded), I16)


narrow_of = {
    "bfloat16": _unary(types.uint16, types.float32, _to_bfloat16),
    "float16": _unary(
        types.uint16, types.float32, lambda b, v: b.bitcast(b.fptrunc(v, ir.HalfType()), I16)
    ),
}
"""The bits of the nearest 16-bit float, by its name."""


def copy_narrow(dtype: str) -> Any:
    """(values float32 [n], address): store them as `dtype`."""
    if dtype == "float32":

        @njit(inline="always")
        @named(dtype)
        def copy(values, address):  # type: ignore[no-untyped-def]
            out = floats(address, len(values))
            for i in range(len(values)):
                out[i] = values[i]
    else:
        narrow = narrow_of[dtype]

        @njit(inline="always")
        @named(dtype)
        def copy(values, address):  # type: ignore[no-untyped-def]
            out = bits16(address, len(values))
            for i in range(len(values)):
                out[i] = narrow(values[i])

    return copy


@njit(inline="never")
def keep(array):  # type: ignore[no-untyped-def]
    """Stands behind the last use of an address in `array`: memory is freed after the last line that
    names it."""
    array[0] = 0


def _atomic(emit: Callable[[Any, Any], Any], result: Any) -> Any:
    @intrinsic
    def function(context: Any, address: Any) -> Any:
        def code(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return emit(b, b.inttoptr(args[0], I64.as_pointer()))

        return result(types.int64), code

    return function


_count = _atomic(lambda b, place: b.atomic_rmw("add", place, const(1), "acq_rel"), types.int64)
_seen = _atomic(lambda b, place: b.load_atomic(place, "acquire", 8), types.int64)
_clear = _atomic(lambda b, place: b.atomic_rmw("xchg", place, const(0), "acq_rel"), types.int64)


def _nullary(result: Any, emit: Callable[[Any], Any]) -> Any:
    @intrinsic
    def function(context: Any) -> Any:
        return result(), lambda c, b, s, args: emit(b)

    return function


def _pause_code(b: Any) -> Any:
    call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
    return const(0)


_let_others_run = _nullary(types.int32, lambda b: call(b, "sched_yield", I32, []))
_pause = _nullary(types.int64, _pause_code)


@njit
def wait_for_all(barrier, threads):  # type: ignore[no-untyped-def]
    """Return when all `threads` have come here. barrier: the address of two int64, 64 bytes apart,
    0 at first: how many have come, and how often all have."""
    if threads == 1:
        return
    times = _seen(barrier + 64)
    if _count(barrier) == threads - 1:
        _clear(barrier)
        _count(barrier + 64)
        return
    spins = 0
    while _seen(barrier + 64) == times:
        spins += 1
        if spins < SPINS:
            _pause()
        else:
            _let_others_run()


@njit
def post(job, walker, tape, ops, registers):  # type: ignore[no-untyped-def]
    """Tell who waits for a job: at address `job` five int64, the last of them how many there have
    been; see `next_job`."""
    fields = int64s(job, 4)
    fields[0], fields[1], fields[2], fields[3] = walker, tape, ops, registers
    _count(job + 32)


@njit
def next_job(job, last, spins):  # type: ignore[no-untyped-def]
    """How many jobs there have been when it is no more `last`, or `last` after so many looks."""
    for look in range(spins):
        number = _seen(job + 32)
        if number != last:
            return number
        if look < SPINS:
            _pause()
        else:
            _let_others_run()
    return last
