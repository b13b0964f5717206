"""Linears whose weights are floats: y = x @ W.T + bias.

oneDNN multiplies from a layout of its own; torch's `linear` reorders a bfloat16 weight into it on
each call, which takes longer than the product until there are some hundred rows. So bfloat16
weights are reordered once. In float32 torch has MKL multiply, which is slower than oneDNN from a
few rows on, even with weights as they are (kernels/float32_linears.py). CPUs without AVX512 have no
instructions for 16-bit floats, and no library a good product of them: more than two rows are
multiplied in float32 there, the weight made wide part by part.

Measured (one thread of a Zen 5 core, weights in the cache, 3072 x 576, microseconds of `linear`
and of these): bfloat16, 1 row 110 and 55, 16 rows 198 and 139, 512 rows 4105 and 3946; float32,
1 row 98 and 99, 4 rows 257 and 222, 16 rows 709 and 367. `torch.mv`, which does without oneDNN,
takes 161 for a row of bfloat16. Two busy Zen 3 cores, weights in memory, bfloat16: 3 rows 1184 and
902, 8 rows 2322 and 1950, 512 rows 172 ms and 32.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiled import decline_compiled, prefers_compiled
from .dispatch import Choice, choose
from .row_tiles import in_row_tiles

FLOAT32_ROWS = 4  # from which oneDNN is faster with weights as they are
WIDE_ROWS = 3  # from which 16-bit floats are multiplied in float32, where there is nothing better
WIDE_WEIGHTS = 1 << 21  # of them made wide at once: 8 MiB


class PlainProblem(NamedTuple):
    """What decides which kernel can run; of the weight and of x. batch_invariant: a row's result
    must have the same bits in every batch. in_features: of the weight."""

    dtype: torch.dtype
    device: str
    batch_invariant: bool = False
    in_features: int = 0


@dataclass(frozen=True)
class PlainKernel:
    """One implementation. `pack(W [out, in])`: the tensor that `run(x, packed, bias)` wants;
    `repacks`: whether that is another than W. `decline(problem)`: None, or why it cannot run.
    `add(x, packed, bias, onto)`: what `run` gives, added to `onto` [..., out] in float32 and
    rounded once; None where that is not one op. `batch_invariant`: whether rows have the same bits
    in every batch as it is."""

    name: str
    decline: Callable[[PlainProblem], str | None]
    pack: Callable[[Tensor], Tensor]
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    repacks: bool = False
    add: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor] | None = None
    batch_invariant: bool = False


def _decline(
    dtype: torch.dtype, supported: Callable[[], bool], why: str
) -> Callable[[PlainProblem], str | None]:
    def decline(problem: PlainProblem) -> str | None:
        if problem.device != "cpu":
            return f"runs on cpu, not {problem.device}"
        if problem.dtype != dtype:
            return f"multiplies {_name(dtype)}, not {_name(problem.dtype)}"
        return None if supported() else why

    return decline


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _has_float16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()


_HAS = {torch.bfloat16: _has_bfloat16, torch.float16: _has_float16}


def has_fast_float32() -> bool:
    """Whether oneDNN's float32 products use wider instructions than MKL's may."""
    return torch.backends.mkldnn.is_available() and _has_avx512()


def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ W.T + bias on a CPU; W float32 as it is, or bfloat16 as `ONEDNN_BF16` packs it."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    count = x.numel() // x.shape[-1]
    if (more := _padded_rows(count)) == count:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    rows = F.pad(x.reshape(count, -1), (0, 0, 0, more - count))
    y = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")[:count]
    return y.view(*x.shape[:-1], -1)


def _padded_rows(count: int) -> int:
    """At least `count`: four numbers between two powers of two. oneDNN keeps code of half a MB for
    each number of rows and weight's shape that it has met, up to 1024 of them."""
    step = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // step) * step


def onednn_add(x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor) -> Tensor:
    """onto + `onednn_linear`."""
    count = x.numel() // x.shape[-1]
    if _padded_rows(count) != count:
        return onto + onednn_linear(x, weight, bias)
    return (
        torch.ops.mkldnn._linear_pointwise.binary(x, onto, weight, bias, "add") if count else onto
    )


