"""Options, recipes, texts and prompts that cannot be used are refused with value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from .command import Asked, Commands
from .damage import DOWN

# options of run -> parts of the message
OPTIONS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--scheme", "W4A61"): ("'W4A61'", "did you mean W4A16", "W8A16"),
    ("--scheme", "nothing like it"): ("'nothing like it'", "known: W2A16"),
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
    ("--act-order", "dynamic"): ("act_order", "known: static, none", "'dynamic'"),
    ("--no-static-groups",): ("act_order 'static' needs static_groups",),
    ("--scale-search", "guess"): ("scale_search", "known: hessian, minmax", "'guess'"),
    ("--calib", "nonsuch.txt"): ("nonsuch.txt", "wikitext, pydoc"),
    ("--calib", "nobody/nothing"): ("'nobody/nothing'", "use pydoc"),
    ("--calib", "/"): ("/ is a folder", "name a file in it"),
    ("--recipe", "nonsuch.yaml"): ("no such recipe file", "nonsuch.yaml"),
    ("--recipe", "/"): ("/ is a folder, not a recipe file",),
}


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_option_values(
    options: tuple[str, ...],
    asked: dict[str, Asked],
    shallow: Path,
    command: Commands,
) -> None:
    command(*asked["run"](shallow), *options).refuses(*OPTIONS[options])


# a recipe file -> parts of the message
RECIPES: dict[str | bytes, tuple[str, ...]] = {
    "": ("is empty", "--dump-recipe prints one"),
    "# passes: []": ("is empty", "--dump-recipe prints one"),
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
    "passes: [{scheme: 2024-13-45}]": ("not valid YAML", "month"),
    "!!python/object/apply:os.getcwd []": ("not valid YAML", "constructor"),
    b"\x00\xff\x80": ("not valid YAML",),
}


@pytest.mark.parametrize("text", RECIPES)
def test_recipe_files(
    text: str | bytes,
    asked: dict[str, Asked],
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
    asked: dict[str, Asked],
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
    asked: dict[str, Asked],
    shallow_packed: Path,
    command: Commands,
) -> None:
    command(*asked[name](shallow_packed), *options).refuses(*parts)


def test_prompts(shallow: Path, command: Commands) -> None:
    command("generate", shallow, "", "--no-chat").refuses("prompt is empty")
    command("generate", shallow, "x" * 300, "--no-chat").refuses("300 tokens", "256", "shorten it")


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
