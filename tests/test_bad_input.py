"""What cannot be used is refused: one clear message, exit code 2, no traceback, no half output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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

from .command import Commands, in_new_interpreter
from .models import change_json, change_tensors, copied, deep_llama, hashes, not_causal
from .runtime_models import VOCAB

Damage = Callable[[Path], object]
INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers. Not to be changed: copy it."""
    return deep_llama(tmp_path_factory.mktemp("models") / "shallow", layers=2)


@pytest.fixture(scope="module")
def shallow_packed(
    shallow: Path,
    calibration: list[str],
    command: Commands,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("packed") / "shallow-w4"
    assert command("run", shallow, "-o", out, *calibration).code == 0
    return out


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A place for output, at which nothing may be when the test is over."""
    yield tmp_path / "out.gguf"
    assert not (tmp_path / "out.gguf").exists(), "a refused command left output"


@pytest.fixture
def asked(calibration: list[str], story: Path, out: Path) -> dict[str, Callable[..., list[Any]]]:
    """Each command by name: from a model to its arguments."""
    evaluated = ["--text", story, "--ctx", "64", "--windows", "1"]
    return {
        "run": lambda model: ["run", model, "-o", out, *calibration],
        "inspect": lambda model: ["inspect", model],
        "generate": lambda model: ["generate", model, "the dog", "--max-tokens", "2"],
        "eval": lambda model: ["eval", model, *evaluated],
        "export": lambda model: ["export", model, "-o", out],
    }


COMMANDS = ("run", "inspect", "generate", "eval", "export")


def write(name: str, content: str | bytes) -> Damage:
    """A damage that puts a file of this content into the folder."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def cut(end: int) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:end])

    return damage


def config(**changes: Any) -> Damage:
    return lambda folder: change_json(folder / "config.json", lambda c: c.update(changes))


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(2)}, folder / "pytorch_model.bin")


def an_index_of(*files: str) -> Damage:
    entries = ",".join(f'"tensor {i}": "{file}"' for i, file in enumerate(files))
    return write(INDEX, f'{{"weight_map": {{{entries}}}}}')


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
    asked: dict[str, Callable[..., list[Any]]],
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
    asked: dict[str, Callable[..., list[Any]]],
    shallow: Path,
    command: Commands,
    tmp_path: Path,
) -> None:
    absent = tmp_path / "nowhere"
    command(*asked[name](absent)).refuses("no such model folder", str(absent))
    file = shallow / "model.safetensors"
    command(*asked[name](file)).refuses(str(file), "file", "folder")


@pytest.mark.parametrize("name", ["run", "eval", "export"])
def test_hub_ids_without_a_hub(
    name: str, asked: dict[str, Callable[..., list[Any]]], command: Commands
) -> None:
    command(*asked[name]("nobody/nothing")).refuses("'nobody/nothing'", "Hub", "give its folder")
    for wrong in ("nobody/-nothing", "nobody/no--thing", "a/b/c", "./nothing", ""):
        command(*asked[name](wrong)).refuses("no such model folder", wrong)


def nan_in(name: str) -> Damage:
    return lambda f: change_tensors(f, lambda t: t[name][0].fill_(float("nan")))


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
    "no heads": (config(num_attention_heads=0), ("config.json", "zero")),
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
    asked: dict[str, Callable[..., list[Any]]],
    shallow: Path,
    command: Commands,
    tmp_path: Path,
) -> None:
    folder = copied(shallow, tmp_path / "model")
    apply, parts = UNFIT[damage]
    apply(folder)
    command(*asked["run"](folder)).refuses(*parts)


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
    asked: dict[str, Callable[..., list[Any]]],
    command: Commands,
    tmp_path: Path,
) -> None:
    model_class, its_config, part = NOT_CAUSAL[kind]
    folder = not_causal(tmp_path / "model", its_config, model_class)
    for name in ("run", "generate", "eval"):
        command(*asked[name](folder)).refuses(part)
    command(*asked["export"](folder)).refuses(model_class.__name__)


