"""Faults of GGUF files are found by class, and a whole file has none."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from lowbit.kernels.errors import UserError
from lowbit.quantize import verify
from lowbit.quantize.gguf.export import export_gguf
from lowbit.quantize.gguf.reader import GGUFFile
from lowbit.quantize.gguf.to_hf import gguf_to_hf
from lowbit.quantize.verification.findings import FAULTS
from lowbit.quantize.verification.findings import GGUF as CLASSES
from lowbit.quantize.verification.gguf_blocks import FIELDS, FLOATS

from .gguf_models import shared_data, tiny_llama

UP = "blk.1.ffn_up.weight"
Kind = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    model = tiny_llama(folder / "model")
    export_gguf(model, folder / "m.gguf", "Q4_1", progress=False)
    return folder / "m.gguf"


Edit = Callable[[dict[str, Any], dict[str, tuple[np.ndarray, Kind]]], object]


def rewritten(whole: Path, out: Path, edit: Edit) -> None:
    """The file again, by gguf's own writer, with keys and tensors (bytes [rows, n]) edited."""
    file = GGUFFile(whole)
    keys = dict(file.keys)
    raw = whole.read_bytes()
    tensors = {
        name: (
            np.frombuffer(raw, np.uint8, t.nbytes, t.start).reshape(*t.shape[:-1], -1).copy(),
            Kind[t.kind],
        )
        for name, t in file.tensors.items()
    }
    edit(keys, tensors)
    writer = gguf.GGUFWriter(out, keys.pop("general.architecture", "llama"))
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def key(name: str, value: Any) -> Edit:
    return lambda keys, tensors: keys.update({name: value})


def no_key(name: str) -> Edit:
    return lambda keys, tensors: keys.pop(name)


def swapped(a: str, b: str, first: int = 0) -> Edit:
    """Two tensors under each other's names, from layer `first` on."""

    def edit(keys: dict[str, Any], tensors: dict[str, tuple[np.ndarray, Kind]]) -> None:
        for i in range(first, 2):
            one, other = f"blk.{i}.{a}.weight", f"blk.{i}.{b}.weight"
            tensors[one], tensors[other] = tensors[other], tensors[one]

    return edit


def scale_of_nan(keys: dict[str, Any], tensors: dict[str, tuple[np.ndarray, Kind]]) -> None:
    tensors[UP][0][3, :2] = np.frombuffer(np.float16("nan").tobytes(), np.uint8)


def fewer_columns(keys: dict[str, Any], tensors: dict[str, tuple[np.ndarray, Kind]]) -> None:
    data, kind = tensors[UP]
    tensors[UP] = (data[:32], kind)
    for i in (2, 3):
        tensors.update({n.replace("blk.0.", f"blk.{i}."): t for n, t in tensors.items()
                        if n.startswith("blk.0.")})  # fmt: skip
    keys["llama.block_count"] = 4


