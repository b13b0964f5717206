"""Peak memory and speed of the streamed path on a checkpoint of 7 billion weights.

    python -m lowbit.evals.stream_bench [--scheme W4A16] [--layers 32] [--fill zeros|random]
    python -m lowbit.evals.stream_bench --tensor-gb 5

Makes a Llama-2-7B in names and shapes (bfloat16, shards of at most 5 GB), converts it in a process
of its own, and prints the peak memory that the operating system counts for it beside the bound,
the largest shard plus 2 GiB. With zeros the files are sparse and take no disk, and the conversion
reads and computes as much as with any other values. The second form has one linear of that size
beside a small layer: no tensor needs to fit in memory either.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from ..calib.shards import Shards
from ..quantize.checkpoint.raw import (
    OpenShard,
    Slot,
    slot,
    split_shards,
    tensor_bytes,
    write_index,
)
from .report import environment

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 11008, 32000  # Llama-2-7B
ALLOWANCE = 2 << 30  # bytes over the largest shard
PIECE = 1 << 24  # random bytes written at once
STEP = 1_000_003  # numbers by which a piece begins later than the one before
CONVERT = """
import sys, time
from pathlib import Path
from lowbit.evals.speed import peak_memory
from lowbit.quantize.recipe import Recipe, WeightPass
from lowbit.quantize.stream import stream_quantize
folder, out, scheme = sys.argv[1:]
before = peak_memory()
recipe = Recipe((WeightPass(method="rtn", scheme=scheme),))
seconds = stream_quantize(Path(folder), Path(out), recipe).seconds
print(seconds, before, peak_memory())
"""


def llama_slots(layers: int) -> list[Slot]:
    """The tensors of a Llama-2 of this depth, in bfloat16."""
    square, wide = (HIDDEN, HIDDEN), (INTERMEDIATE, HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{n}_proj.weight": square for n in "qkvo"}
        shapes |= {f"{layer}mlp.{n}_proj.weight": wide for n in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = wide[::-1]
        shapes[f"{layer}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (HIDDEN,)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    return _slots(shapes)


def one_tensor(nbytes: float) -> list[Slot]:
    """A model whose only linear takes about `nbytes`."""
    rows = int(nbytes / 2 / HIDDEN)
    return _slots({"model.layers.0.mlp.up_proj.weight": (rows, HIDDEN)})


def make_checkpoint(folder: Path, slots: list[Slot], layers: int, fill: str) -> None:
    """Write the tensors as shards with a config.json."""
    folder.mkdir()
    shards = split_shards(slots)
    for file, held in shards.items():
        shard = OpenShard(folder / file, held)
        if fill == "random":
            for t in held:
                _write_random(shard, t)
        shard.close()
    write_index(folder, shards)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers, "vocab_size": VOCABULARY,
        "num_attention_heads": 32, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def measure(folder: Path, out: Path, scheme: str) -> dict[str, Any]:
    """Convert `folder` in a process of its own; RuntimeError when it fails."""
    start = time.perf_counter()
    command = [sys.executable, "-c", CONVERT, str(folder), str(out), scheme]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the conversion failed with exit code {done.returncode}: {done.stderr}")
    seconds, before, peak = (float(v) for v in done.stdout.split())
    shards = Shards(folder)
    largest = max((folder / info.file).stat().st_size for info in shards.info.values())
    weights = sum(info.nbytes for info in shards.info.values()) // 2
    return {
        "scheme": scheme,
        "weights": weights,
        "largest_shard": largest,
        "largest_tensor": max(info.nbytes for info in shards.info.values()),
        "peak_memory": int(peak),
        "peak_before_conversion": int(before),
        "bound": largest + ALLOWANCE,
        "within_bound": peak <= largest + ALLOWANCE,
        "seconds": seconds,
        "wall_seconds": time.perf_counter() - start,
        "weights_per_second": weights / seconds,
    }


def _slots(shapes: dict[str, tuple[int, ...]]) -> list[Slot]:
    return [
        slot(name, torch.empty(shape, dtype=torch.bfloat16, device="meta"))
        for name, shape in shapes.items()
    ]


def _write_random(shard: OpenShard, t: Slot) -> None:
    """Normal numbers as wide as a trained model's; norms are ones. All pieces are the same numbers,
    each begun at another one: drawing seven billion would take longer than quantizing them."""
    if len(t.shape) == 1:
        shard.append(t.name, tensor_bytes(torch.ones(t.shape).bfloat16()))
        return
    data, begin = _drawn(), zlib.crc32(t.name.encode())
    for start in range(0, t.nbytes, PIECE):
        begin = (begin + STEP) % (len(data) // 2)
        turned = data[2 * begin :] + data[: 2 * begin]
        shard.append(t.name, turned[: t.nbytes - start])


@functools.cache
def _drawn() -> bytes:
    generator = torch.Generator().manual_seed(0)
    return tensor_bytes(torch.randn(PIECE // 2, generator=generator).mul_(0.02).bfloat16())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--fill", choices=("zeros", "random"), default="zeros")
    parser.add_argument("--tensor-gb", type=float)
    parser.add_argument("--scratch", type=Path, help="Where to make the checkpoint (in a folder).")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch)
        slots = one_tensor(args.tensor_gb * 1e9) if args.tensor_gb else llama_slots(args.layers)
        needed = sum(s.nbytes for s in slots) * (1.6 if args.fill == "random" else 0.6)
        if shutil.disk_usage(folder).free < needed:
            parser.error(f"{folder} has too little room: {needed / 1e9:.1f} GB are needed")
        make_checkpoint(folder / "model", slots, args.layers, args.fill)
        result = measure(folder / "model", folder / "out", args.scheme)
    result |= {"fill": args.fill, "environment": vars(environment(torch.device("cpu")))}
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
