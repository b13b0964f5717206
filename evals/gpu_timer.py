"""Times of GPU work: calls captured in one graph, replayed between two events, medians.

A graph leaves out what Python takes to launch. Each call of a graph works on operands of its own,
and together they exceed the L2 cache, so that none finds its weights there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

COPIES_BYTES = 256 << 20  # several times any L2 cache
REPLAYS = 10


def copies_needed(nbytes: int) -> int:
    """How many operands of `nbytes` a graph rotates over."""
    return max(2, min(64, -(-COPIES_BYTES // max(nbytes, 1))))


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of `calls`, seconds. All are run once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of copying 1 GiB on the device."""
    pairs = [torch.empty(2, 1 << 30, dtype=torch.uint8, device="cuda").random_() for _ in range(2)]
    return 2 * (1 << 30) / seconds([lambda p=p: p[1].copy_(p[0]) for p in pairs])


def matmul_rate() -> float:
    """Operations a second of torch's bfloat16 product of random 8192 x 8192 matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds([lambda: a @ b])
