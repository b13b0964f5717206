"""Folders and models that cannot be used: one clear message, exit code 2, no half output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from .command import COMMANDS, Asked, Commands
from .damage import (
    DOWN,
    INDEX,
    Damage,
    an_index_of,
    config,
    cut,
    nan_in,
    only_pickles,
    write,
)
from .models import change_json, change_tensors, copied, not_causal
from .runtime_models import VOCAB

# what every command must refuse -> damage, parts of the message
UNREADABLE: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ("no config.json", "Hugging Face")),
    "config is not JSON": (write("config.json", "{"), ("config.json", "JSON")),
    "pickled weights only": (only_pickles, (".bin", "runs the code in it", "safetensors first")),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("no .safetensors file",)),
    "index names an absent file": (
        an_index_of("model.safetensors", "gone.safetensors"),
        ("1 of 2 files", "gone.safetensors", "download the model again"),
    ),
    "index names an absent tensor": (
        an_index_of("model.safetensors"),
        ("'tensor 0'", "download the model again"),
    ),
    "index is none": (write(INDEX, '{"weight_map": ["a"]}'), ("not a safetensors index",)),
    "index is not text": (write(INDEX, b"\xff\xfe"), ("not a safetensors index",)),
    "truncated data": (cut(-1000), ("model.safetensors is truncated or damaged", "again")),
    "truncated header": (cut(100), ("model.safetensors is truncated or damaged", "again")),
    "empty file": (cut(0), ("model.safetensors is truncated or damaged", "again")),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("damage", UNREADABLE)
def test_unreadable_folders(
    damage: str,
    name: str,
    asked: dict[str, Asked],
    shallow: Path,
    command: Commands,
    tmp_path: Path,
) -> None:
    folder = copied(shallow, tmp_path / "model")
    apply, parts = UNREADABLE[damage]
    apply(folder)
    command(*asked[name](folder)).refuses(*parts)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_no_folder(
    name: str,
    asked: dict[str, Asked],
    shallow: Path,
    command: Commands,
    tmp_path: Path,
) -> None:
    absent = tmp_path / "nowhere"
    command(*asked[name](absent)).refuses("no such model folder", str(absent))
    file = shallow / "model.safetensors"
    command(*asked[name](file)).refuses(str(file), "file", "folder")


@pytest.mark.parametrize("name", ["run", "eval", "export"])
def test_hub_ids_without_a_hub(name: str, asked: dict[str, Asked], command: Commands) -> None:
    command(*asked[name]("nobody/nothing")).refuses("'nobody/nothing'", "Hub", "give its folder")
    for wrong in ("nobody/-nothing", "nobody/no--thing", "a/b/c", "./nothing", ""):
        command(*asked[name](wrong)).refuses("no such model folder", wrong)


CUSTOM_CODE = {
    "model_type": "homemade",
    "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
}

# what cannot be calibrated -> damage, parts of the message
UNFIT: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "NaN in a linear": (nan_in(f"{DOWN}.weight"), (f"'{DOWN}.weight'", "NaN", "again")),
    "NaN in the embedding": (nan_in("model.embed_tokens.weight"), ("embed_tokens", "NaN")),
    "NaN in the last norm": (nan_in("model.norm.weight"), ("'model.norm.weight'", "NaN")),
    "missing tensor": (
        lambda f: change_tensors(f, lambda t: t.pop(f"{DOWN}.weight")),
        (f"'{DOWN}.weight'", "download the model again"),
    ),
    "too few layers stored": (config(num_hidden_layers=3), ("'model.layers.2.", "again")),
    "stored as integers": (
        lambda f: change_tensors(
            f, lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"].to(torch.int8)})
        ),
        (f"'{DOWN}.weight'", "int8", "the original one"),
    ),
    "other shapes": (config(intermediate_size=160), ("(96, 64)", "(160, 64)", "config.json")),
    "field of a wrong type": (config(hidden_size="many"), ("config.json", "hidden_size", "'many'")),
    "field out of range": (config(hidden_size=-64), ("config.json", "-64")),
    "no heads": (config(num_attention_heads=0), ("config.json", "num_attention_heads = 0")),
    "unknown model type": (config(model_type="nonsuch"), ("config.json", "nonsuch")),
    "needs code of its own": (config(**CUSTOM_CODE), ("config.json", "custom code")),
    "no tokenizer": (
        lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")],
        ("no tokenizer", "copy the original model's tokenizer files there"),
    ),
    "damaged tokenizer": (write("tokenizer.json", "{"), ("no tokenizer that transformers can",)),
    "tokenizer of another model": (
        lambda f: change_json(f / "tokenizer.json", lambda t: t["model"]["vocab"].update(th=5000)),
        ("5000", f"{VOCAB} embeddings", "another model's tokenizer"),
    ),
}


@pytest.mark.parametrize("damage", UNFIT)
def test_models_that_cannot_be_quantized(
    damage: str,
    asked: dict[str, Asked],
    shallow: Path,
    command: Commands,
    tmp_path: Path,
) -> None:
    folder = copied(shallow, tmp_path / "model")
    apply, parts = UNFIT[damage]
    apply(folder)
    command(*asked["run"](folder)).refuses(*parts)
    if not damage.startswith("NaN"):  # a plan reads no weight
        command(*asked["plan"](folder)).refuses(*parts)


SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96,
}  # fmt: skip
NOT_CAUSAL: dict[str, tuple[Any, Any, str]] = {
    "BERT": (BertForMaskedLM, BertConfig(**SIZES), "BertForMaskedLM, not a causal language"),
    "T5": (
        T5ForConditionalGeneration,
        T5Config(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4),
        "encoder-decoder",
    ),
    "ViT": (
        ViTForImageClassification,
        ViTConfig(**{k: v for k, v in SIZES.items() if k != "vocab_size"}),
        "not a causal language model",
    ),
    "classifier": (
        LlamaForSequenceClassification,
        LlamaConfig(**SIZES),
        "LlamaForSequenceClassification, not a causal language model",
    ),
}


@pytest.mark.parametrize("kind", NOT_CAUSAL)
def test_other_kinds_of_model(
    kind: str,
    asked: dict[str, Asked],
    command: Commands,
    tmp_path: Path,
) -> None:
    model_class, its_config, part = NOT_CAUSAL[kind]
    folder = not_causal(tmp_path / "model", its_config, model_class)
    for name in ("plan", "run", "generate", "eval"):
        command(*asked[name](folder)).refuses(part)
    command(*asked["export"](folder)).refuses(model_class.__name__)


def test_a_model_without_linears(
    asked: dict[str, Asked], command: Commands, tmp_path: Path
) -> None:
    gpt2 = GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    folder = not_causal(tmp_path / "model", gpt2, GPT2LMHeadModel)
    command(*asked["run"](folder)).refuses("GPT2LMHeadModel", "nn.Linear")


def test_a_quantized_model(
    asked: dict[str, Asked], shallow_packed: Path, command: Commands
) -> None:
    command(*asked["run"](shallow_packed)).refuses("already quantized", "the original model")
