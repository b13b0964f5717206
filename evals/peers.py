"""Another quantizer on a model and on given token rows, by its own public interface.

    PYTHON peers.py NAME MODEL ROWS.json OUT       PYTHON: of an environment that has that quantizer
    PYTHON peers.py --list

ROWS.json: the calibration rows, lists of token ids of one length. OUT: a folder that lowbit or
transformers loads, with its tokenizer. This file stands alone: it imports neither lowbit nor,
before it is asked to, any of the quantizers, whose requirements clash. What a quantizer needs on a
machine without an accelerator, or with two cores, is done here and marked so.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[list[int]]
BATCH_SIZE = 8


def llm_compressor(recipe: Callable[[], list[Any]]) -> Callable[[str, Rows, Path], None]:
    """llm-compressor's `oneshot` in bfloat16, its output head left alone, on the rows in order."""

    def run(model: str, rows: Rows, out: Path) -> None:
        import torch
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.pipelines.cache import IntermediatesCache
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if not torch.cuda.is_available():  # its cache pins host memory, which needs an accelerator
            IntermediatesCache.pin_memory = lambda self, *args, **kwargs: None
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        masks = [[1] * len(row) for row in rows]
        oneshot(
            model=loaded,
            dataset=Dataset.from_dict({"input_ids": rows, "attention_mask": masks}),
            recipe=recipe(),
            max_seq_length=len(rows[0]),
            num_calibration_samples=len(rows),
            batch_size=BATCH_SIZE,
            shuffle_calibration_samples=False,
        )
        loaded.save_pretrained(out, save_compressed=True)
        AutoTokenizer.from_pretrained(model).save_pretrained(out)

    return run


def _grouped(scheme: str, size: int) -> dict[str, Any]:
    """A preset scheme of compressed-tensors for every linear, in groups of `size`."""
    from compressed_tensors.quantization import preset_name_to_scheme

    preset = preset_name_to_scheme(scheme, ["Linear"])
    assert preset.weights is not None, scheme
    preset.weights.group_size = size
    return {"config_groups": {"group_0": preset}, "ignore": ["lm_head"]}


def _preset(scheme: str) -> dict[str, Any]:
    return {"targets": "Linear", "scheme": scheme, "ignore": ["lm_head"]}


def _gptq(**scheme: Any) -> list[Any]:
    from llmcompressor.modifiers.gptq import GPTQModifier

    return [GPTQModifier(**scheme)]


def _plain(**scheme: Any) -> list[Any]:
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return [QuantizationModifier(**scheme)]


def _awq(**scheme: Any) -> list[Any]:
    from llmcompressor.modifiers.transform.awq import AWQModifier

    return [AWQModifier(), *_plain(**scheme)]


def _smoothquant(**scheme: Any) -> list[Any]:
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    return [SmoothQuantModifier(smoothing_strength=0.8), *_gptq(**scheme)]


def gptqmodel(bits: int, desc_act: bool) -> Callable[[str, Rows, Path], None]:
    """GPTQModel's GPTQ in symmetric groups of 64 on the CPU."""

    def run(model: str, rows: Rows, out: Path) -> None:
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its pool fails where it counts one
        from gptqmodel import GPTQModel
        from gptqmodel.quantization.config import GPTQConfig

        aware = {} if desc_act else {"act_group_aware": False}
        config = GPTQConfig(
            bits=bits, group_size=64, sym=True, desc_act=desc_act, device="cpu",
            offload_to_disk=False, **aware,
        )  # fmt: skip
        loaded = GPTQModel.load(model, config)
        batch = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
        loaded.quantize(batch, batch_size=BATCH_SIZE)
        loaded.save(out)

    return run


def auto_round(scheme: str, group_size: int, iters: int) -> Callable[[str, Rows, Path], None]:
    """AutoRound, its rounded weights written as plain floats. iters=0: its rounding to nearest."""

    def run(model: str, rows: Rows, out: Path) -> None:
        import torch
        from auto_round import AutoRound
        from torch.utils.data import DataLoader
        from transformers import AutoModelForCausalLM, AutoTokenizer

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(model)
        items: Any = [{"input_ids": torch.tensor(row)} for row in rows]
        batches = DataLoader(items, BATCH_SIZE)
        quantizer = AutoRound(
            loaded, tokenizer=tokenizer, scheme=scheme, group_size=group_size, iters=iters,
            dataset=batches, nsamples=len(rows), seqlen=len(rows[0]), batch_size=BATCH_SIZE,
            device_map="cpu",
        )  # fmt: skip
        quantizer.quantize_and_save(str(out), format="fake")
        for folder in [path for path in out.iterdir() if path.is_dir()]:  # named by the scheme
            for path in folder.iterdir():
                path.replace(out / path.name)
            folder.rmdir()
        tokenizer.save_pretrained(out)

    return run


PEERS: dict[str, Callable[[str, Rows, Path], None]] = {
    "llm-compressor/W4A16-g64/gptq": llm_compressor(lambda: _gptq(**_grouped("W4A16", 64))),
    "llm-compressor/W4A16_ASYM-g64/awq": llm_compressor(lambda: _awq(**_grouped("W4A16_ASYM", 64))),
    "llm-compressor/W8A8/smoothquant+gptq": llm_compressor(lambda: _smoothquant(**_preset("W8A8"))),
    "llm-compressor/FP8_DYNAMIC/rtn": llm_compressor(lambda: _plain(**_preset("FP8_DYNAMIC"))),
    "llm-compressor/NVFP4A16/rtn": llm_compressor(lambda: _plain(**_preset("NVFP4A16"))),
    "gptqmodel/W4A16-g64/gptq": gptqmodel(4, desc_act=True),
    "gptqmodel/W3A16-g64/gptq": gptqmodel(3, desc_act=True),
    "auto-round/W4A16-g64/rtn": auto_round("W4A16", 64, iters=0),
    "auto-round/W4A16-g64/signround": auto_round("W4A16", 64, iters=200),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("name", nargs="?", choices=PEERS)
    parser.add_argument("model", nargs="?")
    parser.add_argument("rows", nargs="?", type=Path)
    parser.add_argument("out", nargs="?", type=Path)
    args = parser.parse_args()
    if args.list:
        sys.stdout.write("\n".join(PEERS) + "\n")
        return
    if args.out is None:
        parser.error("give NAME MODEL ROWS.json OUT")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    PEERS[args.name](args.model, json.loads(args.rows.read_text(encoding="utf-8")), args.out)


if __name__ == "__main__":
    main()