def test_a_model_without_linears(
    asked: dict[str, Callable[..., list[Any]]], command: Commands, tmp_path: Path
) -> None:
    gpt2 = GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    folder = not_causal(tmp_path / "model", gpt2, GPT2LMHeadModel)
    command(*asked["run"](folder)).refuses("GPT2LMHeadModel", "nn.Linear")


def test_a_quantized_model(
    asked: dict[str, Callable[..., list[Any]]], shallow_packed: Path, command: Commands
) -> None:
    command(*asked["run"](shallow_packed)).refuses("already quantized", "the original model")


def quantization(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda f: change_json(f / "config.json", lambda c: change(c["quantization_config"]))


def group(**changes: Any) -> Damage:
    return quantization(lambda q: q["config_groups"]["group_0"].update(changes))


def weights(**changes: Any) -> Damage:
    return quantization(lambda q: q["config_groups"]["group_0"]["weights"].update(changes))


def stored(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    name = f"{DOWN}.{part}"
    return lambda f: change_tensors(f, lambda t: t.update({name: change(t[name])}))


def lost(part: str) -> Damage:
    return lambda f: change_tensors(f, lambda t: t.pop(f"{DOWN}.{part}"))


# seen from the headers, so by inspect as well -> damage, parts of the message
BAD_HEADERS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "another method": (quantization(lambda q: q.update(quant_method="gptq")), ("'gptq'",)),
    "no object": (
        lambda f: change_json(f / "config.json", lambda c: c.update(quantization_config="int4")),
        ("quantization_config", "int4"),
    ),
    "no groups": (quantization(lambda q: q.update(config_groups={})), ("no config_group",)),
    "groups are a list": (quantization(lambda q: q.update(config_groups=[])), ("config_groups",)),
    "group of nothing": (group(weights=None), ("config_groups",)),
    "unknown format": (group(format="zip-quantized"), ("zip-quantized", "pack-quantized")),
    "bad pattern": (group(targets=["re:["]), ("config_groups",)),
    "targets nothing": (group(targets=["nonsuch"]), ("weight_scale", "config_group")),
    "bits are no number": (weights(num_bits="four"), ("config_groups", "four")),
    "too many bits": (weights(num_bits=17), ("17",)),
    "unknown strategy": (weights(strategy="star"), ("'star'",)),
    "group of no columns": (weights(group_size=0), ("group_size", "0")),
    "no scale": (lost("weight_scale"), (DOWN, "weight_scale")),
}
# seen when weights are read
BAD_TENSORS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "other bits": (weights(num_bits=3), ("weight_packed", "3 bits", "damaged")),
    "other groups": (weights(group_size=16), ("weight_scale", "groups take", "damaged")),
    "zero-points missing": (weights(symmetric=False), ("weight_zero_point",)),
    "no codes": (lost("weight_packed"), (DOWN,)),
    "codes cut": (stored("weight_packed", lambda t: t[:5]), (DOWN, "(5, 12)", "damaged")),
    "codes of floats": (stored("weight_packed", lambda t: t.float()), (DOWN, "float32", "damaged")),
    "scale is NaN": (stored("weight_scale", lambda t: t * float("nan")), (DOWN, "finite")),
    "scale cut": (stored("weight_scale", lambda t: t[:, :1]), (DOWN, "(64, 1)", "damaged")),
    "shape of one number": (stored("weight_shape", lambda t: t[:1]), (DOWN, "[64]", "damaged")),
    "shape turned": (stored("weight_shape", lambda t: t.flip(0)), (DOWN, "96 x 64", "damaged")),
    "shape below zero": (stored("weight_shape", lambda t: -t), (DOWN, "-64", "damaged")),
}


