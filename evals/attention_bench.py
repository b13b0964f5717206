"""`python -m lowbit.evals.attention_bench`: decode attention over blocks on a CPU, form by form.

For one shape (SmolLM2-135M's unless said otherwise) and each batch and context: our CPU kernel,
torch's SDPA called for each sequence, batched products without a fused kernel, and the definition.
Times are the best of many calls, so that a busy machine disturbs them least; forms take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention_ops import AttentionOptions, PagedBatch, paged_attention
from ..kernels.cases.case import Maker
from ..kernels.cases.pools import PoolShape, batch_of, batch_operands, pool_of, pool_operands
from ..kernels.paged_kv import BlockPool, gather_blocks

SEQUENCES, CONTEXTS = (1, 4, 16), (128, 512, 2048)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class _Operands(NamedTuple):
    q: Tensor
    keys: BlockPool
    values: BlockPool
    batch: PagedBatch
    options: AttentionOptions


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lowbit.evals.attention_bench", description=__doc__
    )
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--kv", default="dense", help="dense, int8, fp8 or int4")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each batch and context")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    sys.stdout.write(f"{'seqs':>5}{'context':>9}" + "".join(f"{n:>16}" for n in FORMS) + "\n")
    for seqs in SEQUENCES:
        for context in CONTEXTS:
            o = _operands(options, seqs, context)
            best = _best(o, options.seconds)
            row = "".join(f"{1e6 * best[name]:>13.0f} us" for name in FORMS)
            sys.stdout.write(f"{seqs:>5}{context:>9}{row}\n")
    return 0


def _operands(options: argparse.Namespace, seqs: int, context: int) -> _Operands:
    make, dtype = Maker("cpu"), DTYPES[options.dtype]
    shape = PoolShape(options.kv, seqs, context, options.kv_heads, options.head_dim, dtype)
    o = {
        **pool_operands(make, "keys", shape),
        **pool_operands(make, "values", shape),
        **batch_operands(make, seqs, context),
    }
    keys, values = (pool_of(o, name, options.kv, options.head_dim) for name in ("keys", "values"))
    q = make.normal(seqs, options.heads, options.head_dim, dtype=dtype)
    return _Operands(
        q, keys, values, batch_of(o, context, 1), AttentionOptions(options.head_dim**-0.5)
    )


def _per_sequence(o: _Operands) -> None:
    for seq in range(len(o.q)):
        table = o.batch.block_tables[seq : seq + 1]
        k, v = (gather_blocks(pool, table, o.q.dtype) for pool in (o.keys, o.values))
        q = o.q[seq, :, None][None]
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _products(o: _Operands) -> None:
    table = o.batch.block_tables
    k, v = (gather_blocks(pool, table, o.q.dtype) for pool in (o.keys, o.values))
    q = o.q.unflatten(1, (o.keys.kv_heads, -1))
    torch.matmul(torch.softmax(q @ k.mT * o.options.scale, -1), v)


FORMS: dict[str, Callable[[_Operands], object]] = {
    "sdpa_cpu": lambda o: paged_attention(*o, "sdpa_cpu"),
    "SDPA each": _per_sequence,
    "products": _products,
    "reference": lambda o: paged_attention(*o, "reference"),
}


def _best(o: _Operands, limit: float) -> dict[str, float]:
    """The shortest time of each form, in seconds, over `limit` seconds in turns; three at least."""
    best = dict.fromkeys(FORMS, float("inf"))
    start, turns = time.perf_counter(), 0
    while turns < 3 or time.perf_counter() - start < limit:
        for name, form in FORMS.items():
            begin = time.perf_counter()
            form(o)
            best[name] = min(best[name], time.perf_counter() - begin)
        turns += 1
    return best


if __name__ == "__main__":
    sys.exit(main())
