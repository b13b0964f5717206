"""What the scheduler costs a step, and how many of the KV slots that it gives out hold nothing.

    python -m lowbit.evals.scheduler_bench [--running 256] [--waiting 10000] [--repeats 5]

Cost: `plan` and `update` of decode steps without a model, CPU seconds of the one thread (those of
the wall clock on an idle machine). Requests with prompts of 128 to 143 tokens decode; a repeat is
the mean of 64 steps, in which each sequence fills four blocks; printed are the median of the
repeats and their range, for each running request. The same with nobody and with many waiting (in
turns, one repeat of each), and with sliding windows beside full attention.

Waste: over all steps of a trace, the slots of blocks in use that hold nothing, over all slots of
blocks in use. Traces: 16 requests of 128 prompt and 128 output tokens at once; and 400 requests
that come over time (about one in two steps) with prompts of 16 to 1024 and outputs of 16 to 512
tokens (uniform in the logarithm, seed 0), with continuous and with static batching.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import sys
import time
from typing import Any

from ..runtime.scheduling import KVKind, RequestState, Scheduler, SchedulerConfig, StepPlan
from ..runtime.scheduling.config import Batching

PROMPT, OUTPUT = 128, 128
STEPS = 64  # of one repeat
BLOCK_SIZE = 16
VOCABULARY = 50_000
COST_TARGET = 50.0  # microseconds a step for each running request
FLAT = 1.2  # the cost with many waiting over that with none
WASTE_TARGET = 0.04


def decoding(
    running: int, waiting: int, repeats: int, windows: tuple[int | None, ...] = (None,)
) -> Scheduler:
    """A scheduler whose requests all decode, for as long as the repeats take."""
    rng = random.Random(0)
    kinds = tuple(KVKind(running * 100 * (repeats + 1), window) for window in windows)
    config = SchedulerConfig(kinds, BLOCK_SIZE, running, max(2048, 2 * running))
    scheduler = Scheduler(config)
    for i in range(running + waiting):
        prompt = _prompt(rng, PROMPT + rng.randrange(BLOCK_SIZE))
        scheduler.add(RequestState(str(i), prompt, STEPS * (repeats + 2) + running))
    while _step(scheduler).num_decodes < running:
        pass
    return scheduler


def decode_costs(schedulers: list[Scheduler], repeats: int) -> list[dict[str, float]]:
    """Of each, microseconds of `plan` and `update` for each running request."""
    costs: list[list[float]] = [[] for _ in schedulers]
    for _ in range(repeats):
        for scheduler, mine in zip(schedulers, costs, strict=True):
            running = len(scheduler.roster.running)
            started = time.process_time()
            for _ in range(STEPS):
                assert _step(scheduler).num_decodes == running
            mine.append((time.process_time() - started) / STEPS / running * 1e6)
    return [
        {"median": statistics.median(mine), "fastest": min(mine), "slowest": max(mine)}
        for mine in costs
    ]


def trace_waste(
    requests: list[tuple[int, RequestState]], config: SchedulerConfig
) -> dict[str, float]:
    """Run (step of arrival, request) pairs to their end; waste, steps and tokens a step."""
    scheduler, slots, tokens, steps = Scheduler(config), 0, 0, 0
    coming = sorted(requests, key=lambda pair: -pair[0])
    while coming or scheduler.has_work:
        while coming and coming[-1][0] <= steps:
            scheduler.add(coming.pop()[1])
        _step(scheduler)
        usage = scheduler.stats().kv
        slots, tokens, steps = slots + usage.slots, tokens + usage.tokens, steps + 1
    stats = scheduler.stats()
    return {
        "waste": 1 - tokens / slots,
        "steps": steps,
        "output_tokens_a_step": stats.tokens.output / steps,
        "preemptions": stats.preemptions,
    }


def equal_requests(count: int = 16) -> list[tuple[int, RequestState]]:
    rng = random.Random(0)
    return [(0, RequestState(str(i), _prompt(rng, PROMPT), OUTPUT)) for i in range(count)]


def mixed_requests(count: int = 400) -> list[tuple[int, RequestState]]:
    rng = random.Random(0)

    def length(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    return [
        (rng.randrange(2 * count), RequestState(str(i), _prompt(rng, length(16, 1024)), n))
        for i in range(count)
        for n in [length(16, 512)]
    ]


def mixed_config(batching: Batching) -> SchedulerConfig:
    """A pool that the mixed trace fills."""
    return SchedulerConfig((KVKind(2000),), BLOCK_SIZE, 64, 512, batching=batching)


def measure(running: int, waiting: int, repeats: int) -> dict[str, Any]:
    """All that the module's docstring names."""
    alone, crowded, windowed = decode_costs(
        [
            decoding(running, 0, repeats),
            decoding(running, waiting, repeats),
            decoding(running, 0, repeats, (None, 512)),
        ],
        repeats,
    )
    equal = SchedulerConfig((KVKind(1000),), BLOCK_SIZE, 16)
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "running": running,
        "waiting": waiting,
        "steps": STEPS,
        "microseconds_a_running_request": {
            "none_waiting": alone,
            "many_waiting": crowded,
            "with_a_window_of_512": windowed,
        },
        "ratio_many_to_none_waiting": crowded["median"] / alone["median"],
        "waste": {
            "16 x (128 in, 128 out)": trace_waste(equal_requests(), equal),
            "mixed, continuous": trace_waste(mixed_requests(), mixed_config("continuous")),
            "mixed, static": trace_waste(mixed_requests(), mixed_config("static")),
        },
    }
    wasted = [results["waste"][name]["waste"] for name in list(results["waste"])[:2]]
    results["holds"] = {
        f"under {COST_TARGET:.0f} microseconds": crowded["median"] < COST_TARGET,
        f"flat (ratio under {FLAT})": results["ratio_many_to_none_waiting"] < FLAT,
        f"waste under {WASTE_TARGET:.0%}": max(wasted) < WASTE_TARGET,
    }
    return results


def _step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    scheduler.update(plan, [(7,) if run.num_logits else () for run in plan.runs])
    return plan


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    results = measure(args.running, args.waiting, args.repeats)
    sys.stdout.write(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
