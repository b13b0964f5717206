"""A report as a measurement gives it, its numbers made up: for tests of files and pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowbit.evals.bench.checks import Check
from lowbit.evals.bench.latency import SLO, Spread
from lowbit.evals.bench.load import ClosedLoop, Lengths, LoadPlan
from lowbit.evals.bench.memory import MemorySplit
from lowbit.evals.bench.roofline import Ceilings, Phase
from lowbit.evals.bench.served import Cell, QuantileSpreads, Ratio, Served, describe
from lowbit.evals.bench.session import Bench, Roofline
from lowbit.evals.divergence import CONFIDENCE, ConfidenceBucket, Divergence
from lowbit.evals.kld_bins import KLD_EDGES
from lowbit.evals.linears import LinearResult
from lowbit.evals.perplexity import Perplexity
from lowbit.evals.report import Environment, Protocol, Report, Row, plain
from lowbit.evals.size import SizeReport
from lowbit.evals.speed import DecodeSpeed
from lowbit.evals.windows import Windowing

MAXIMUM = 9.0  # nats


def sample_report(models: int = 2, speed: bool = True, **protocol: Any) -> Report:
    """A base and `models` quantized ones, each smaller and worse than the one before."""
    rows = [_row("base", "/models/tiny", None, 0, speed)]
    for i in range(1, models + 1):
        rows.append(_row(f"W{9 - 2 * i}A16 gptq", f"/made/w{i}", 0.0123 * i, i, speed))
    made = replace(
        Protocol(
            "base", "wikitext", "ab" * 32, "WikiText-2 raw, test", "/models/tiny",
            Windowing(2048, 2048, windows=None), 4, 8188, 8192, "float32",
        ),
        **protocol,
    )  # fmt: skip
    packages = {"torch": "2.13.0", "lowbit": "0.1.0"}
    environment = Environment("cpu", "A <Processor> & Co", 2, "Linux", "3.11.2", packages)
    return Report(made, environment, rows, 12.5, _divergence(0.000321))


def _row(name: str, path: str, kld: float | None, rank: int, timed: bool) -> Row:
    nbytes = 269_000_000 >> rank
    bits = None if kld is None else 8.5 / rank
    size = SizeReport(nbytes, nbytes - 4096, 134_515_008, 16.0 / (rank + 1), 106_168_320, bits)
    perplexity = Perplexity(21.19 + rank, 0.51, 3.0536 + rank / 30, 0.0241, 8188, 4)
    speed = DecodeSpeed(
        20.5 * (rank + 1), 19.5, 21.5 * (rank + 1), 310.0, 900_000_000, None, 64, 64, 3,
        "bfloat16", {"int4_cpu": 210} if rank else {},
    )  # fmt: skip
    linears = [
        LinearResult(f"model.layers.{i}.mlp.up_proj", 4.25 + i / 8, "gptq", 0.001 * (i + rank))
        for i in range(3)
    ]
    return Row(
        name, path, perplexity, None if kld is None else _divergence(kld), size,
        speed if timed else None, None, linears if rank else None,
    )  # fmt: skip


def _divergence(kld: float) -> Divergence:
    pairs = zip(CONFIDENCE, CONFIDENCE[1:], strict=False)
    return Divergence(
        kld_mean=kld, kld_mean_stderr=kld / 20, kld_median=kld / 2, kld_p99=kld * 9,
        kld_max=min(kld * 90, MAXIMUM), top1=1 - kld, top1_stderr=0.0011,
        nll_difference=kld * 0.9, nll_difference_stderr=kld / 30, positions=8192,
        kld_p90=kld * 2.1, kld_p95=kld * 3.3, kld_p999=kld * 31, top5_overlap=1 - kld / 3,
        top5_overlap_stderr=0.0007, probability_rms=kld / 2, probability_rms_stderr=kld / 40,
        probability_mean=-kld / 10, probability_mean_stderr=kld / 50,
        confidence=tuple(
            ConfidenceBucket(low, high, 100 if high < 1 else 0, *((kld / (1 + low), 1 - kld)
                             if high < 1 else (None, None)))
            for low, high in pairs
        ),
        histogram=(192, *([500] * (len(KLD_EDGES))),),
    )  # fmt: skip


def sample_bench(factor: float = 1.0) -> dict[str, Any]:
    """Two variants under two loads, one of which failed; `factor`: times faster than the first."""
    good = Check(16, 640, 0.998, 0.95)
    bad = Check(0, 0, None, None, "request 3 failed: out of order")
    loads, ratios = [], []
    for clients in (8, 2):
        lengths = Lengths(100, 200), Lengths(32, 32)
        load = describe(LoadPlan(16, ClosedLoop(clients), *lengths, source="a text"))
        seconds = clients * 0.075 / factor
        times = QuantileSpreads(*(_spread(seconds * share) for share in (1.0, 1.5, 2.25)))
        rate = _spread(100.0 * factor * clients / 8)
        plain_one = Served("plain", load, 3, good, times, times, times, rate, rate, rate)
        failed = Served("other", load, 3, bad)
        loads += [plain_one, plain_one._replace(variant="other") if clients == 8 else failed]
        if clients == 8:
            ratios.append(Ratio("other", "plain", load, _spread(1.5), _spread(0.5), None))
    sweep = [Cell("plain", 4, 128, 3, good, _spread(2000.0), _spread(400.0)),
             Cell("other", 4, 128, 3, bad)]  # fmt: skip
    phase = Phase("decode", 4, 128, 0.01, 0.005, 0.002, "memory", 0.5, 30e6, 4e6)
    memory = {"plain": MemorySplit(120_000_000, 40_000_000, 10_000_000, 33_000_000, 600_000_000),
              "other": MemorySplit(120_000_000, 20_000_000, None, None, 700_000_000)}  # fmt: skip
    roofline = Roofline(Ceilings(30.5e9, 410.25e9, "bfloat16"), 119_000_000, 23040.0, [phase])
    options = {"plain": {}, "other": {"batching": "static"}}
    slo = vars(SLO(ttft=0.5, tpot=0.05))
    return plain(
        Bench("lowbit, paged engine", options, slo, loads, ratios, sweep, memory, roofline)
    )


def _spread(middle: float) -> Spread:
    return Spread(middle, middle * 0.9, middle * 1.2)
