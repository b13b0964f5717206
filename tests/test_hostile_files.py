"""Model folders made to harm whoever opens them: refused in bounded time and memory."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.calib.meta_model import build_on_meta, load_config
from lowbit.calib.safe_files import CONFIG, INDEX, DamagedFile, JsonLimits, parse_json, read_json
from lowbit.calib.safetensors_file import read_header
from lowbit.calib.shards import Shards
from lowbit.calib.text import load_tokenizer
from lowbit.kernels.errors import UserError
from lowbit.quantize import verify
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.checkpoint.patterns import NamePattern
from lowbit.quantize.checkpoint.side_files import copy_side_files, side_files
from safetensors import safe_open
from safetensors.torch import save_file

from .damage import Damage, an_index_of, config, group, weights, write
from .models import copied
from .whole_checkpoints import WHOLE, base_model

SECONDS, MEGABYTES = 20, 200


@pytest.fixture(scope="module")
def w4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    return WHOLE["w4"](base_model(root / "base"), root / "w4")


def header_of(text: bytes, data: bytes = b"") -> Damage:
    return write("model.safetensors", struct.pack("<Q", len(text)) + text + data)


def sparse(name: str, size: int) -> Damage:
    """A file that claims to be large and takes no disk."""

    def damage(folder: Path) -> None:
        with (folder / name).open("r+b") as f:
            f.truncate(size)

    return damage


def fifo(name: str) -> Damage:
    """A pipe that nobody writes to: whoever opens it waits for ever."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def link(name: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def outside(folder: Path) -> None:
    """The weights themselves are a link to a file elsewhere."""
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")


def pickled(folder: Path) -> None:
    torch.save({"weight": torch.zeros(4)}, folder / "model.safetensors")


def entry(**changes: Any) -> Damage:
    value = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}
    return header_of(json.dumps({"x": value}).encode(), b"1234")