@pytest.mark.parametrize("damage", [*BAD_HEADERS, *BAD_TENSORS])
def test_damaged_checkpoints(
    damage: str,
    asked: dict[str, Callable[..., list[Any]]],
    shallow_packed: Path,
    command: Commands,
    tmp_path: Path,
) -> None:
    folder = copied(shallow_packed, tmp_path / "model")
    apply, parts = (BAD_HEADERS | BAD_TENSORS)[damage]
    apply(folder)
    readers = ["generate", "export", *(["inspect"] if damage in BAD_HEADERS else [])]
    for name in readers:
        command(*asked[name](folder)).refuses(*parts)


# options of run -> parts of the message
OPTIONS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--scheme", "W4A61"): ("'W4A61'", "did you mean W4A16", "W8A16"),
    ("--scheme", "nothing like it"): ("'nothing like it'", "known: W4A16"),
    ("--method", "gtpq"): ("'gtpq'", "did you mean 'gptq'"),
    ("--group-size", "7"): (
        "group size 7",
        "64 input columns of 'model.layers.0.self_attn.q_proj'",
        "14 of 14 linears",
        "32, 16, -1",
    ),
    ("--group-size", "64"): ("group size 64", f"96 input columns of '{DOWN[:13]}0", "2 of 14"),
    ("--group-size", "0"): ("group_size", "positive", "0"),
    ("--group-size", "-2"): ("group_size", "-2"),
    ("--targets", "nonsuch"): ("target 'nonsuch'", "'model.layers.0.self_attn.q_proj'"),
    ("--targets", "re:["): ("'re:['", "not a valid regular expression"),
    ("--ignore", "nonsuch"): ("ignore rule 'nonsuch'", "'model.layers.0.self_attn.q_proj'"),
    ("--ignore", "re:.*"): ("leave nothing to quantize",),
    ("--samples", "0"): ("samples", "at least 1", "0"),
    ("--samples", "100000"): ("story.txt", "100000", "lower --samples"),
    ("--seq-len", "1"): ("seq_len", "at least 2"),
    ("--seq-len", "257"): ("seq_len 257", "256 positions", "lower --seq-len"),
    ("--seed", "-1"): ("seed", "-1"),
    ("--seed", str(2**64)): ("seed", str(2**64)),
    ("--dtype", "bf16"): ("'bf16'", "did you mean 'bfloat16'"),
    ("--dtype", "int8"): ("'int8'", "known: auto, float32, bfloat16, float16"),
    ("--device", "toaster"): ("device 'toaster'", "use auto, cpu, cuda"),
    ("--device", "cuda:7"): ("device 'cuda:7'", "use auto, cpu, cuda"),
    ("--device", "meta"): ("device 'meta'", "use auto, cpu, cuda"),
    ("--order", "random"): ("'random'", "sequential, parallel"),
    ("--batch-size", "0"): ("batch_size", "at least 1"),
    ("--dampening-frac", "0"): ("dampening_frac", "over 0"),
    ("--dampening-frac", "nan"): ("dampening_frac", "nan"),
    ("--block-size", "0"): ("block_size", "at least 1"),
    ("--act-order", "dynamic"): ("act_order", "'static' or 'none'", "'dynamic'"),
    ("--no-static-groups",): ("act_order 'static' needs static_groups",),
    ("--scale-search", "guess"): ("scale_search", "'hessian' or 'minmax'", "'guess'"),
    ("--calib", "nonsuch.txt"): ("nonsuch.txt", "wikitext, pydoc"),
    ("--calib", "nobody/nothing"): ("'nobody/nothing'", "use pydoc"),
    ("--recipe", "nonsuch.yaml"): ("no such recipe file", "nonsuch.yaml"),
}


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_option_values(
    options: tuple[str, ...],
    asked: dict[str, Callable[..., list[Any]]],
    shallow: Path,
    command: Commands,
) -> None:
    command(*asked["run"](shallow), *options).refuses(*OPTIONS[options])


