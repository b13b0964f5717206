"""Paged attention in Triton; kernels/attention_ops.py says what is computed.

Two forms of one kernel (paged_attention_kernel.py):

- "whole": a program goes through all keys of its rows. For prefill, whose tokens fill the device.
- "split": a program takes SPLIT keys, and the parts are added up after. For decode. The size of a
  split and the tiles within it are fixed, and a tile that a row does not see changes nothing in
  it: a row's result is bitwise the same whatever else is in the batch, and however many tokens of
  its sequence are computed at once.

Left to itself the launcher splits where one tile of rows holds a sequence's new tokens; a runtime
that wants the same bits for every batch asks for "split" always.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..attention_ops import AttentionOptions, AttentionOutput, PagedBatch
from ..kv_quant import KVFormat, rotate_heads
from ..paged_kv import BlockPool, PoolForm
from .attention_combine import combine
from .checks import check_tensor
from .launch import Warps, launch, launch_arch, launch_backend
from .paged_attention_kernel import attention_kernel
from .tiles import padded

Form = Literal["whole", "split"]
OP = "paged_attention"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_ROWS = 128


class AttentionTiles(NamedTuple):
    """block_m: rows of a program, a power of two from 16 on. block_n: keys at a time. split: keys
    of a program, a multiple of block_n; 0 for all."""

    block_m: int
    block_n: int
    split: int
    warps: Warps


def default_tiles(
    form: Form, keys: PoolForm, values: PoolForm, heads: int, arch: int | str = 0
) -> AttentionTiles:
    """The shipped configuration for `heads` query heads on `arch` (`launch_arch`). What is
    dequantized before the product takes registers, of which more warps have more on CUDA, fewer on
    gfx942; so do both operands before Hopper, which multiplies out of shared memory. Scales of
    groups take the most: 2 warps then load 16 bytes a thread of 16 keys, without a spill."""
    rows = max(16, padded(heads // keys.kv_heads))
    wide = max(keys.head_dim, values.head_dim) > 128
    by_group = any(scales_of(p.fmt, p.head_dim) == "group" for p in (keys, values))
    packed = keys.fmt is not None or values.fmt is not None
    on_hip = isinstance(arch, str)
    before_hopper = isinstance(arch, int) and 0 < arch < 90
    if form == "split":
        if by_group and not on_hip:
            return AttentionTiles(rows, 16, 512, Warps(2, 1))
        block_n = 32 if wide or by_group else 64
        # 4 warps of gfx942 have 256 threads, each of which should load 16 bytes
        few = on_hip and min(_row_bytes(keys), _row_bytes(values)) * block_n < 4096
        return AttentionTiles(rows, block_n, 512, Warps(2 if few else 4, 1 if packed else 2))
    if wide or packed:
        block_n = 16 if by_group and before_hopper else 32
        return AttentionTiles(max(rows, 64), block_n, 0, Warps(4 if on_hip else 8, 2))
    wide = max(keys.head_dim, values.head_dim) > 64 and before_hopper
    return AttentionTiles(max(rows, 64), 32 if wide else 64, 0, Warps(4, 2))


def _row_bytes(pool: PoolForm) -> int:
    bits = 8 * pool.dtype.itemsize if pool.fmt is None else pool.fmt.num_bits
    return pool.head_dim * bits // 8


def paged_attention(
    q: Tensor,
    keys: BlockPool,
    values: BlockPool,
    batch: PagedBatch,
    options: AttentionOptions,
    form: Form | None = None,
    tiles: AttentionTiles | None = None,
) -> AttentionOutput:
    """`paged_attention_reference` for q [tokens, heads, head_dim] float16, bfloat16 or float32, any
    strides but that of its last axis, beside dense pools of the same dtype.

    form: None for the launcher's choice. ValueError, naming it, for a tensor that does not fit.
    """
    check_attention(q, keys, values, batch, options)
    tokens, heads, head_dim = q.shape
    group = heads // keys.kv_heads
    if form is None:
        few = batch.max_query_len * group <= max(16, padded(group))
        form = "split" if few or batch.batch_invariant else "whole"
    tiles = tiles or default_tiles(form, keys.form, values.form, heads, launch_arch(q.device))
    if keys.fmt is not None and keys.fmt.rotate and not options.rotated_queries:
        q = rotate_heads(q.float()).to(q.dtype)
    out = q.new_empty(tokens, heads, values.head_dim)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    rotation = values.head_dim & -values.head_dim if values.fmt and values.fmt.rotate else 1
    if tiles.split == 0:
        _launch(q, keys, values, batch, options, tiles, out, lse, 1)
        return AttentionOutput(
            out if rotation == 1 else rotate_heads(out.float()).to(out.dtype), lse
        )
    splits = max(1, -(-batch.max_context_len // tiles.split))
    parts = torch.empty(*out.shape[:2], splits, values.head_dim, dtype=torch.float32,
                        device=q.device)  # fmt: skip
    part_lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=q.device)
    _launch(q, keys, values, batch, options, tiles, parts, part_lse, splits)
    combine(parts, part_lse, options.sinks, out, lse, rotation)
    return AttentionOutput(out, lse)


def _launch(
    q: Tensor, keys: BlockPool, values: BlockPool, batch: PagedBatch, options: AttentionOptions,
    tiles: AttentionTiles, out: Tensor, lse: Tensor, splits: int,
) -> None:  # fmt: skip
    tokens, heads, head_dim = q.shape
    seqs = len(batch.context_lens)
    group = heads // keys.kv_heads
    one_tile = batch.max_query_len <= tiles.block_m // group
    row_tiles = seqs if one_tile else tokens // (tiles.block_m // group) + seqs
    (held_k, unit_k), (held_v, unit_v) = words_of(keys), words_of(values)
    args = {
        "q_ptr": q,
        **pool_args("k", keys, "k", held_k, unit_k),
        **pool_args("v", values, "v", held_v, unit_v),
        "table_ptr": batch.block_tables,
        "context_ptr": batch.context_lens,
        "cu_ptr": batch.cu_seqlens_q,
        "sinks_ptr": options.sinks,
        "slopes_ptr": options.alibi_slopes,
        "out_ptr": out,
        "lse_ptr": lse,
        "seqs": seqs,
        "heads": heads,
        "splits": splits,
        "scale": options.scale,
        "softcap": options.softcap or 0.0,
        "window": options.sliding_window or 0,
        "q_token": q.stride(0),
        "q_head": q.stride(1),
        "table_seq": batch.block_tables.stride(0),
    }
    constants = {
        "HEAD_GROUP": group,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": values.head_dim,
        "BLOCK_SIZE": keys.block_size,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "SPLIT": tiles.split,
        "ONE_TILE": one_tile,
        **pool_constants("K", keys, 16),
        **pool_constants("V", values, 16),
        "K_UNIT": unit_k,
        "V_UNIT": unit_v,
        "WINDOW": options.sliding_window is not None,
        "SOFTCAP": options.softcap is not None,
        "SINKS": options.sinks is not None,
        "ALIBI": options.alibi_slopes is not None,
        "ASM": launch_arch(q.device) if launch_backend() == "cuda" else 0,
    }
    grid = (row_tiles, keys.kv_heads, splits)
    launch(attention_kernel, grid, args, constants, tiles.warps)


def words_of(pool: BlockPool) -> tuple[Tensor, int]:
    """Codes as attention reads them, int32 words of four bytes, and what their strides are counted
    in: 4 words where that divides them, so that 16 bytes are loaded at once. Floats as they are."""
    if pool.fmt is None:
        return pool.codes, 1
    words = pool.codes.view(torch.int32)
    return words, 1 if any(step % 4 for step in words.stride()[:3]) else 4


def pool_args(
    side: str, pool: BlockPool, codes: str, held: Tensor, unit: int = 1
) -> dict[str, Any]:
    """Pointers and strides of the pool called `side` in a kernel, and its codes `codes`, `held`,
    whose strides are in `unit` entries."""
    strides = [step // unit for step in held.stride()]
    scale = pool.scale.stride() if pool.scale is not None else (0,) * 4
    axes = ("block", "head", "slot")
    return {
        f"{codes}_ptr": held,
        f"{side}_scale_ptr": pool.scale,
        f"{side}_offset_ptr": pool.offset,
        f"{side}_static_ptr": pool.static_scale,
        **{f"{codes}_{axis}": strides[i] for i, axis in enumerate(axes)},
        **{f"{side}s_{axis}": scale[i] for i, axis in enumerate(axes)},
    }


def pool_constants(side: str, pool: BlockPool, least: int) -> dict[str, Any]:
    """What a kernel is compiled for; PAD: a power of two from `least` on that holds a row."""
    fmt, head_dim = pool.fmt, pool.head_dim
    bits = 16 if fmt is None else fmt.num_bits
    return {
        f"{side}_BITS": bits,
        f"{side}_FP8": fmt is not None and fmt.kind == "float",
        f"{side}_SCALES": scales_of(fmt, head_dim),
        f"{side}_GROUP": 1 if fmt is None else max(1, fmt.group),
        f"{side}_OFFSETS": pool.offset is not None,
        f"{side}_PAD": padded(max(least, head_dim // 2 if bits == 4 else head_dim)),
    }


def scales_of(fmt: KVFormat | None, head_dim: int) -> str:
    """What a scale of the format is for, in the kernel's words."""
    if fmt is None:
        return "none"
    if fmt.axis == "static":
        return "static"
    return "token" if fmt.group == head_dim else "group"


