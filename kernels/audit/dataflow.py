"""Which kernel argument each load of global memory reads, and how many bits at once.

Addresses are followed through the compiler's text, PTX for CUDA and LLVM IR for HIP: a register is
made of the arguments that the registers in its definition are made of, loads excepted. One load in
the text is one instruction that a thread runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class GlobalLoad(NamedTuple):
    """argument: index among the kernel's; bits: read at once by a thread (bulk copies: 128)."""

    argument: int
    bits: int


class _Line(NamedTuple):
    """A definition: `target` from `sources`. A load: `bits` at an address made of `sources`."""

    target: str
    sources: tuple[str, ...]
    bits: int = 0


def ptx_loads(ptx: str) -> list[GlobalLoad]:
    """Loads of global memory in PTX, asynchronous and bulk copies among them."""
    return _follow(_ptx_lines(ptx), r"param_(\d+)$")


def llir_loads(llir: str) -> list[GlobalLoad]:
    """Loads of global memory in LLVM IR for HIP, buffer loads among them."""
    return _follow(_llir_lines(llir), r"^%(\d+)$")


def _follow(lines: Iterator[_Line], argument: str) -> list[GlobalLoad]:
    definitions: dict[str, set[str]] = {}
    loads: list[_Line] = []
    for line in lines:
        if line.bits:
            loads.append(line)
        else:
            definitions.setdefault(line.target, set()).update(line.sources)
    found = []
    for load in loads:
        indices = _arguments(load.sources, definitions, argument)
        assert len(indices) == 1, f"a load reads one argument, not {indices}: {load}"
        found.append(GlobalLoad(indices.pop(), load.bits))
    return found


def _arguments(sources: Iterable[str], definitions: dict[str, set[str]], argument: str) -> set[int]:
    """Indices of the pointer arguments that an address is made of."""
    seen: set[str] = set()
    waiting, indices = list(sources), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in definitions:
            waiting.extend(definitions[name])
        elif (match := re.search(argument, name)) is not None:
            indices.add(int(match[1]))
    return indices


_PTX_WIDTHS = re.compile(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bsuf](\d+)\s+(.*)")


def _ptx_lines(ptx: str) -> Iterator[_Line]:
    """64-bit definitions alone: an address is made of a pointer and offsets, and offsets may come
    from anywhere."""
    for text in ptx.splitlines():
        line = re.sub(r"^@!?%\w+\s+", "", text.strip().rstrip(";"))
        if line.startswith("ld.param.b64") or line.startswith("ld.param.u64"):
            register, parameter = re.findall(r"%\w+|\w*param_\d+", line)[-2:]
            yield _Line(register, (parameter,))
        elif (load := _PTX_WIDTHS.match(line)) is not None:
            address = re.findall(r"\[\s*(%rd\d+)", load[3])
            yield _Line("", tuple(address), int(load[1] or 1) * int(load[2]))
        elif line.startswith("cp.async.bulk.tensor") or line.startswith("cp.async.bulk.shared"):
            yield _Line("", tuple(re.findall(r"\[\s*(%rd\d+)", line)), 128)
        elif line.startswith(("cp.async.ca", "cp.async.cg")):
            size = re.findall(r"\],\s*(0x[0-9a-f]+|\d+)", line)[-1]
            yield _Line("", tuple(re.findall(r"\[\s*(%rd\d+)", line)), 8 * int(size, 0))
        elif made := re.match(r"(?:add|sub|mov|cvta|selp|mad|or|max|min)\S*\s+(%rd\d+),(.*)", line):
            yield _Line(made[1], tuple(re.findall(r"%rd\d+", made[2])))


_LLIR_LOAD = re.compile(r"%[\w.]+ = (?:tail call )?(?:load |)(<?[\w ]+>?)[ ,](.*)")
_TYPE_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64}


def _llir_lines(llir: str) -> Iterator[_Line]:
    for text in llir.splitlines():
        line = text.strip()
        made = re.match(r"(%[\w.]+) = (.*)", line)
        if made is None:
            continue
        rest = re.sub(r", !\w+.*", "", made[2])
        if (load := re.match(r"load (.+?), ptr addrspace\(1\) (%[\w.]+)", rest)) is not None:
            yield _Line("", (load[2],), _type_bits(load[1]))
        elif "raw.ptr.buffer.load" in rest:
            kind = re.match(r"(?:tail )?call (.+?) @", rest)
            assert kind is not None, rest
            address = re.findall(r"ptr addrspace\(8\) (%[\w.]+)", rest)
            yield _Line("", tuple(address), _type_bits(kind[1]))
        elif re.match(r"(getelementptr|phi ptr|select|.*make\.buffer\.rsrc|addrspacecast)", rest):
            yield _Line(made[1], tuple(re.findall(r"ptr(?: addrspace\(\d\))? (%[\w.]+)", rest)
                                       + re.findall(r"\[ (%[\w.]+),", rest)))  # fmt: skip


def _type_bits(kind: str) -> int:
    """Bits of an LLVM type such as "<8 x half>" or "i32"."""
    vector = re.match(r"<(\d+) x (\w+)>", kind)
    count, scalar = (int(vector[1]), vector[2]) if vector else (1, kind)
    return count * (_TYPE_BITS.get(scalar) or int(scalar[1:]))