EDITS: dict[str, tuple[Edit, str, str]] = {
    "no architecture's sizes": (no_key("llama.block_count"), "GGUF key", "llama.block_count"),
    "size of zero": (key("llama.embedding_length", 0), "GGUF key", "embedding_length"),
    **{
        f"{name} of {value}": (key(f"llama.{name}", value), "GGUF key", f"llama.{name}")
        for name, value in (
            ("block_count", 1 << 31), ("block_count", 5000), ("attention.head_count", 1 << 31),
            ("attention.head_count", 3), ("attention.head_count", 0),
            ("attention.head_count_kv", 3), ("feed_forward_length", 1 << 31),
            ("context_length", 1 << 31), ("attention.layer_norm_rms_epsilon", 0.0),
            ("attention.layer_norm_rms_epsilon", float("nan")), ("rope.freq_base", float("nan")),
            ("rope.freq_base", -1.0), ("rope.freq_base", 0.0), ("rope.freq_base", float("inf")),
        )
    },
    "ff length of others": (key("llama.feed_forward_length", 128), "GGUF shape", "ffn_"),
    "head sizes of others": (key("llama.attention.key_length", 8), "GGUF import", "m.gguf"),
    "keys and queries swapped": (swapped("attn_k", "attn_q"), "GGUF shape", "attn_"),
    "keys and output swapped in one layer": (swapped("attn_k", "attn_output", 1), "GGUF shape",
                                             "blk.1.attn_"),
    "window that only others have": (key("llama.rope.scaling.type", "longrope"), "GGUF import",
                                     "m.gguf"),
    "tensor of another kind": (
        lambda k, t: t.update({"blk.0.other.weight": t["blk.0.attn_norm.weight"],
                               "blk.1.other.weight": t["blk.0.attn_norm.weight"]}),
        "GGUF import", "blk.0.other"),
    "norm of 1e30": (
        lambda k, t: t["output_norm.weight"][0].view(np.float32).fill(1e30), "GGUF block",
        "output_norm"),
    "no version": (no_key("general.quantization_version"), "GGUF version", "quantization_version"),
    "no embedding": (lambda k, t: t.pop("token_embd.weight"), "GGUF tensor missing", "token_embd"),
    "tensor of a layer": (lambda k, t: t.pop(UP), "GGUF tensor missing", UP),
    "other width": (key("llama.embedding_length", 128), "GGUF shape", "token_embd.weight"),
    "layer too many": (key("llama.block_count", 1), "GGUF shape", "blk.1."),
    "odd layer": (fewer_columns, "GGUF shape", UP),
    "too few tokens": (
        lambda k, t: k["tokenizer.ggml.tokens"].pop(), "GGUF tokenizer", "tokenizer.ggml.tokens"),
    "token twice": (
        lambda k, t: k["tokenizer.ggml.tokens"].__setitem__(1, k["tokenizer.ggml.tokens"][0]),
        "GGUF tokenizer", "tokenizer.ggml.tokens"),
    "types of others": (
        lambda k, t: k["tokenizer.ggml.token_type"].pop(), "GGUF tokenizer", "token_type"),
    "no merges": (no_key("tokenizer.ggml.merges"), "GGUF tokenizer", "merges"),
    "end beyond": (key("tokenizer.ggml.eos_token_id", 9999), "GGUF tokenizer", "eos_token_id"),
    "no pre-tokenizer": (no_key("tokenizer.ggml.pre"), "GGUF pre-tokenizer", "tokenizer.ggml.pre"),
    "scale of NaN": (scale_of_nan, "GGUF block", UP),
    "zeros": (lambda k, t: t[UP][0].fill(0), "all zero", UP),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_each_fault_is_found(name: str, whole: Path, tmp_path: Path) -> None:
    edit, fault, where = EDITS[name]
    rewritten(whole, tmp_path / "m.gguf", edit)
    report = verify(tmp_path / "m.gguf")
    found = [f for f in report.findings if f.fault == fault and where in f.where]
    assert found, report.findings
    assert (found[0].severity, found[0].consequence) == FAULTS[fault]


def test_a_whole_file_has_no_finding(whole: Path, tmp_path: Path) -> None:
    assert verify(whole).findings == () and verify(whole).layout == "gguf"
    rewritten(whole, tmp_path / "m.gguf", lambda keys, tensors: None)
    assert verify(tmp_path / "m.gguf").findings == ()


class Patch(NamedTuple):
    """`value` written at `offset` from the place of `marker`'s end (None: the file's start)."""

    marker: bytes | None
    offset: int
    value: bytes


def exchanged(whole: Path, out: Path) -> list[Any]:
    """What is found once keys and values of every layer have each other's names."""

    def edit(keys: dict[str, Any], tensors: dict[str, tuple[np.ndarray, Kind]]) -> None:
        for name in [n for n in tensors if ".attn_k." in n]:
            other = name.replace("attn_k", "attn_v")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    rewritten(whole, out, edit)
    return [(f.fault, f.severity) for f in verify(out).findings]


def test_exchanged_keys_and_values_are_told_by_their_norms(tmp_path: Path) -> None:
    """In a model where values go with what reads them, as in a trained one; a random one tells
    nothing."""
    model = tiny_llama(tmp_path / "model")
    export_gguf(model, tmp_path / "random.gguf", "F32", progress=False)
    assert exchanged(tmp_path / "random.gguf", tmp_path / "other.gguf") == []
    rng = np.random.default_rng(0)

    def train(keys: dict[str, Any], tensors: dict[str, tuple[np.ndarray, Kind]]) -> None:
        for i in range(2):
            k, v, output = (
                tensors[f"blk.{i}.attn_{part}.weight"][0].view(np.float32)
                for part in ("k", "v", "output")
            )
            size = np.exp(0.2 * rng.standard_normal((2, 16))).astype(np.float32)
            v *= size.reshape(-1, 1)
            output *= size.repeat(2, axis=0).reshape(1, -1)  # two heads read each of the values
            k *= np.exp(0.4 * rng.standard_normal((32, 1))).astype(np.float32)

    rewritten(tmp_path / "random.gguf", tmp_path / "trained.gguf", train)
    assert verify(tmp_path / "trained.gguf").findings == ()
    found = exchanged(tmp_path / "trained.gguf", tmp_path / "wrong.gguf")
    assert found == [("GGUF attention", "warning")]


@pytest.mark.parametrize(
    "name", ["stories260k/stories260K", "stories260k-ffn192/stories260K-ffn192"]
)
def test_exchanged_keys_and_values_of_a_trained_model_are_told(name: str, tmp_path: Path) -> None:
    whole = shared_data() / f"{name}-f32.gguf"
    assert "GGUF attention" not in {f.fault for f in verify(whole).findings}
    assert ("GGUF attention", "warning") in exchanged(whole, tmp_path / "wrong.gguf")


@pytest.fixture(scope="module")
def cut(whole: Path) -> list[Path]:
    """The same model in parts, in order. Not to be changed: copy them."""
    model = whole.parent / "model"
    report = export_gguf(
        model, whole.parent / "cut.gguf", "Q4_1", split_max_size=20_000, progress=False
    )
    return sorted(report.path.parent.glob("cut-*.gguf"))


def test_a_whole_file_in_parts_has_no_finding_from_any_part(whole: Path, cut: list[Path]) -> None:
    assert len(cut) > 3
    for part in cut:
        report = verify(part)
        assert report.findings == () and report.tensors == len(GGUFFile(whole).tensors)


def shorter(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


# how one part is broken -> the class of the fault that names it
BROKEN_PARTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda p: p.unlink(), "GGUF part"),
    "empty": (lambda p: shorter(p, 0), "GGUF container"),
    "cut in the header": (lambda p: shorter(p, 30), "GGUF container"),
    "cut in the data": (lambda p: shorter(p, p.stat().st_size - 100), "GGUF container"),
    "another part": (lambda p: p.write_bytes(sorted(p.parent.iterdir())[1].read_bytes()),
                     "GGUF part"),
}  # fmt: skip


