# pyright: reportAssignmentType=false
"""Latent attention in Triton: kernels/mla_ops.py says what is computed.

A program takes a tile of rows (heads of the new tokens of one sequence) over SPLIT entries, and the
parts are added up after, as in paged_attention.py and with the same guarantee: a row's bits depend
on nothing but its own sequence. The latent part of an entry is read once and used twice, as key and
as value. Scales of entries go where those of paged attention's keys and values go.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..attention_ops import AttentionOutput, PagedBatch
from ..paged_kv import BlockPool
from .attention_combine import combine
from .attention_device import LOG2E, fit_rows, load_rows, load_tile, unpack_tile
from .checks import check_tensor
from .device_math import dot
from .kv_codes import SMALLEST_SCALE, fp8_factor
from .launch import Warps, launch, launch_arch, launch_backend
from .paged_attention import check_batch, check_pool, scales_of, words_of
from .shim import jit, tl
from .tiles import padded

OP = "mla_decode"
DTYPES = (torch.float16, torch.bfloat16)


class LatentTiles(NamedTuple):
    """block_m: rows of a program, a power of two from 16 on. block_n: entries at a time. split:
    entries of a program."""

    block_m: int
    block_n: int
    split: int
    warps: Warps


def default_tiles(heads: int, packed: bool, device: torch.device) -> LatentTiles:
    """The shipped configuration for `device`: the largest tiles that keep within registers. packed:
    entries are 8-bit codes."""
    on_hip = launch_backend() == "hip"
    if packed and not on_hip:
        return LatentTiles(16, 16, 512, Warps(8, 1))
    if heads <= 16 or on_hip:
        return LatentTiles(16, 32, 512, Warps(4, 1 if packed else 2))
    has_wide_products = launch_arch(device) in (90, 100)
    return LatentTiles(64 if has_wide_products else 32, 32, 512, Warps(8, 2))


@jit
def mla_kernel(
    q_ptr, code_ptr, scale_ptr, static_ptr, table_ptr, context_ptr, cu_ptr, out_ptr, lse_ptr,
    heads, splits, row_tiles, scale, q_token, q_head, block_stride, slot_stride, scale_block,
    scale_slot, table_seq,
    RANK: tl.constexpr, ROTATED: tl.constexpr, RANK_PAD: tl.constexpr, ROTATED_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    UNIT: tl.constexpr, BITS: tl.constexpr, IS_FP8: tl.constexpr, SCALES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Grid: sequences x tiles of rows, splits. SCALES: "none", "static" or "token"."""
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    HOLD: tl.constexpr = BITS < 16  # as the attention kernel does
    DTYPE: tl.constexpr = tl.float16 if HOLD else dtype
    ROW: tl.constexpr = RANK // 4 if HOLD else RANK  # words of codes, or floats
    ROTATED_ROW: tl.constexpr = ROTATED // 4 if HOLD else ROTATED
    ROW_PAD: tl.constexpr = RANK_PAD // 4 if HOLD else RANK_PAD
    ROTATED_ROW_PAD: tl.constexpr = ROTATED_PAD // 4 if HOLD else ROTATED_PAD
    seq, split = tl.program_id(0) // row_tiles, tl.program_id(1)
    first = tl.load(cu_ptr + seq)
    tokens = tl.load(cu_ptr + seq + 1) - first
    row = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // heads, row % heads
    valid = token < tokens
    context = tl.load(context_ptr + seq)
    position = context - tokens + token
    q_row = (first + token).to(tl.int64)
    q_at = q_row * q_token + head * q_head
    q_latent = load_rows(q_ptr, q_at, valid, 1, RANK, RANK_PAD)[0]
    q_rotated = load_rows(q_ptr, q_at + RANK, valid, 1, ROTATED, ROTATED_PAD)[0]
    q_latent, q_rotated, q_unit = fit_rows(q_latent, q_rotated, 2, DTYPE)
    factor = fp8_factor(ASM, DTYPE) if IS_FP8 else 1.0
    if SCALES == "static":
        factor *= tl.load(static_ptr)
    q_unit *= scale * factor * LOG2E

    start = split * SPLIT
    end = tl.minimum(context, start + SPLIT)
    table_ptr += seq.to(tl.int64) * table_seq
    latent_pool = (code_ptr, scale_ptr, scale_ptr, 0, block_stride, slot_stride, scale_block,
                   scale_slot)  # fmt: skip
    rotated_pool = (code_ptr + ROW, scale_ptr, scale_ptr, 0, block_stride, slot_stride, 0, 0)
    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, RANK_PAD), tl.float32)
    if HOLD:
        key = start + tl.arange(0, BLOCK_N)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
        latent_next, entry_next, no_offset = load_tile(
            latent_pool, block, key, key < end, UNIT, BLOCK_SIZE, SCALES, False, ROW, ROW_PAD
        )
        rotated_next, no_scale, no_offset = load_tile(
            rotated_pool, block, key, key < end, UNIT, BLOCK_SIZE, "none", False, ROTATED_ROW,
            ROTATED_ROW_PAD,
        )  # fmt: skip
        key += BLOCK_N
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
    for begin in range(start, end, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        if HOLD:
            latent, entry, rotated = latent_next, entry_next, rotated_next
            ahead = key + BLOCK_N
        else:
            ahead = key
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
        latent_next, entry_next, no_offset = load_tile(
            latent_pool, block, ahead, ahead < end, UNIT, BLOCK_SIZE, SCALES, False, ROW, ROW_PAD
        )
        rotated_next, no_scale, no_offset = load_tile(
            rotated_pool, block, ahead, ahead < end, UNIT, BLOCK_SIZE, "none", False, ROTATED_ROW,
            ROTATED_ROW_PAD,
        )  # fmt: skip
        if HOLD:
            ahead += BLOCK_N
            block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        else:
            latent, entry, rotated = latent_next, entry_next, rotated_next
        latent = unpack_tile(latent, latent_pool, key, key, key < end, DTYPE, BLOCK_SIZE, BITS,
                             IS_FP8, SCALES, 1, False, RANK, RANK_PAD, ASM)[0]  # fmt: skip
        rotated = unpack_tile(rotated, rotated_pool, key, key, key < end, DTYPE, BLOCK_SIZE, BITS,
                              IS_FP8, SCALES, 1, False, ROTATED, ROTATED_PAD, ASM)[0]  # fmt: skip
        s = dot(q_latent, tl.trans(latent), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        s = dot(q_rotated, tl.trans(rotated), s) * q_unit[:, None]
        if SCALES == "token":
            unit = tl.maximum(entry.to(tl.float32), SMALLEST_SCALE)
            s = s * unit[None, :] + tl.log2(unit)[None, :]
        s = tl.where(key[None, :] <= position[:, None], s, -float("inf"))
        higher = tl.maximum(peak, tl.max(s, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(s - shift[:, None])
        fade = tl.exp2(peak - shift)
        peak = higher
        weight = p
        if SCALES == "token":
            weight = p * (1.0 / unit)[None, :]
        total = total * fade + tl.sum(weight, 1)
        acc = dot(p.to(DTYPE), latent, acc * fade[:, None])

    empty = total == 0
    share = factor / tl.where(empty, 1.0, total)
    lse = tl.where(empty, -float("inf"), peak + tl.log2(tl.where(empty, 1.0, total)))
    out_row = (q_row * heads + head) * splits + split
    tl.store(lse_ptr + out_row, lse, mask=valid)
    channel = tl.arange(0, RANK_PAD)
    mask = (valid & ~empty)[:, None] & (channel < RANK)[None, :]
    tl.store(
        out_ptr + (out_row * RANK)[:, None] + channel[None, :], acc * share[:, None], mask=mask
    )


def mla_decode(
    q: Tensor,
    cache: BlockPool,
    rank: int,
    batch: PagedBatch,
    scale: float,
    tiles: LatentTiles | None = None,
) -> AttentionOutput:
    """`mla_decode_reference` for q float16 or bfloat16, any strides but that of its last axis.

    ValueError, naming it, for a tensor that does not fit.
    """
    check_latent(q, cache, rank, batch)
    tokens, heads, width = q.shape
    tiles = tiles or default_tiles(heads, cache.fmt is not None, q.device)
    splits = max(1, -(-batch.max_context_len // tiles.split))
    parts = torch.empty(tokens, heads, splits, rank, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(tokens, heads, splits, dtype=torch.float32, device=q.device)
    row_tiles = -(-batch.max_query_len * heads // tiles.block_m)
    fmt = cache.fmt
    held, unit = words_of(cache)
    codes = [step // unit for step in held.stride()]
    scales = cache.scale.stride() if cache.scale is not None else (0,) * 4
    args = {
        "q_ptr": q,
        "code_ptr": held,
        "scale_ptr": cache.scale,
        "static_ptr": cache.static_scale,
        "table_ptr": batch.block_tables,
        "context_ptr": batch.context_lens,
        "cu_ptr": batch.cu_seqlens_q,
        "out_ptr": parts,
        "lse_ptr": part_lse,
        "heads": heads,
        "splits": splits,
        "row_tiles": row_tiles,
        "scale": scale,
        "q_token": q.stride(0),
        "q_head": q.stride(1),
        "block_stride": codes[0],
        "slot_stride": codes[2],
        "scale_block": scales[0],
        "scale_slot": scales[2],
        "table_seq": batch.block_tables.stride(0),
    }
    constants = {
        "RANK": rank,
        "ROTATED": width - rank,
        "RANK_PAD": padded(max(16, rank)),
        "ROTATED_PAD": padded(max(16, width - rank)),
        "BLOCK_SIZE": cache.block_size,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "SPLIT": tiles.split,
        "UNIT": unit,
        "BITS": 16 if fmt is None else 8,
        "IS_FP8": fmt is not None and fmt.kind == "float",
        "SCALES": scales_of(fmt, width),
        "ASM": launch_arch(q.device) if launch_backend() == "cuda" else 0,
    }
    grid = (len(batch.context_lens) * row_tiles, splits)
    launch(mla_kernel, grid, args, constants, tiles.warps)
    out = torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    combine(parts, part_lse, None, out, lse, 1)
    return AttentionOutput(out, lse)


def check_latent(q: Tensor, cache: BlockPool, rank: int, batch: PagedBatch) -> None:
    """ValueError, naming what does not fit."""
    check_pool(OP, "cache", cache, q.dtype, q.device)
    if cache.kv_heads != 1:
        raise ValueError(f"{OP}: cache has {cache.kv_heads} heads, not 1")
    check_tensor(OP, "q", q, (None, None, cache.head_dim), DTYPES)
    if not 0 < rank < cache.head_dim:
        raise ValueError(f"{OP}: rank is {rank}, entries are of {cache.head_dim}")
    check_batch(OP, batch, cache.block_size, q.device)