def check_attention(
    q: Tensor, keys: BlockPool, values: BlockPool, batch: PagedBatch, options: AttentionOptions
) -> None:
    """ValueError, naming what does not fit."""
    check_tensor(OP, "q", q, (None, None, None), DTYPES)
    device, heads = q.device, q.shape[1]
    for name, pool in (("keys", keys), ("values", values)):
        check_pool(OP, name, pool, q.dtype, device)
    if keys.codes.shape[:3] != values.codes.shape[:3]:
        raise ValueError(
            f"{OP}: blocks of keys are {tuple(keys.codes.shape[:3])}, those of values "
            f"{tuple(values.codes.shape[:3])}"
        )
    if keys.head_dim != q.shape[2]:
        raise ValueError(f"{OP}: q has heads of {q.shape[2]}, keys of {keys.head_dim}")
    if heads % keys.kv_heads or heads // keys.kv_heads > MAX_ROWS:
        raise ValueError(f"{OP}: {heads} query heads do not share {keys.kv_heads} kv heads evenly, "
                         f"or more than {MAX_ROWS} share one")  # fmt: skip
    check_batch(OP, batch, keys.block_size, device)
    for name in ("sinks", "alibi_slopes"):
        if (part := getattr(options, name)) is not None:
            check_tensor(OP, name, part, (heads,), [torch.float32], device, True)