@pytest.mark.parametrize("broken", [0, 2, -1])
@pytest.mark.parametrize("name", BROKEN_PARTS)
def test_a_broken_part_is_named(name: str, broken: int, cut: list[Path], tmp_path: Path) -> None:
    for part in cut:
        (tmp_path / part.name).write_bytes(part.read_bytes())
    damage, fault = BROKEN_PARTS[name]
    damage(tmp_path / cut[broken].name)
    for part in cut:
        if not (tmp_path / part.name).exists():
            continue
        report = verify(tmp_path / part.name)
        named = [f for f in report.findings if f.fault == fault and cut[broken].name in f.where]
        assert named and not report.whole, report.findings
        assert all(f.fault in ("GGUF part", "GGUF container") for f in report.findings)


def test_a_part_under_another_name_is_not_whole(cut: list[Path], tmp_path: Path) -> None:
    beyond = cut[0].name.replace("00001-of", "00099-of")
    for name in ("alone.gguf", "cut-00001-of-00099.gguf", beyond):
        (tmp_path / name).write_bytes(cut[0].read_bytes())
        (found,) = verify(tmp_path / name).findings
        assert (found.fault, found.where, found.severity) == ("GGUF part", name, "error")


TABLE = UP.encode()  # then: u32 dims, u64 each, u32 type, u64 offset
PATCHES: dict[str, tuple[Patch, str]] = {
    "magic": (Patch(None, 0, b"GGML"), "magic"),
    "version": (Patch(None, 4, struct.pack("<I", 9)), "version"),
    "tensor count": (Patch(None, 8, struct.pack("<Q", 1 << 60)), "counts"),
    "key count": (Patch(None, 16, struct.pack("<Q", 1 << 60)), "counts"),
    "key's length": (Patch(None, 24, struct.pack("<Q", 1 << 60)), "truncated"),
    "dimensions": (Patch(TABLE, 0, struct.pack("<I", 9)), "shape"),
    "shape that overflows": (Patch(TABLE, 4, struct.pack("<QQ", 1 << 47, 1 << 47)), "shape"),
    "shape of nothing": (Patch(TABLE, 4, struct.pack("<Q", 0)), "shape"),
    "columns of no block": (Patch(TABLE, 4, struct.pack("<Q", 63)), "block"),
    "type": (Patch(TABLE, 20, struct.pack("<I", 99)), "type"),
    "misaligned": (Patch(TABLE, 24, struct.pack("<Q", 33)), "alignment"),
    "overlap": (Patch(TABLE, 24, struct.pack("<Q", 0)), "overlap"),
    "beyond the end": (Patch(TABLE, 24, struct.pack("<Q", 1 << 40)), "truncated"),
    "alignment": (Patch(b"general.file_type", 0, struct.pack("<I", 13)), "metadata type"),
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_broken_container_is_named_and_refused(name: str, whole: Path, tmp_path: Path) -> None:
    patch, fault = PATCHES[name]
    data = bytearray(whole.read_bytes())
    at = patch.offset
    if patch.marker is not None:
        at += data.index(patch.marker) + len(patch.marker)
    data[at : at + len(patch.value)] = patch.value
    (tmp_path / "bad.gguf").write_bytes(data)
    (found,) = verify(tmp_path / "bad.gguf").findings
    assert found.fault == "GGUF container" and found.found.startswith(fault), found
    with pytest.raises(UserError, match="damaged or no GGUF file"):
        GGUFFile(tmp_path / "bad.gguf")


@pytest.mark.parametrize("kept", [0, 3, 0.3, 0.999])
def test_a_truncated_file_is_not_whole(kept: float, whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    end = kept if isinstance(kept, int) else int(kept * len(data))
    (tmp_path / "cut.gguf").write_bytes(data[:end])
    assert [f.fault for f in verify(tmp_path / "cut.gguf").findings] == ["GGUF container"]


def test_bytes_behind_the_last_tensor_are_named(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "long.gguf").write_bytes(whole.read_bytes() + b"x" * 100)
    report = verify(tmp_path / "long.gguf")
    assert [f.fault for f in report.findings] == ["GGUF trailing bytes"] and report.whole


@pytest.mark.parametrize("kind", sorted({*FIELDS, "MXFP4", "Q8_K"} - {"Q8_1", "Q1_0"}))
def test_a_scale_of_nan_is_found_in_every_type(kind: str, tmp_path: Path) -> None:
    """Where gguf can dequantize, its values are not finite just where the scale is not."""
    block, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    data = np.random.default_rng(0).integers(0, 60, (2, nbytes), dtype=np.uint8)
    if kind == "Q8_K":
        sums = data[:, 4:260].astype(np.int16).reshape(2, 16, 16).sum(-1).astype("<i2")
        data[:, 260:] = sums.view(np.uint8)
    assert _blocks(data, kind, tmp_path) == []
    places = FIELDS.get(kind, (0,))
    for at in places:
        bad = data.copy()
        nan = np.float32("nan").tobytes() if kind == "Q8_K" else np.float16("nan").tobytes()
        nan = b"\xff" if kind == "MXFP4" else nan
        bad[1, at : at + len(nan)] = np.frombuffer(nan, np.uint8)
        assert _blocks(bad, kind, tmp_path) == ["GGUF block"]
        if kind not in ("Q8_K", "MXFP4"):
            values = gguf.quants.dequantize(bad, Kind[kind])
            assert np.isfinite(values[0]).all() and not np.isfinite(values[1]).all()


def test_sums_of_codes_are_held_against_the_codes(tmp_path: Path) -> None:
    nbytes = gguf.GGML_QUANT_SIZES[Kind.Q8_K][1]
    data = np.zeros((1, nbytes), dtype=np.uint8)
    data[0, 4] = 7
    assert _blocks(data, "Q8_K", tmp_path) == ["GGUF block"]
    data[0, 260] = 7
    assert _blocks(data, "Q8_K", tmp_path) == []


def test_every_type_has_its_check() -> None:
    whole_numbers = {"I8", "I16", "I32", "I64"}
    others = {"IQ1_M", "NVFP4", "Q8_K", "MXFP4"}  # the first two hold no half float or exponent
    assert {k.name for k in gguf.GGML_QUANT_SIZES} <= {*FIELDS, *FLOATS, *whole_numbers, *others}


def _blocks(data: np.ndarray, kind: str, tmp_path: Path) -> list[str]:
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_type("adapter")
    writer.add_uint32("general.quantization_version", 2)
    writer.add_tensor("x", data, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [f.fault for f in verify(tmp_path / "k.gguf").findings]


TYPED = (
    "llama.rope.freq_base", "llama.rope.freq_base_swa", "llama.rope.dimension_count",
    "llama.rope.scaling.type", "llama.block_count", "llama.attention.head_count",
    "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type",
    "tokenizer.ggml.pre", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template", "tokenizer.chat_templates",
)  # fmt: skip


@pytest.mark.parametrize("name", TYPED)
def test_values_of_another_type_are_refused(name: str, whole: Path, tmp_path: Path) -> None:
    right = GGUFFile(whole).keys.get(name)
    for i, value in enumerate(("abc", True, 2.5, float("nan"), [1, 2], ["a b"])):
        if type(value) is type(right) is not list:
            continue
        file = tmp_path / f"{i}.gguf"
        rewritten(whole, file, key(name, value))
        verify(file)
        try:
            gguf_to_hf(file, tmp_path / f"{i}", progress=False)
        except UserError:
            continue
        assert right is None, value  # a key that does without, or takes what it is given


def test_every_class_is_tested() -> None:
    tested = {fault for _, fault, _ in EDITS.values()}
    assert tested - {"all zero"} == set(CLASSES) - {
        "GGUF container", "GGUF part", "GGUF trailing bytes", "GGUF attention"}  # fmt: skip