def _float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.numel() < FLOAT32_ROWS * x.shape[-1]:
        return F.linear(x, weight, bias)
    return onednn_linear(x, weight, bias)


def product_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """In which products of `dtype` are computed: float32 for 16-bit floats on a CPU that has no
    instructions for them, itself otherwise."""
    if device != "cpu" or dtype not in _HAS:
        return dtype
    return dtype if _HAS[dtype]() else torch.float32


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` in the weight's dtype, [..., out] in x's."""
    bias = None if bias is None else bias.to(weight.dtype)
    return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)


def _by_parts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`wide_linear` in float32 of a weight of 16-bit floats, few rows of it made wide at a time, in
    memory that is kept: new pages would take longer than the product."""
    rows, columns = weight.shape
    if x.numel() < WIDE_ROWS * columns:
        return F.linear(x, weight, bias)
    step = max(1, WIDE_WEIGHTS // columns)
    most = min(step, rows) * columns
    if _kept.memory.numel() < most:
        with torch.inference_mode(False):
            _kept.memory = torch.empty(most)
    product = onednn_linear if has_fast_float32() else F.linear
    wide_x, parts = x.float(), []
    for start in range(0, rows, step):
        part = weight[start : start + step]
        wide = _kept.memory[: part.numel()].view(part.shape).copy_(part)
        parts.append(product(wide_x, wide, None))
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return (y if bias is None else y.add_(bias)).to(x.dtype)


class _Kept(threading.local):
    """A thread's memory for what is made wide."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)


_kept = _Kept()


def _decline_compiled(problem: PlainProblem) -> str | None:
    if problem.device != "cpu":
        return f"runs on cpu, not {problem.device}"
    if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"multiplies floats of 16 and 32 bits, not {_name(problem.dtype)}"
    if problem.in_features == 0 or problem.in_features % 8:
        return f"takes a multiple of 8 inputs, not {problem.in_features}"
    if not prefers_compiled():
        return decline_compiled() or "is not for a CPU with AVX512"
    return None


def _compiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from .tape.program import run_floats

    rows = x.reshape(-1, x.shape[-1]).float().contiguous()
    y = run_floats(rows, weight, None if bias is None else bias.float().contiguous())
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _decline_wide(problem: PlainProblem) -> str | None:
    if product_dtype(problem.dtype, problem.device) != problem.dtype:
        return None
    return f"is for 16-bit floats on a CPU that has no products of them, not {_name(problem.dtype)}"


ONEDNN_BF16 = PlainKernel(
    "onednn_bf16",
    _decline(torch.bfloat16, _has_bfloat16, "needs oneDNN and a CPU with AVX512"),
    _reorder,
    onednn_linear,
    repacks=True,
    add=onednn_add,
)
ONEDNN_FLOAT32 = PlainKernel(
    "onednn_float32",
    _decline(torch.float32, has_fast_float32, "needs oneDNN and a CPU with AVX512"),
    lambda weight: weight,
    _float32,
)
COMPILED = PlainKernel(
    "compiled", _decline_compiled, lambda weight: weight.contiguous(), _compiled,
    batch_invariant=True,
)  # fmt: skip
WIDE = PlainKernel("in_float32", _decline_wide, lambda weight: weight, _by_parts)
TORCH = PlainKernel("torch", lambda problem: None, lambda weight: weight, F.linear)

PLAIN_KERNELS = (ONEDNN_BF16, ONEDNN_FLOAT32, COMPILED, WIDE, TORCH)


@functools.cache
def choose_plain(problem: PlainProblem) -> Choice[PlainKernel]:
    """The kernel that runs `problem`, best first; torch's runs everything."""
    choice = choose("plain_linear", PLAIN_KERNELS, problem)
    if not problem.batch_invariant or choice.candidate.batch_invariant:
        return choice
    run = choice.candidate.run

    def in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return in_row_tiles(lambda tile: run(tile, weight, bias), x)

    return replace(choice, candidate=replace(choice.candidate, run=in_tiles, add=None))
