"""Peak memory of `quantize run` on a Llama of 7 billion random weights.

    python -m lowbit.evals.memory_bench [--method rtn] [--layers 32]
    python -m lowbit.evals.memory_bench --method gptq --layers 2 [--samples 16] [--seq-len 512]

The model (Llama-2-7B in names and shapes, bfloat16, shards of at most 5 GB) is written piece by
piece. The command runs as a process of its own; its peak is the VmHWM of /proc, in which pages of
mapped files count as well. Several times a second it is asked how much of what it holds is its own
(RssAnon) and how much is files' (RssFile). Calibration text is random words: memory does not depend
on what they are. Prints JSON; the exit code is 1 where the peak is over the limit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from .quantize_bench import random_text, save_word_tokenizer

LIMIT = 4 << 30
EVERY = 0.1  # seconds between two looks at a process
CALIBRATED = ("gptq", "awq+gptq", "smoothquant+gptq")
CODE = """
import sys
from lowbit.quantize.cli import main
main()
"""


class Held(NamedTuple):
    """Bytes that a process held: at most, by the system's own count (`peak`), and as far as was
    seen at most of its own (`own`) and of mapped files (`mapped`)."""

    peak: int
    own: int
    mapped: int


def watched(command: list[str], log: Path) -> tuple[float, Held]:
    """Run `command`; seconds, and what it held. RuntimeError when it fails."""
    start, held = time.perf_counter(), Held(0, 0, 0)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            fields = _status(process.pid)
            held = Held(
                max(held.peak, fields.get("VmHWM", 0)),
                max(held.own, fields.get("RssAnon", 0)),
                max(held.mapped, fields.get("RssFile", 0)),
            )
            time.sleep(EVERY)
    if process.returncode:
        tail = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{command} failed with exit code {process.returncode}: {tail}")
    return time.perf_counter() - start, held


def _status(pid: int) -> dict[str, int]:
    """The sizes in /proc/PID/status, in bytes; nothing once the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in pairs}


def measure(model: Path, out: Path, text: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One run of the command."""
    from ..calib.shards import Shards

    options = ["--method", args.method, "--scheme", args.scheme, "--device", "cpu"]
    if args.method in CALIBRATED:
        options += ["--calib", str(text), "--samples", str(args.samples)]
        options += ["--seq-len", str(args.seq_len), "--batch-size", str(args.batch_size)]
        options += ["--dtype", args.dtype, "--order", args.order]
    command = [sys.executable, "-c", CODE, "run", str(model), "-o", str(out), *options]
    seconds, held = watched(command, out.with_name("log"))
    info = Shards(model).info.values()
    return {
        "options": [o for o in options if o != str(text)],
        "layers": args.layers,
        "model_bytes": sum(i.nbytes for i in info),
        "output_bytes": sum(f.stat().st_size for f in out.glob("*.safetensors")),
        "peak_memory": held.peak,
        "peak_own": held.own,
        "peak_mapped_files": held.mapped,
        "limit": args.limit,
        "within_limit": held.peak <= args.limit,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--method", default="rtn")
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--order", default="sequential")
    parser.add_argument("--limit", type=int, default=LIMIT, help="In bytes.")
    parser.add_argument("--scratch", type=Path, help="Where to make the model (in a folder).")
    args = parser.parse_args()
    if sys.platform != "linux":
        parser.error("what a process holds is read from /proc, which Linux has")
    import torch

    from .report import environment
    from .stream_bench import llama_slots, make_checkpoint

    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch)
        slots = llama_slots(args.layers)
        needed = 2 * sum(s.nbytes for s in slots)
        if shutil.disk_usage(folder).free < needed:
            parser.error(f"{folder} has too little room: {needed / 1e9:.1f} GB are needed")
        make_checkpoint(folder / "model", slots, args.layers, "random")
        save_word_tokenizer(folder / "model")
        text = random_text(folder / "text.txt")
        result = measure(folder / "model", folder / "out", text, args)
    result["environment"] = vars(environment(torch.device("cpu")))
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    sys.exit(int(not result["within_limit"]))


if __name__ == "__main__":
    main()
