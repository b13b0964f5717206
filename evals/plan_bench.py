"""How near a plan comes to what then happens: seconds and peak memory of runs, foreseen and real.

    python -m lowbit.evals.plan_bench MODEL [--methods rtn gptq awq+gptq] [--samples 16]

Each run is a process of its own. It measures the machine before it begins, as every run does, so
both figures are of the same minutes. `ratio`: what happened over what was foreseen; a plan holds
where it lies between 1/1.5 and 1.5.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from .process_cost import run_command
from .report import environment

TOLERANCE = 1.5
CODE = (
    "import sys\n"
    "from lowbit.quantize.cli import main\n"
    "sys.stdout = open(sys.argv.pop(1), 'w')\n"
    "main()\n"
)


def compare(model: Path, method: str, options: list[str]) -> dict[str, Any]:
    """One run of `method`: seconds and peak bytes, foreseen and real. Raises CommandFailed."""
    with tempfile.TemporaryDirectory() as scratch:
        told, out = Path(scratch) / "told.json", Path(scratch) / "out"
        command = [sys.executable, "-c", CODE, str(told), "run", str(model), "-o", str(out)]
        cost = run_command(
            [*command, "--method", method, *options, "--json"], Path(scratch) / "log.txt"
        )
        result = json.loads(told.read_text(encoding="utf-8"))
    foreseen = result["foreseen"]
    return {
        "method": method,
        "seconds": _compared(foreseen["time"]["seconds"], result["seconds"]),
        "peak_memory": _compared(foreseen["memory"]["host"], cost.peak_memory),
        "parts": foreseen["time"]["parts"],
        "pass_seconds": {n: sum(layers.values()) for n, layers in result["pass_seconds"].items()},
        "memory_parts": foreseen["memory"]["parts"],
        "process_seconds": cost.seconds,
    }


def _compared(foreseen: float, real: float) -> dict[str, Any]:
    ratio = real / foreseen
    return {
        "foreseen": foreseen,
        "real": real,
        "ratio": ratio,
        "holds": 1 / TOLERANCE <= ratio <= TOLERANCE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq", "awq+gptq"])
    parser.add_argument("--calib", default="pydoc")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--scheme", default="W4A16")
    args = parser.parse_args()
    options = [
        "--scheme", args.scheme, "--calib", args.calib, "--samples", str(args.samples),
        "--seq-len", str(args.seq_len),
    ]  # fmt: skip
    results = {
        "model": str(args.model),
        "options": options,
        "threads": torch.get_num_threads(),
        "environment": vars(environment(torch.device("cpu"))),
        "runs": [compare(args.model, method, options) for method in args.methods],
    }
    sys.stdout.write(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
