"""Models whose tensors llama-quantize gave types to, and what it chose: gguf_mixes.json.

`python -m tests.gguf_mixes LLAMA_QUANTIZE OUT.json` records the choices again, from random models
that are exported as F16 and quantized with --dry-run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from .gguf_models import tiny_llama

RECORD = Path(__file__).with_name("gguf_mixes.json")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 10}
MODELS: dict[str, dict[str, Any]] = {
    "untied, 4 heads a value head": {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 2},
    "tied, 1 head a value head": {
        **SIZES,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "columns of 192 and 320": {
        **SIZES,
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    "33 layers": {**SIZES, "num_hidden_layers": 33},
}
EXPERTS = {"mixtral, 8 experts": 8, "mixtral, 4 experts": 4}
LINE = re.compile(r"^\[ *\d+/ *\d+\] +(\S+) +- .* type = +(\w+), size = +\S+ MiB(?:.*\((\w+)\))?")


def mixtral(folder: Path, experts: int, layers: int = 6) -> Path:
    """A random Mixtral with a tokenizer."""
    from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

    tiny_llama(folder, **SIZES)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = MixtralConfig(
        **{**SIZES, "num_hidden_layers": layers},
        vocab_size=288,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def dry_run(program: str, model: Path, file_type: str, imatrix: Path | None) -> dict[str, str]:
    """What llama-quantize would store each tensor as, in GGUF's spelling."""
    extra = [] if imatrix is None else ["--imatrix", str(imatrix)]
    done = subprocess.run(
        [program, "--dry-run", *extra, str(model), str(model.with_suffix(".out")), file_type],
        capture_output=True,
        text=True,
        check=True,
    )
    found = (LINE.match(line) for line in (done.stdout + done.stderr).splitlines())
    return {m[1]: (m[3] or m[2]).upper() for m in found if m}


def record(program: str, out: Path) -> None:
    from lowbit.quantize.gguf.export import export_gguf
    from lowbit.quantize.gguf.file_types import FILE_TYPES
    from lowbit.quantize.gguf.imatrix import Imatrix, Importance, write_imatrix
    from lowbit.quantize.gguf.reader import GGUFFile

    models = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        one = Importance(torch.ones(1, 256), torch.ones(1))
        imatrix = folder / "one.gguf"
        write_imatrix(imatrix, Imatrix({"blk.0.nothing.weight": one}, ["none"], 1, 1))
        names = [*MODELS, *EXPERTS]
        for number, name in enumerate(names):
            place = folder / str(number)
            made = (
                tiny_llama(place, **MODELS[name])
                if name in MODELS
                else mixtral(place, EXPERTS[name])
            )
            gguf = folder / f"{number}.gguf"
            export_gguf(made, gguf, "F16", progress=False)
            shapes = {n: list(t.shape) for n, t in GGUFFile(gguf).tensors.items()}
            chosen = {}
            for file_type in FILE_TYPES:
                for weighted in (False, True):
                    types = dry_run(program, gguf, file_type, imatrix if weighted else None)
                    key = file_type + " imatrix" * weighted
                    chosen[key] = [types[n] for n in shapes]
            config = json.loads((made / "config.json").read_text())
            models[name] = {
                "layers": config["num_hidden_layers"],
                "heads": config["num_attention_heads"],
                "kv_heads": config["num_key_value_heads"],
                "experts": config.get("num_local_experts", 0),
                "shapes": shapes,
                "types": chosen,
            }
    out.write_text(packed(models))


def packed(models: dict[str, Any]) -> str:
    """JSON in which each list of types is a string, a letter for a type."""
    kinds = sorted({k for m in models.values() for types in m["types"].values() for k in types})
    letters = {kind: chr(ord("A") + i) for i, kind in enumerate(kinds)}
    for model in models.values():
        model["types"] = {
            key: "".join(letters[kind] for kind in types) for key, types in model["types"].items()
        }
    return json.dumps({"letters": letters, "models": models}, indent=0) + "\n"


def recorded() -> dict[str, Any]:
    """The record: model -> its facts, `shapes` and `types`, file type -> a list as long."""
    data = json.loads(RECORD.read_text())
    kinds = {letter: kind for kind, letter in data["letters"].items()}
    for model in data["models"].values():
        model["types"] = {key: [kinds[c] for c in t] for key, t in model["types"].items()}
    return data["models"]


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
