"""Time and peak memory of `quantize run`, and that memory does not grow with depth.

    python -m lowbit.evals.quantize_bench MODEL [--calib FILE] [--samples 128] [--seq-len 512]
    python -m lowbit.evals.quantize_bench --depths 6 24

The first form runs the whole command on a model and prints its seconds and peak memory. The second
makes random Llamas that differ only in their number of layers and prints the peak of each and their
ratio to the first. Each run is a process of its own; its peak is what the operating system says.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from .report import environment

HIDDEN, INTERMEDIATE, HEADS, VOCABULARY = 576, 1536, 9, 4096
RANDOM_TEXT_WORDS = 80_000


class Cost(NamedTuple):
    """Wall and CPU seconds and peak resident bytes of one whole command."""

    seconds: float
    cpu_seconds: float
    peak_memory: int


def measure_run(model: Path, out: Path, options: list[str]) -> Cost:
    """Run `quantize run` on `model` as a process of its own; RuntimeError when it fails."""
    code = (
        "import resource, sys; from lowbit.quantize.cli import main\n"
        "try: main()\n"
        "finally:\n"
        "  from lowbit.evals.speed import peak_memory\n"
        "  sys.stderr.write(f'\\npeak {peak_memory()}\\n')\n"
    )
    command = [sys.executable, "-c", code, "run", str(model), "-o", str(out), *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise RuntimeError(f"quantize run failed with exit code {done.returncode}: {done.stderr}")
    peak = int(done.stderr.rsplit("peak ", 1)[1])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds, cpu, peak)


def random_llama(folder: Path, layers: int) -> Path:
    """A random Llama of SmolLM2's width with `layers` layers and a word tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=HEADS // 3,
        tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    save_word_tokenizer(folder)
    return folder


def save_word_tokenizer(folder: Path) -> None:
    """A tokenizer whose words are w0, w1, ..., one an id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def random_text(path: Path) -> Path:
    """Words of the random tokenizer, drawn by a fixed rule."""
    words = (f"w{(i * 7919 + i * i) % VOCABULARY}" for i in range(RANDOM_TEXT_WORDS))
    path.write_text(" ".join(words), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--depths", nargs="+", type=int)
    parser.add_argument("--calib", default="auto")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=64)
    args = parser.parse_args()
    if (args.model is None) == (args.depths is None):
        parser.error("give either MODEL or --depths")
    options = [
        "--scheme", "W4A16", "--group-size", str(args.group_size),
        "--samples", str(args.samples), "--seq-len", str(args.seq_len),
    ]  # fmt: skip
    import torch

    results: dict[str, Any] = {
        "options": options,
        "environment": vars(environment(torch.device("cpu"))),
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.model is not None:
            run = [*options, "--calib", args.calib]
            results["model"] = str(args.model)
            results["cost"] = measure_run(args.model, folder / "out", run)._asdict()
        else:
            run = [*options, "--calib", str(random_text(folder / "text.txt"))]
            costs = {}
            for depth in args.depths:
                model = random_llama(folder / f"{depth}", depth)
                costs[depth] = measure_run(model, folder / f"{depth}-out", run)
            first = costs[args.depths[0]].peak_memory
            results["by_depth"] = {
                d: {**c._asdict(), "peak_memory_ratio": c.peak_memory / first}
                for d, c in costs.items()
            }
    sys.stdout.write(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