MANY_VALUES = b'{"x":[' + b"{}," * 4_000_001 + b"{}]}"
HOSTILE: dict[str, Damage] = {
    "header of 2^62 bytes": write("model.safetensors", struct.pack("<Q", 1 << 62) + b"{}"),
    "header of -1 bytes": write("model.safetensors", b"\xff" * 8 + b"{}"),
    "header longer than the file": write("model.safetensors", struct.pack("<Q", 99) + b"{}"),
    "header within a sparse file": lambda f: [
        write("model.safetensors", struct.pack("<Q", 1 << 38))(f),
        sparse("model.safetensors", 1 << 40)(f),
    ],
    "header of many values": header_of(MANY_VALUES),
    "header of deep nesting": header_of(b"[" * 200_000),
    "header of nested objects": header_of(b'{"a":' * 200_000),
    "header with a key twice": header_of(b'{"x":1,"x":1}'),
    "header that is no JSON": header_of(b"{'x': 1}"),
    "header that is no UTF-8": header_of(b'{"\xff": 1}'),
    "header with half a character": header_of(b'{"\\ud800": 1}'),
    "shape that overflows": entry(shape=[1 << 32, 1 << 32]),
    "shape that overflows to nothing": entry(shape=[0, 1 << 62, 1 << 62], data_offsets=[0, 0]),
    "shape of a negative size": entry(shape=[-1]),
    "shape of half a size": entry(shape=[0.5]),
    "shape of true": entry(shape=[True]),
    "shape of many sizes": entry(shape=[1] * 1000),
    "offsets turned": entry(data_offsets=[4, 0]),
    "offsets beyond the file": entry(data_offsets=[0, 1 << 50], shape=[1 << 48]),
    "offsets that leave a gap": entry(data_offsets=[4, 8]),
    "offsets of text": entry(data_offsets=["0", "4"]),
    "unknown dtype": entry(dtype="F1"),
    "dtype of a list": entry(dtype=["F32"]),
    "entry of a list": header_of(b'{"x":[1]}'),
    "metadata of numbers": header_of(b'{"__metadata__":{"x":1}}'),
    "name that steers a terminal": header_of(json.dumps({"\x1b[2J": {}}).encode()),
    "name of a megabyte": header_of(json.dumps({"x" * (1 << 20): {}}).encode()),
    "a pickle in disguise": pickled,
    "an old pickle in disguise": write("model.safetensors", b"\x80\x02}q\x00X\x01\x00\x00\x00a."),
    "weights linked from outside": outside,
    "weights linked to a device": link("model.safetensors", "/dev/zero"),
    "weights in a pipe": fifo("model.safetensors"),
    "index of a path": an_index_of("../w4/model.safetensors"),
    "index of an absolute path": an_index_of("/etc/passwd"),
    "index of a backslash": an_index_of("..\\x.safetensors"),
    "index of no name": an_index_of(""),
    "index in a pipe": fifo("model.safetensors.index.json"),
    "config of many values": write("config.json", b"[" + b"[]," * 2_000_000 + b"[]]"),
    "config of deep nesting": write("config.json", '{"a":' * 100 + "1" + "}" * 100),
    "config of a terabyte": sparse("config.json", 1 << 40),
    "config with a key twice": write("config.json", '{"model_type": "llama", "model_type": "x"}'),
    "config of a long number": write("config.json", '{"a": ' + "9" * 10_000 + "}"),
    "config in a pipe": fifo("config.json"),
    "config linked to a device": link("config.json", "/dev/zero"),
    "a billion layers": config(num_hidden_layers=10**9),
    "a million experts a layer": config(num_local_experts=10**6),
    "padding beyond the vocabulary": config(pad_token_id=10**6),
    "architectures of a number": config(architectures=5),
    "heads of terabytes": config(head_dim=1 << 42),
    "a pattern that never ends": group(targets=["re:(.*a)*b"]),
    "codes of an object": weights(type={"a": 1}),
    "blocks of text": weights(strategy="block", block_structure=["a", {}]),
    "a tokenizer of a terabyte": sparse("tokenizer.json", 1 << 40),
    "a tokenizer linked from outside": link("tokenizer.json", "/etc/passwd"),
    "a tokenizer in a pipe": fifo("tokenizer_config.json"),
    "a template in a pipe": fifo("chat_template.jinja"),
    "links in a circle": link("chat_template.jinja", "chat_template.jinja"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders_are_refused(name: str, w4: Path, tmp_path: Path) -> None:
    """verify names an error; whoever reads what is hostile raises UserError."""
    folder = copied(w4, tmp_path / "model")
    HOSTILE[name](folder)
    report, refused = bounded(lambda: verify(folder))
    assert refused is None and not report.whole, (report, refused)
    for read in (Checkpoint, build, load_tokenizer, side_files):
        _, refusal = bounded(lambda read=read: read(folder))
        refused = refused or refusal
    assert isinstance(refused, UserError), "nobody refused it"


def build(folder: Path) -> Any:
    """The model on meta; its quantization is for others to judge."""
    model_config = load_config(folder)
    vars(model_config).pop("quantization_config", None)
    return build_on_meta(folder, model_config, torch.float32)


def bounded(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What `call` gives, or its UserError; fails when it takes too long or too much memory."""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        return call(), None
    except UserError as e:
        return None, e
    finally:
        seconds, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert seconds < SECONDS
        assert peak < MEGABYTES << 20, f"{peak >> 20} MiB"


def test_a_header_reads_as_the_library_reads_it(w4: Path, tmp_path: Path) -> None:
    tensors = {
        "half": torch.zeros(2, 3, dtype=torch.float4_e2m1fn_x2),
        "scalar": torch.tensor(1.5),
        "nothing": torch.zeros(0, 4, dtype=torch.int64),
        "float8": torch.ones(3, 5).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "x": "y"})
    for folder in (tmp_path, w4):
        path = folder / "model.safetensors"
        header, shards = read_header(path), Shards(folder)
        with safe_open(path, framework="pt") as theirs:
            assert set(header.tensors) == set(theirs.keys())
            assert header.metadata == (theirs.metadata() or {})
            for name in theirs.keys():  # noqa: SIM118 (not a dict)
                tensor = theirs.get_tensor(name)
                assert shards.info[name].shape == tuple(tensor.shape)
                assert shards.info[name].dtype == tensor.dtype
                assert header.tensors[name].nbytes == tensor.nbytes


@pytest.mark.parametrize(
    ("text", "limits", "said"),
    [
        (b'{"a": 1, "a": 2}', CONFIG, "'a' stands in one object twice"),
        (b'{"b": {"a": 1, "c": 1, "a": 2}}', CONFIG, "'a' stands in one object twice"),
        (b"[[[1]]]", JsonLimits(100, 100, 2), "deeper nesting"),
        (b"[1,2,3,4]", JsonLimits(100, 3), "up to 4 values"),
        (b"\xef\xbb\xbf{}", INDEX, "not valid JSON"),
        (b"", INDEX, "not valid JSON"),
        (b'"\\udc00"', INDEX, "not valid JSON"),
    ],
)
def test_json_beyond_its_limits_is_refused(text: bytes, limits: JsonLimits, said: str) -> None:
    with pytest.raises(DamagedFile, match=said):
        parse_json(text, Path("x.json"), limits)


def test_json_within_its_limits_is_read() -> None:
    text = b'{"a": [1, {"b": "\\ud83d\\ude00[[[["}], "c": null}'
    assert parse_json(text, Path("x"), JsonLimits(999, 99, 3)) == json.loads(text)


def test_a_file_beyond_its_size_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[" + " " * 100 + "]")
    with pytest.raises(DamagedFile, match="102 bytes"):
        read_json(tmp_path / "x.json", JsonLimits(50, 50))


def test_links_within_the_folder_are_followed(w4: Path, tmp_path: Path) -> None:
    folder = copied(w4, tmp_path / "model")
    (folder / "weights").mkdir()
    (folder / "model.safetensors").rename(folder / "weights" / "m.bin")
    (folder / "model.safetensors").symlink_to("weights/m.bin")
    assert Checkpoint(folder).schemes == Checkpoint(w4).schemes


LINKS: dict[str, Callable[[Path], object]] = {
    "out of the folder": link("notes.txt", "/etc/passwd"),
    "to the folder above": link("loop", ".."),
    "to the folder itself": link("loop", "."),
    "to nothing": link("notes.txt", "nothing"),
    "a pipe": fifo("notes.txt"),
    "deeper": lambda f: (f / "extra" / "x").symlink_to("/etc/hostname"),
}


@pytest.mark.parametrize("name", LINKS)
def test_side_files_from_elsewhere_are_not_copied(name: str, w4: Path, tmp_path: Path) -> None:
    folder = copied(w4, tmp_path / "model")
    assert "extra/notes.txt" in side_files(folder)
    LINKS[name](folder)
    (tmp_path / "out").mkdir()
    with pytest.raises(DamagedFile, match="is not copied"):
        copy_side_files(folder, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "pattern",
    [r"(a+)+$", r"(a|a)*$", r"(.*)\1", r"(?:a{1,2}){1,90}x", "a?" * 40 + "a" * 40, r".*" * 6,
     "(?:a|a)" * 40, "x" * 5000],
)  # fmt: skip
def test_patterns_that_could_take_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="pattern"):
        NamePattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r".*\.(q|k|v)_proj$", "model.layers.0.self_attn.q_proj"),
        (r"model\.layers\.([0-9]|1[0-9]|2[0-3])\.mlp\..*", "model.layers.12.mlp.up_proj"),
        (r".*layers.*self_attn.*(q|k|v)_proj.*", "model.layers.0.self_attn.v_proj"),
        (r"^lm_head$", "lm_head"),
        (r"(?:model\.)?layers\.\d+\.mlp\.experts\.\d+\.", "layers.3.mlp.experts.17.w1"),
    ],
)
def test_patterns_as_people_write_them_match(pattern: str, name: str) -> None:
    assert NamePattern(pattern).match(name) and not NamePattern(pattern).match("vision." + name[:3])


def test_the_slowest_pattern_that_is_let_through_ends() -> None:
    start = time.perf_counter()
    NamePattern(".*.*.*.*x").match("a" * 256)
    assert time.perf_counter() - start < SECONDS