# a recipe file -> parts of the message
RECIPES: dict[str | bytes, tuple[str, ...]] = {
    "- gptq": ("recipe must be a mapping", "['gptq']"),
    "passes: 3": ("'passes' must be a list",),
    "passes: []": ("at least one pass",),
    "passes: [null]": ("passes[0] must be a mapping",),
    "passes: [{groupsize: 64}]": ("unknown key 'groupsize'", "did you mean 'group_size'"),
    "passes: [{group_size: '64'}]": ("passes[0]", "'group_size' must be int or null", "'64'"),
    "passes: [{scheme: 4}]": ("'scheme' must be str", "got 4"),
    "passes: [{targets: null}]": ("'targets' must be a list of strings", "None"),
    "passes: [{targets: Linear}]": ("'targets' must be a list of strings", "'Linear'"),
    "passes: [{ignore: [1]}]": ("'ignore' must be a list of strings",),
    "passes: [{targets: []}]": ("without targets",),
    "passes: [{gptq: null}]": ("passes[0].gptq must be a mapping",),
    "passes: [{gptq: {damp: 0.1}}]": ("passes[0].gptq", "unknown key 'damp'", "dampening_frac"),
    "passes: [{gptq: {static_groups: 1}}]": ("'static_groups' must be bool",),
    "passes: [{}, {}]": ("two passes target", "at most one weight quantizer"),
    "calibration: {samples: 3.5}": ("calibration", "'samples' must be int", "3.5"),
    "calibration: {samples: true}": ("'samples' must be int", "True"),
    "calibration: 7": ("calibration must be a mapping",),
    "execution: {device: cpu}": ("execution", "unknown key 'device'"),
    "pases: []": ("unknown key 'pases'", "did you mean 'passes'"),
    "passes: [": ("not valid YAML",),
    "!!python/object/apply:os.getcwd []": ("not valid YAML", "constructor"),
    b"\x00\xff\x80": ("not valid YAML",),
}


@pytest.mark.parametrize("text", RECIPES)
def test_recipe_files(
    text: str | bytes,
    asked: dict[str, Callable[..., list[Any]]],
    shallow: Path,
    command: Commands,
    tmp_path: Path,
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = command(*asked["run"](shallow), "--recipe", file).refuses(*RECIPES[text])
    assert len(message) < 400


# a text file -> parts of the message
TEXTS: dict[tuple[str, bytes], tuple[str, ...]] = {
    ("empty.txt", b""): ("empty.txt holds no text",),
    ("blank.txt", b" \n\n\t"): ("blank.txt holds no text",),
    ("short.txt", b"too short"): ("9 tokens", "give a longer text"),
    ("binary.txt", bytes(range(255, 0, -1)) * 20): ("binary.txt is not UTF-8 text",),
    ("cut.jsonl", b'{"text": "'): ("cut.jsonl, line 1 is not JSON",),
    ("other.jsonl", b'{"text": "a"}\n{"body": "b"}'): ("other.jsonl, line 2", '{"text": "..."}'),
    ("chat.jsonl", b'{"messages": [1]}'): ("chat.jsonl", "chat template"),
}


@pytest.mark.parametrize("name", ["run", "eval"])
@pytest.mark.parametrize(("file", "content"), TEXTS, ids=[name for name, _ in TEXTS])
def test_texts(
    file: str,
    content: bytes,
    name: str,
    asked: dict[str, Callable[..., list[Any]]],
    shallow: Path,
    command: Commands,
    tmp_path: Path,
) -> None:
    path = tmp_path / file
    path.write_bytes(content)
    option = {"run": "--calib", "eval": "--text"}[name]
    command(*asked[name](shallow), option, path).refuses(*TEXTS[file, content])


GENERATE: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--max-tokens", "0"): ("max_tokens", "at least 1"),
    ("--temperature", "-1"): ("temperature", "-1"),
    ("--temperature", "nan"): ("temperature", "nan"),
    ("--top-p", "0"): ("top_p", "above 0"),
    ("--seed", "-5"): ("seed", "-5"),
    ("--stop", ""): ("stop", "not empty"),
    ("--dtype", "int8"): ("dtype", "'int8'", "bfloat16"),
    ("--device", "meta"): ("device 'meta'", "use auto, cpu, cuda"),
}
EVAL: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--ctx", "1"): ("ctx", "at least 2"),
    ("--ctx", "257"): ("ctx 257", "256 positions", "lower --ctx"),
    ("--stride", "65"): ("stride", "64", "65"),
    ("--windows", "-1"): ("--windows", "-1"),
    ("--bos", "maybe"): ("bos", "none, first, each", "'maybe'"),
    ("--dtype", "int8"): ("dtype", "'int8'", "bfloat16"),
    ("--device", "meta"): ("device 'meta'", "use auto, cpu, cuda"),
    ("--text", "nonsuch.txt"): ("nonsuch.txt", "wikitext, pydoc"),
    ("--base", "/nowhere/at/all"): ("no such model folder", "/nowhere/at/all"),
    ("--report", "report.pdf"): ("FILE.md or FILE.json", "report.pdf"),
    ("--report", "/nowhere/at/all.md"): ("no such folder", "/nowhere/at"),
}
EXPORT: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--type", "Q4_X"): ("'Q4_X'", "Q4_0"),
    ("--to", "onnx"): ("'onnx'", "gguf"),
}


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        (name, options, parts)
        for name, table in (("generate", GENERATE), ("eval", EVAL), ("export", EXPORT))
        for options, parts in table.items()
    ],
    ids=lambda v: v if isinstance(v, str) else " ".join(v),
)
def test_option_values_of_other_commands(
    name: str,
    options: tuple[str, ...],
    parts: tuple[str, ...],
    asked: dict[str, Callable[..., list[Any]]],
    shallow_packed: Path,
    command: Commands,
) -> None:
    command(*asked[name](shallow_packed), *options).refuses(*parts)


