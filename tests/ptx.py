"""A few PTX instructions, as their manual defines them: what inline assembly does, without a GPU.

Registers hold 32 bits, or 16 where a vector of two names them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

BOTH = 0xFFFFFFFF


def run(assembly: str, outputs: int, inputs: Sequence[int]) -> list[int]:
    """The values of $0 .. $(outputs - 1), given those of the operands after them."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    text = assembly.strip()
    text = text[1:-1] if text.startswith("{") else text
    for statement in (part.strip() for part in text.split(";")):
        if statement and not statement.startswith(".reg"):
            _step(statement, registers)
    return [registers[f"${i}"] for i in range(outputs)]


def _step(statement: str, registers: dict[str, int]) -> None:
    name, _, rest = statement.partition(" ")
    if name == "mov.b32" and "{" in rest:
        _unpack_pair(rest, registers)
        return
    target, *sources = (part.strip() for part in rest.split(","))
    registers[target] = _OPS[name](*(_value(s, registers) for s in sources)) & BOTH


def _unpack_pair(rest: str, registers: dict[str, int]) -> None:
    found = re.fullmatch(r"\{(\S+), (\S+)\}, (\S+)", rest.strip())
    assert found is not None, rest
    whole = registers[found[3]]
    registers[found[1]], registers[found[2]] = whole & 0xFFFF, whole >> 16


def _value(source: str, registers: dict[str, int]) -> int:
    return registers[source] if source in registers else int(source, 0)


def _permute(a: int, b: int, selector: int) -> int:
    """A nibble of the selector picks one of eight bytes; its high bit asks for the byte's sign."""
    eight = a | b << 32
    made = 0
    for i in range(4):
        pick = selector >> 4 * i & 0xF
        byte = eight >> 8 * (pick & 7) & 0xFF
        byte = (0xFF if byte & 0x80 else 0) if pick & 8 else byte
        made |= byte << 8 * i
    return made


def _lookup(a: int, b: int, c: int, table: int) -> int:
    return sum(
        (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i
        for i in range(32)
    )


def halves(register: int, dtype: torch.dtype) -> list[float]:
    """The two floats in a register, the low one first."""
    parts = [register & 0xFFFF, register >> 16]
    signed = [part - (1 << 16) if part >> 15 else part for part in parts]
    return torch.tensor(signed, dtype=torch.int16).view(dtype).double().tolist()


def _register(values: Sequence[float], dtype: torch.dtype) -> int:
    low, high = torch.tensor(values, dtype=torch.float64).to(dtype).view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def _floats(dtype: torch.dtype, function: Callable[..., float]) -> Callable[..., int]:
    def run(*registers: int) -> int:
        columns = zip(*(halves(r, dtype) for r in registers), strict=True)
        return _register([function(*column) for column in columns], dtype)

    return run


def _from_e4m3(pair: int) -> int:
    codes = torch.tensor([pair & 0xFF, pair >> 8 & 0xFF], dtype=torch.uint8)
    return _register(codes.view(torch.float8_e4m3fn).double().tolist(), torch.float16)


_OPS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "prmt.b32": _permute,
    "lop3.b32": _lookup,
    "sub.rn.f16x2": _floats(torch.float16, lambda a, b: a - b),
    "fma.rn.bf16x2": _floats(torch.bfloat16, lambda a, b, c: a * b + c),
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
}
