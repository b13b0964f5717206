"""What `quantize verify --against` tells of damaged bytes in a quantized checkpoint.

    python -m lowbit.evals.damage_bench CHECKPOINT BASE [--bytes 3000 300 30 10 3 1]
        [--linears 21] [--seed 0]

The checkpoint is copied and its manifest left out, which would tell any change by its hash. Then,
for each number of bytes, so many bytes of the codes of each of some random linears are changed, the
copy is examined, and what was changed is put back. The linears named by errors have to be the
damaged ones; whole, the copy may have no error. Prints JSON; the exit code is 1 where a whole
checkpoint or a whole linear was called damaged, or one with as many damaged bytes as the first
number was not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..calib.safetensors_file import read_header
from ..quantize import verify
from ..quantize.checkpoint.load import Checkpoint
from ..quantize.checkpoint.manifest import MANIFEST

COUNTS = (3000, 300, 30, 10, 3, 1)
CODES = ("weight_packed", "qweight", "weight")


class Stretch(NamedTuple):
    """Where a linear's codes lie."""

    module: str
    file: Path
    start: int
    nbytes: int


def stretches(folder: Path) -> list[Stretch]:
    """The codes of every quantized linear of the checkpoint."""
    found: dict[str, Stretch] = {}
    modules = Checkpoint(folder).schemes
    for file in sorted(folder.glob("*.safetensors")):
        for name, stored in read_header(file).tensors.items():
            module, _, leaf = name.rpartition(".")
            if module in modules and leaf in CODES:
                found[module] = Stretch(module, file, stored.start, stored.nbytes)
    if len(found) != len(modules):
        raise RuntimeError(f"{folder} has codes of {len(found)} of {len(modules)} linears")
    return [found[module] for module in sorted(found)]


@contextmanager
def damaged(places: Sequence[Stretch], count: int, rng: random.Random) -> Iterator[None]:
    """`count` different bytes of each stretch changed to other ones, and changed back."""
    edits = [
        (place, place.start + at, rng.randrange(1, 256))
        for place in places
        for at in rng.sample(range(place.nbytes), min(count, place.nbytes))
    ]
    _flip(edits)
    try:
        yield
    finally:
        _flip(edits)


def _flip(edits: list[tuple[Stretch, int, int]]) -> None:
    for file in {place.file for place, _, _ in edits}:
        with file.open("r+b") as f:
            for place, at, mask in edits:
                if place.file == file:
                    f.seek(at)
                    (byte,) = f.read(1)
                    f.seek(at)
                    f.write(bytes([byte ^ mask]))


class Examined(NamedTuple):
    """named: weights of errors; other: errors that are not of one."""

    named: frozenset[str]
    other: tuple[str, ...]
    warnings: int
    seconds: float


def examine(folder: Path, base: Path, modules: Sequence[str]) -> Examined:
    start = time.perf_counter()
    report = verify(folder, base)
    errors = [f for f in report.findings if f.severity == "error"]
    by_weight = {f"{module}.weight": module for module in modules}
    named = frozenset(by_weight[f.where] for f in errors if f.where in by_weight)
    other = tuple(f"{f.fault}: {f.where}" for f in errors if f.where not in by_weight)
    warnings = len(report.findings) - len(errors)
    return Examined(named, other, warnings, time.perf_counter() - start)


def trial(
    folder: Path, base: Path, places: list[Stretch], count: int, linears: int, rng: random.Random
) -> dict[str, Any]:
    """`count` bytes of so many linears damaged: which were named."""
    chosen = rng.sample(places, min(linears, len(places)))
    with damaged(chosen, count, rng):
        found = examine(folder, base, [p.module for p in places])
    modules = {p.module for p in chosen}
    return {
        "bytes": count,
        "damaged": len(modules),
        "named": len(found.named & modules),
        "not_named": sorted(modules - found.named),
        "whole_ones_named": sorted(found.named - modules) + list(found.other),
        "seconds": round(found.seconds, 1),
    }


def bench(
    checkpoint: Path, base: Path, counts: Sequence[int], linears: int, seed: int
) -> dict[str, Any]:
    """The checkpoint whole, and with each number of damaged bytes."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(checkpoint, Path(scratch) / "copy"))
        (folder / MANIFEST).unlink(missing_ok=True)
        places = stretches(folder)
        whole = examine(folder, base, [p.module for p in places])
        trials = [trial(folder, base, places, count, linears, rng) for count in counts]
    return {
        "checkpoint": str(checkpoint),
        "linears": len(places),
        "seed": seed,
        "whole": {
            "errors": sorted(whole.named) + list(whole.other),
            "warnings": whole.warnings,
            "seconds": round(whole.seconds, 1),
        },
        "trials": trials,
    }


def holds(result: dict[str, Any]) -> bool:
    """No false alarm, and every linear with the first number of damaged bytes named."""
    alarms = result["whole"]["errors"] + [
        n for t in result["trials"] for n in t["whole_ones_named"]
    ]
    return not alarms and not result["trials"][0]["not_named"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="lowbit.evals.damage_bench")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("--bytes", nargs="+", type=int, default=list(COUNTS))
    parser.add_argument("--linears", type=int, default=21)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = bench(args.checkpoint, args.base, args.bytes, args.linears, args.seed)
    json.dump(result, sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.exit(0 if holds(result) else 1)


if __name__ == "__main__":
    main()