def test_prompts(shallow: Path, command: Commands) -> None:
    command("generate", shallow, "", "--no-chat").refuses("prompt is empty")
    command("generate", shallow, "x" * 300, "--no-chat").refuses("300 tokens", "256", "shorten it")


def test_the_demo(shallow: Path, command: Commands, tmp_path: Path) -> None:
    demo = ["demo", "--fast", "--model", shallow, "-o"]
    command(*demo, tmp_path / "out", "--text", "nonsuch").refuses("'nonsuch'", "pydoc")
    file = tmp_path / "file"
    file.write_text("dear to me")
    command(*demo, file).refuses(str(file), "exists")
    assert file.read_text() == "dear to me"
    command("demo", "--model", tmp_path / "nowhere").refuses("no such model folder")


def test_output_that_exists(
    shallow: Path, shallow_packed: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    there = copied(shallow_packed, tmp_path / "there")
    run = ["run", shallow, *calibration]
    command(*run, "-o", there).refuses(str(there), "exists", "--overwrite")
    assert hashes(there) == hashes(shallow_packed)
    gguf = tmp_path / "there.gguf"
    gguf.write_text("dear to me")
    command("export", shallow, "-o", gguf).refuses(str(gguf), "exists", "--overwrite")
    assert gguf.read_text() == "dear to me"


def test_output_that_is_no_checkpoint_is_never_replaced(
    shallow: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.png").write_text("dear to me")
    file = tmp_path / "file"
    file.write_text("dear to me")
    for place in (photos, file):
        command("run", shallow, "-o", place, *calibration, "--overwrite").refuses(
            str(place), "not a model folder", "will not be replaced"
        )
    assert (photos / "cat.png").read_text() == file.read_text() == "dear to me"


def test_output_that_would_swallow_the_model(
    shallow: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    model = copied(shallow, tmp_path / "models" / "model")
    (tmp_path / "models" / "config.json").write_text("{}")
    before = hashes(tmp_path)
    for place in (model, model / "w4", model.parent):
        run = ["run", model, "-o", place, *calibration, "--overwrite"]
        command(*run).refuses(str(place), "overlap", "choose another output")
    command("run", ".", "-o", "w4", *calibration, cwd=model).refuses("w4", "overlap")
    assert hashes(tmp_path) == before


def test_output_in_places_that_do_not_take_it(
    shallow: Path, calibration: list[str], command: Commands, tmp_path: Path
) -> None:
    run = ["run", shallow, *calibration, "-o"]
    command(*run, tmp_path / "no" / "such" / "out").refuses("no such folder", "no/such")
    command(*run, tmp_path / ("long" * 80)).refuses("name too long", "shorter")
    if sys.platform == "linux":
        command(*run, "/proc/lowbit-out").refuses("/proc/lowbit-out", "choose another output")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts an empty file system of so many KiB at a folder, anew at each call."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a full disk is made by mounting a small tmpfs: needs root on Linux")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = False

    def unmount() -> None:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)

    def mount(kib: int) -> Path:
        nonlocal mounted
        unmount()
        mounted = False
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(place)], capture_output=True
        )
        if made.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
        mounted = True
        return place

    yield mount
    unmount()


