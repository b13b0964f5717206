"""What GPTQModel does with a checkpoint: run by tests/test_gptqmodel.py in a Python that has it.

read FOLDER...: logits and weights, as FOLDER.read.safetensors. load FOLDER...: the same by
transformers' loader. quantize MODEL FOLDER OPTIONS [FOLDER OPTIONS ...]: OPTIONS are those of
QuantizeConfig, as JSON.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # 7.6 fails on two cores without it
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it would compile for minutes

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # type: ignore[import-not-found]
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

IDS = torch.tensor([[1, 2, 3, 4, 5, 60, 70, 116, 104, 101]])
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "


def read(folder: str, by_transformers: bool) -> dict[str, torch.Tensor]:
    if by_transformers:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, device_map="cpu")
    else:
        with open(f"{folder}/config.json") as f:
            method = json.load(f)["quantization_config"]["quant_method"]
        backend = BACKEND.TORCH_AWQ if method == "awq" else BACKEND.TORCH
        model = GPTQModel.load(folder, device="cpu", backend=backend, dtype=torch.float16).model
    found = {}
    with torch.no_grad():
        found["logits"] = model(IDS).logits.float()
        for name, module in model.named_modules():
            if type(module).__name__.endswith("Linear") and type(module) is not torch.nn.Linear:
                ones = torch.eye(module.in_features, dtype=torch.float16)
                found[f"weight {name}"] = module(ones).float().T.contiguous()
    return found


def quantize(source: str, *made: str) -> None:
    for folder, options in zip(made[::2], made[1::2], strict=True):
        model = GPTQModel.load(source, QuantizeConfig(**json.loads(options)), device="cpu")
        model.quantize([TEXT * 4] * 8, batch_size=1)
        model.save(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *arguments = sys.argv[1:]
    if what == "quantize":
        quantize(*arguments)
    else:
        for folder in arguments:
            save_file(read(folder, what == "load"), f"{folder}.{what}.safetensors")
