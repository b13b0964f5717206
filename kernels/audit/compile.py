"""Compile a recorded launch for a target that is not there, with Triton's own compilers.

The signature is made of the arguments as Triton's launcher would: tensors are pointers aligned to
16 bytes (torch aligns them to more), whole numbers are 32-bit, or 64-bit where they are larger,
marked where 16 divides them, and a constant where they are 1 or None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..triton_ops.launch import Launch, Target

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
_ALIGNED = [["tt.divisibility", 16]]


class Signature(NamedTuple):
    """types, by argument ("constexpr" for what is fixed); constants; attributes of arguments."""

    types: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]


def signature_of(launch: Launch) -> Signature:
    """What Triton would specialize the kernel of `launch` on."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(launch.kernel.arg_names):
        if name in launch.constants:
            types[name], constants[name] = "constexpr", launch.constants[name]
            continue
        value = launch.args[name]
        if value is None or (isinstance(value, int) and value == 1):
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            types[name] = "*" + _TYPES[value.dtype]
            attributes[(index,)] = _ALIGNED
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = _ALIGNED
    return Signature(types, constants, attributes)


def compile_launch(launch: Launch, target: Target) -> Any:
    """Triton's compiled kernel: `asm` (by stage: "ttgir", "llir", "ptx", "cubin", "amdgcn") and
    `metadata` (`shared`: bytes of shared memory). Raises what Triton's compiler does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants, attributes = signature_of(launch)
    source = ASTSource(launch.kernel, types, constants, attributes)
    warp = 64 if target.backend == "hip" else 32
    gpu = GPUTarget(target.backend, target.arch, warp)
    return triton.compile(source, target=gpu, options=launch.warps._asdict())
