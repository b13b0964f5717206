# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Grouped products with packed weights: pairs of token and expert, sorted by expert, a tile of them
with their expert's weight (wna16_tile.py). kernels/moe_ops.py says what is computed.

Sorting is a few torch operations without a look at the counts: there is room for one cut tile for
each expert, and tiles that stay empty return at once. A row's bits depend on its token alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..moe_ops import pair_rows
from ..wna16_layout import RUN, WNA16Format, decline_groups, tile_columns, tile_planes
from .checks import check_tensor
from .launch import Warps, launch, launch_backend
from .shim import jit, tl
from .wna16_tile import group_values, multiply_tile

OP = "moe_gemm"


class ExpertTiles(NamedTuple):
    """block_m: pairs of a program, 16 or more. block_n: rows of the weight."""

    block_m: int
    block_n: int
    warps: Warps


class Sorted(NamedTuple):
    """pairs: int32 [tiles * block_m], pairs by expert, -1 for none. experts: int32 [tiles]."""

    pairs: Tensor
    experts: Tensor


SMALL_TILES = ExpertTiles(16, 64, Warps(4, 3))
"""While experts get few pairs each; the only ones where no batch may change a bit."""


def default_tiles(pairs: int, experts: int) -> ExpertTiles:
    """The shipped configuration for so many pairs."""
    return SMALL_TILES if pairs <= 16 * experts else SMALL_TILES._replace(block_m=64)


def sort_pairs(expert_ids: Tensor, experts: int, block_m: int) -> Sorted:
    """Pairs (int64 [tokens, top_k] flattened) in tiles that hold those of one expert."""
    flat = expert_ids.flatten()
    tiles = min(len(flat), -(-len(flat) // block_m) + experts)
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    tile_ends = (-(-counts // block_m)).cumsum(0)
    first = counts.cumsum(0) - counts  # of each expert, among sorted pairs
    start = (tile_ends - (-(-counts // block_m))) * block_m  # of each expert, among places
    expert = flat[order]
    place = start[expert] + torch.arange(len(flat), device=flat.device) - first[expert]
    pairs = torch.full((tiles * block_m,), -1, dtype=torch.int32, device=flat.device)
    pairs[place] = order.to(torch.int32)
    tile = torch.arange(tiles, device=flat.device)
    of_tile = torch.searchsorted(tile_ends, tile, right=True).clamp_(max=experts - 1)
    return Sorted(pairs, of_tile.to(torch.int32))


@jit
def moe_kernel(
    x_ptr, words_ptr, scale_ptr, pair_ptr, expert_ptr, out_ptr, N, K, tiles, x_row, words_expert,
    scale_expert,
    SHARED: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, PLANES: tl.constexpr,
    GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr, WHOLE_TILES: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of the weight's rows, tiles of pairs. SHARED: pairs that share a row of x."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    pair = tl.load(pair_ptr + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))
    on_m = pair >= 0
    if tl.max(pair, 0) < 0:
        return
    expert = tl.load(expert_ptr + tl.program_id(1)).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, 32)
    on_n = n < N
    token = tl.where(on_m, pair, 0).to(tl.int64) // SHARED
    x_at = x_ptr + token[:, None] * x_row + i[None, :]
    word_at = words_ptr + expert * words_expert + n[:, None] * 32 + i[None, :]
    scale_ptr += expert * scale_expert
    words_in_tile = tl.cast(N, tl.int64) * (PLANES * 32)
    row_scale, row_zero = group_values(  # of a row with one scale, else not read
        scale_ptr + n, on_n & (GROUP == 0), DTYPE, BITS, ASYMMETRIC, BLOCK_N
    )
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(0, tiles):
        acc = multiply_tile(
            acc, tile, x_at, word_at + tile * words_in_tile, scale_ptr + n, row_zero, on_m, on_n, N,
            K, BITS, TILE, GROUP, ASYMMETRIC, WHOLE_TILES, ASM, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if GROUP == 0:
        acc *= row_scale[:, None]
    out = out_ptr + pair.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=on_n[:, None] & on_m[None, :])


def moe_gemm(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    expert_ids: Tensor,
    fmt: WNA16Format,
    tiles: ExpertTiles | None = None,
) -> Tensor:
    """`moe_gemm_reference` for x float16 or bfloat16, rows at any stride; words, scale: those of
    `pack_experts`. ValueError, naming it, for a tensor that does not fit."""
    check_tensor(OP, "x", x, (None, None), (torch.float16, torch.bfloat16))
    check_tensor(OP, "expert_ids", expert_ids, (None, None), (torch.int64,), x.device)
    shared, columns = pair_rows(x, expert_ids), x.shape[1]
    reason = decline_groups(fmt.num_bits, fmt.group_size)
    if reason is not None:
        raise ValueError(f"{OP}: {reason}")
    tile, planes = tile_columns(fmt.num_bits), tile_planes(fmt.num_bits)
    depth = -(-columns // tile)
    experts, n = (words.shape[0], words.shape[3]) if words.dim() == 5 else (-1, -1)
    check_tensor(
        OP, "words", words, (experts, depth, planes, n, RUN), (torch.int16,), x.device, True
    )
    groups = -(-depth * tile // fmt.group_size) if fmt.group_size else 1
    check_tensor(OP, "scale", scale, (experts, groups, n), (torch.int32,), x.device, True)
    tiles = tiles or default_tiles(expert_ids.numel(), experts)
    order = sort_pairs(expert_ids, experts, tiles.block_m)
    out = x.new_empty(expert_ids.numel(), n)
    args = {
        "x_ptr": x, "words_ptr": words, "scale_ptr": scale, "pair_ptr": order.pairs,
        "expert_ptr": order.experts, "out_ptr": out, "N": n, "K": columns, "tiles": depth,
        "x_row": x.stride(0), "words_expert": words.stride(0), "scale_expert": scale.stride(0),
    }  # fmt: skip
    constants = {
        "SHARED": shared, "BITS": fmt.num_bits, "TILE": tile, "PLANES": planes,
        "GROUP": fmt.group_size, "ASYMMETRIC": fmt.asymmetric,
        "WHOLE_TILES": columns % tile == 0, "ASM": launch_backend() == "cuda",
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
    }  # fmt: skip
    grid = (-(-n // tiles.block_n), len(order.experts))
    launch(moe_kernel, grid, args, constants, tiles.warps)
    return out
