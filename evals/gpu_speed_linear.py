"""Speed of the packed linears on a GPU against torch's bfloat16 product, at layers' real shapes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ..kernels.activations import ActivationFormat
from ..kernels.elements import E4M3, int_elements
from ..kernels.linear_ops import LinearProblem, choose_linear
from .gpu_operands import packed_bytes, random_operands
from .gpu_speed import Speed, each
from .gpu_timer import copies_needed, seconds

SHAPES = {
    "8B qkv_proj": (6144, 4096),
    "8B o_proj": (4096, 4096),
    "8B gate_up_proj": (28672, 4096),
    "8B down_proj": (4096, 14336),
    "70B qkv_proj": (10240, 8192),
    "70B o_proj": (8192, 8192),
    "70B gate_up_proj": (57344, 8192),
    "70B down_proj": (8192, 28672),
}
W4A16_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
A8_ROWS = (16, 64, 256, 1024, 4096, 8192)
ROWS = {"W4A16": W4A16_ROWS, "FP8": A8_ROWS, "W8A8": A8_ROWS}  # tokens, by scheme
_INT8, _FP8 = ActivationFormat(int_elements(8)), ActivationFormat(E4M3)


def _problem(scheme: str, out_features: int, in_features: int) -> LinearProblem:
    plain = LinearProblem(
        8, in_features, True, in_features, out_features, torch.bfloat16, "cuda"
    )  # fmt: skip
    return {
        "W4A16": plain._replace(num_bits=4, group_size=128),
        "W8A8": plain._replace(activation=_INT8),
        "FP8": plain._replace(kind="float", activation=_FP8),
        "W4A8": plain._replace(num_bits=4, group_size=128, activation=_INT8),
    }[scheme]


def names() -> list[str]:
    """What `warm` and `speeds` take: a scheme and a layer, the most telling first."""
    return [f"{scheme} {layer}" for scheme in ROWS for layer in SHAPES]


def _asked(name: str) -> tuple[str, LinearProblem]:
    scheme, _, layer = name.partition(" ")
    return scheme, _problem(scheme, *SHAPES[layer])


def warm(name: str) -> None:
    """Have compiled what `speeds(name)` runs."""
    scheme, p = _asked(name)
    kernel = choose_linear(p).candidate
    weight = kernel.pack(random_operands(p), p)
    for rows in ROWS[scheme]:
        kernel.run(torch.randn(rows, p.in_features, device="cuda", dtype=p.dtype), weight, None, p)


def speeds(name: str) -> Iterator[Speed]:
    """The rows of the table for one of `names()`, by the number of tokens."""
    scheme, p = _asked(name)
    kernel = choose_linear(p).candidate
    packed = [kernel.pack(random_operands(p), p) for _ in range(copies_needed(packed_bytes(p)))]
    dense_bytes = 2 * p.out_features * p.in_features
    dense = [
        torch.randn(p.out_features, p.in_features, device="cuda", dtype=p.dtype)
        for _ in range(copies_needed(dense_bytes))
    ]

    def measure(rows: int) -> Speed:
        x = torch.randn(rows, p.in_features, device="cuda", dtype=p.dtype)
        ours = seconds([lambda x=x, t=t: kernel.run(x, t, None, p) for t in packed])
        theirs = seconds([lambda x=x, w=w: F.linear(x, w) for w in dense])
        moved = sum(t.nbytes for t in packed[0]) + x.nbytes + 2 * rows * p.out_features
        operations = 2 * rows * p.out_features * p.in_features
        return Speed(
            name, rows, kernel.name, ours, theirs, moved, operations, _bar(scheme, rows),
            0.8 if scheme == "W4A16" and rows <= 16 else 0.0,
        )  # fmt: skip

    yield from each(ROWS[scheme], measure)


def _bar(scheme: str, rows: int) -> float:
    """How many times as fast as bfloat16 it must be."""
    if scheme == "W4A16":
        return 3.0 if rows <= 16 else 2.0 if rows <= 32 else 1.0
    return 1.6 if rows >= 1024 else 0.0