def test_a_full_disk(
    tiny: Path,
    calibration: list[str],
    packed: Path,
    command: Commands,
    small_disk: Callable[[int], Path],
) -> None:
    """Filled at the first layer, in the middle, while the output is put together and at its side
    files; enlarged, the same command goes on to the same bytes."""
    needed = sum(f.stat().st_size for f in packed.rglob("*") if f.is_file()) // 1024
    seen = set()
    for kib in (8, 100, needed - 60, needed + 100):
        out = small_disk(kib) / "out"
        message = command("run", tiny, "-o", out, *calibration).refuses("No space left", "free")
        seen.add(next(p for p in ("assembled", "model.layers.") if p in message))
        assert not out.exists()
    assert seen == {"assembled", "model.layers."}
    subprocess.run(["mount", "-o", "remount,size=10m", str(out.parent)], check=True)
    again = command("run", tiny, "-o", out, *calibration)
    assert again.code == 0 and "resuming after 6 finished layers" in again.stderr
    assert hashes(out) == hashes(packed)


def test_in_a_fresh_interpreter(shallow: Path, calibration: list[str], tmp_path: Path) -> None:
    """The same refusals, exit codes and silence without the tests' own way of running commands."""
    out = tmp_path / "out"
    outcome = in_new_interpreter("run", shallow, "-o", out, *calibration, "--scheme", "W4A61")
    outcome.refuses("did you mean W4A16")
    assert outcome.stdout == ""
    broken = tmp_path / "broken"
    copied(shallow, broken)
    cut(-1000)(broken)
    in_new_interpreter("inspect", broken, "--json").refuses("truncated or damaged")
    assert not out.exists()


def test_faults_of_our_own_show_where(shallow: Path) -> None:
    """The other side of the promise: what is no user's mistake keeps its traceback and exits 1."""
    fault = "import lowbit.evals.size as s\ndef broken(_): raise KeyError('ours')\n"
    outcome = in_new_interpreter("inspect", shallow, before=fault + "s.size_report = broken")
    assert outcome.code == 1
    assert "KeyError: 'ours'" in outcome.stderr
    assert outcome.stderr.strip().splitlines()[-1].startswith("quantize: this is a fault of lowbit")


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["nonsuch"], "no such command 'nonsuch'"),
        (["run"], "missing argument"),
        (["run", "model"], "missing option"),
        (["run", "model", "-o", "out", "--nonsuch"], "no such option"),
        (["run", "model", "-o", "out", "--samples", "many"], "--samples"),
        (["generate", "model"], "missing argument"),
    ],
)
def test_command_lines(args: list[str], part: str, command: Commands) -> None:
    outcome = command(*args)
    assert outcome.code == 2
    assert part in outcome.stderr.lower()
    assert "Traceback" not in outcome.stderr and outcome.stdout == ""
