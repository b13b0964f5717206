"""The roofline: what this device could do, and how far a phase of serving is from it.

A phase needs so many bytes and so many operations; no program needs less time than the larger of
bytes over bandwidth and operations over the rate of products (Williams et al. 2009). Both are
measured here: the bandwidth of reading a large tensor or of copying it, whichever moves more, and
torch's own product of large matrices in the model's dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...kernels.errors import UserError
from ...runtime import LLM
from ...runtime.held import kv_bytes_per_token, matrices

READ_BYTES = 256 << 20  # beyond any cache
MATRIX = {"cpu": 1024, "cuda": 8192}  # rows and columns
TRIES = 5


class Ceilings(NamedTuple):
    """Bytes a second, operations a second in `dtype` (a product and its sum are two)."""

    bandwidth: float
    matmul: float
    dtype: str


class Work(NamedTuple):
    """What a model must move and multiply. weight_bytes: of all matrices, which a pass reads
    once, whatever the batch; experts_bytes: of it, what routed experts hold; routed: the share of
    them that one token takes. weights: numbers that a token is multiplied by. kv_bytes: of one
    token's keys and values, read by each later token. attention: operations of one token for each
    token that it sees."""

    weight_bytes: int
    experts_bytes: int
    routed: float
    weights: float
    kv_bytes: float
    attention: float


class Phase(NamedTuple):
    """One phase at one batch and context. seconds: measured, of a step (decode) or of all prompts
    (prefill); memory, compute: the least seconds that its bytes and its operations take; bound:
    which is larger; share: of the measured time. weight_bytes_per_token, kv_bytes_per_token: read
    for each token that is computed."""

    phase: str
    batch: int
    context: int
    seconds: float
    memory: float
    compute: float
    bound: str
    share: float
    weight_bytes_per_token: float
    kv_bytes_per_token: float


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of several tries, as what disturbs only makes slower."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        from ..gpu_timer import copy_bandwidth, matmul_rate

        return Ceilings(copy_bandwidth(), matmul_rate(), "bfloat16")
    source = torch.ones(READ_BYTES // 4)
    target = torch.empty_like(source)
    n = MATRIX["cpu"]
    a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
    read, copied = _best(lambda: source.sum()), _best(lambda: target.copy_(source))
    bandwidth = max(READ_BYTES / read, 2 * READ_BYTES / copied)
    return Ceilings(bandwidth, 2 * n**3 / _best(lambda: a @ b), name)


def _best(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def work_of(llm: LLM) -> Work:
    """Of a loaded model. UserError where its cache has no size for a token before it runs."""
    config = llm.model.config.get_text_config(decoder=True)
    kv_bytes = kv_bytes_per_token(llm)
    if kv_bytes is None:
        raise UserError(f"--explain needs the paged engine, which {llm.engine_declined}")
    found = matrices(llm)
    experts = [m for m in found if ".experts" in m.name]
    in_experts = sum(m.numbers for m in experts)
    routed = _routed(config) if experts else 1.0
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Work(
        weight_bytes=sum(m.nbytes for m in found),
        experts_bytes=sum(m.nbytes for m in experts),
        routed=routed,
        weights=sum(m.numbers for m in found) - in_experts * (1 - routed),
        kv_bytes=kv_bytes,
        attention=4.0 * config.num_hidden_layers * heads * head_dim,
    )


def prefill_phase(work: Work, batch: int, context: int, seconds: float, top: Ceilings) -> Phase:
    """Of `batch` prompts of `context` tokens at once."""
    tokens = batch * context
    seen = batch * context * (context + 1) / 2
    moved = _weight_bytes(work, tokens)
    written = tokens * work.kv_bytes
    operations = 2 * work.weights * tokens + work.attention * seen
    return _phase("prefill", batch, context, seconds, moved, written, operations, tokens, top)


def decode_phase(work: Work, batch: int, context: int, seconds: float, top: Ceilings) -> Phase:
    """Of one step of `batch` sequences that see `context` tokens each."""
    moved = _weight_bytes(work, batch)
    read = batch * context * work.kv_bytes
    operations = batch * (2 * work.weights + work.attention * context)
    return _phase("decode", batch, context, seconds, moved, read, operations, batch, top)


def _phase(
    phase: str, batch: int, context: int, seconds: float, moved: float, kv: float,
    operations: float, tokens: int, top: Ceilings,
) -> Phase:  # fmt: skip
    memory, compute = (moved + kv) / top.bandwidth, operations / top.matmul
    bound = "memory" if memory >= compute else "compute"
    share = max(memory, compute) / seconds
    return Phase(
        phase, batch, context, seconds, memory, compute, bound, share, moved / tokens, kv / tokens
    )


def _weight_bytes(work: Work, tokens: int) -> float:
    """Read by a pass of `tokens`: of routed experts at most as many as the tokens take."""
    reached = min(1.0, tokens * work.routed)
    return work.weight_bytes - work.experts_bytes * (1 - reached)


def _routed(config: Any) -> float:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    total = next((n for name in names if (n := getattr(config, name, None))), None)
    taken = getattr(config, "num_experts_per_tok", None)
    return 1.0 if not total or not taken else taken / total