def check_batch(op: str, batch: PagedBatch, block_size: int, device: torch.device) -> None:
    """ValueError unless the parts of `batch` fit each other."""
    seqs, blocks = batch.block_tables.shape
    check_tensor(op, "block_tables", batch.block_tables, (seqs, None), [torch.int32], device)
    check_tensor(op, "context_lens", batch.context_lens, (seqs,), [torch.int32], device, True)
    check_tensor(op, "cu_seqlens_q", batch.cu_seqlens_q, (seqs + 1,), [torch.int32], device, True)
    if batch.max_context_len > blocks * block_size:
        raise ValueError(
            f"{op}: max_context_len is {batch.max_context_len}, but block_tables {seqs} x {blocks} "
            f"have room for {blocks * block_size} keys"
        )


def check_pool(
    op: str, name: str, pool: BlockPool, dtype: torch.dtype, device: torch.device
) -> None:
    """ValueError unless the pool's parts fit each other; `dtype`: of one that is not quantized."""
    blocks, heads, size, width = pool.codes.shape
    dtypes = [dtype if pool.fmt is None else torch.uint8]
    check_tensor(op, name, pool.codes, (blocks, heads, size, width), dtypes, device)
    fmt = pool.fmt
    if fmt is None:
        return
    if any(step % 4 for step in (*pool.codes.stride()[:3], width, pool.codes.storage_offset())):
        raise ValueError(
            f"{op}: codes of {name} must lie at multiples of 4 bytes; rows are of {width}, strides "
            f"{pool.codes.stride()}, the first at {pool.codes.storage_offset()}"
        )
    if fmt.axis == "static":
        if pool.static_scale is None:
            raise ValueError(f"{op}: {name} have no static_scale, which their format needs")
        check_tensor(op, f"static_scale of {name}", pool.static_scale, (heads,), [torch.float32],
                     device, True)  # fmt: skip
        return
    kept = (pool.scale,) if fmt.symmetric else (pool.scale, pool.offset)
    for part_name, part in zip(("scale", "offset"), kept, strict=False):
        if part is None:
            raise ValueError(f"{op}: {name} have no {part_name}, which their format keeps")
        shape = (blocks, heads, size, pool.head_dim // fmt.group)
        check_tensor(op, f"{part_name} of {name}", part, shape, [torch.float16], device)
        assert pool.scale is not None
        if part.stride() != pool.scale.stride():
            raise ValueError(f"{op}: scale and offset of {name} have different strides")
