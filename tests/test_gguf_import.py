"""Import: the very weights, config and tokenizer; transformers' own loader; damaged files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from lowbit.kernels.errors import UserError
from lowbit.quantize.gguf.export import export_gguf
from lowbit.quantize.gguf.reader import GGUFFile
from lowbit.quantize.gguf.to_hf import gguf_to_hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from .gguf_models import shared_data, tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model", eos_token_id=[263, 265])


@pytest.fixture(scope="module")
def gguf_file(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gguf") / "model.gguf"
    export_gguf(model, out, "F32", progress=False)
    return out


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def loaded_by_transformers(path: Path, dtype: torch.dtype) -> Any:
    """The GGUF file by transformers' loader in `dtype`, then computed in float32."""
    pytest.importorskip("accelerate", reason="transformers' GGUF loader needs accelerate")
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    plain = AutoModelForCausalLM.from_config(theirs.config, dtype=torch.float32)
    plain.load_state_dict(theirs.state_dict())
    return plain.eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_there_and_back(tmp_path: Path, tied: bool, bias: bool) -> None:
    source = tiny_llama(
        tmp_path / "source",
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
        rms_norm_eps=3e-6,
    )
    export_gguf(source, tmp_path / "m.gguf", "F32", progress=False)
    back = gguf_to_hf(tmp_path / "m.gguf", tmp_path / "back", dtype=torch.float32, progress=False)
    before, after = (load_file(f / "model.safetensors") for f in (source, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    models = [AutoModelForCausalLM.from_pretrained(f) for f in (source, back)]
    keep = ("rms_norm_eps", "rope_parameters", "head_dim", "tie_word_embeddings", "mlp_bias")
    for key in keep:
        assert getattr(models[0].config, key) == getattr(models[1].config, key), key
    ids = list(range(40))
    assert torch.equal(logits(models[0], ids), logits(models[1], ids))
    texts = ["the thing in 33", "<think>a</s>"]
    tokenizers = [AutoTokenizer.from_pretrained(f) for f in (source, back)]
    assert tokenizers[0](texts).input_ids == tokenizers[1](texts).input_ids


def test_generation_ends_where_the_model_s_did(gguf_file: Path, tmp_path: Path) -> None:
    back = gguf_to_hf(gguf_file, tmp_path / "back", progress=False)
    loaded = AutoModelForCausalLM.from_pretrained(back)
    assert loaded.generation_config.eos_token_id == [263, 265]
    assert loaded.dtype == torch.float16
    assert load_file(back / "model.safetensors")["lm_head.weight"].dtype == torch.float16


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "BF16"])
def test_transformers_loads_the_same_weights(model: Path, tmp_path: Path, kind: str) -> None:
    """transformers' GGUF loader on our file against our import of it, in float32 and float16."""
    export_gguf(model, tmp_path / "m.gguf", kind, progress=False)
    for dtype in (torch.float32, torch.float16):
        name = str(dtype)
        back = gguf_to_hf(tmp_path / "m.gguf", tmp_path / name, dtype=dtype, progress=False)
        ours = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
        theirs = loaded_by_transformers(tmp_path / "m.gguf", dtype)
        ids = list(range(0, 200, 5))
        torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["stories260k", "stories260k-ffn192"])
def test_files_made_by_others(tmp_path: Path, name: str) -> None:
    folder = shared_data() / name
    path = next(folder.glob("*.gguf"))
    back = gguf_to_hf(path, tmp_path / "back", dtype=torch.float32, progress=False)
    before, after = (load_file(f / "model.safetensors") for f in (folder, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n].float(), after[n]) for n in before)
    config, original = (json.loads((f / "config.json").read_text()) for f in (back, folder))
    for key in set(config) & set(original) - {"torch_dtype", "rope_scaling", "pad_token_id"}:
        assert config[key] == original[key], key
    ours, theirs = (Tokenizer.from_file(str(f / "tokenizer.json")) for f in (back, folder))
    text = (shared_data() / "text" / "tinystories_valid.txt").read_text()[:20000]
    for piece in [text, "  two spaces", "", "\n\nx", "caf\u00e9 \U0001f680", "<s>a</s> b"]:
        assert ours.encode(piece).ids == theirs.encode(piece).ids
        assert ours.decode(ours.encode(piece).ids) == theirs.decode(theirs.encode(piece).ids)


def test_types_that_only_gguf_decodes(gguf_file: Path, tmp_path: Path) -> None:
    """A Q4_K tensor of random bytes comes out as gguf dequantizes it."""
    data = np.random.default_rng(0).integers(0, 60, (2, 144), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = GGUFFile(tmp_path / "k.gguf").get("x")
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q4_K)
    assert values.shape == (2, 256)
    assert np.array_equal(values.numpy(), expected)


def refused(path: Path, tmp_path: Path, message: str) -> None:
    with pytest.raises(UserError, match=message):
        gguf_to_hf(path, tmp_path / "refused", progress=False)
    assert not (tmp_path / "refused").exists()
    assert not list(tmp_path.glob(".refused*"))


@pytest.mark.parametrize("kept", [0, 3, 20, 200, 3000, 0.5, 0.999])
def test_truncated_file(gguf_file: Path, tmp_path: Path, kept: float) -> None:
    data = gguf_file.read_bytes()
    size = kept if isinstance(kept, int) else int(kept * len(data))
    (tmp_path / "cut.gguf").write_bytes(data[:size])
    refused(tmp_path / "cut.gguf", tmp_path, r"cut\.gguf is damaged or no GGUF file")


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"GGML"),
        (4, struct.pack("<I", 99)),
        (4, struct.pack(">I", 3)),
        (8, struct.pack("<Q", 1 << 40)),
        (16, struct.pack("<Q", 1 << 40)),
        (24, struct.pack("<Q", 1 << 62)),
    ],
    ids=["magic", "version", "big endian", "tensor count", "key count", "key length"],
)
def test_damaged_header(gguf_file: Path, tmp_path: Path, offset: int, value: bytes) -> None:
    data = bytearray(gguf_file.read_bytes())
    data[offset : offset + len(value)] = value
    (tmp_path / "bad.gguf").write_bytes(data)
    refused(tmp_path / "bad.gguf", tmp_path, r"bad\.gguf is damaged or no GGUF file")


def test_every_flipped_metadata_byte_is_read_or_refused(gguf_file: Path, tmp_path: Path) -> None:
    """No byte of header and tensor table leads to anything but a file read or a UserError."""
    data = gguf_file.read_bytes()
    spots = [*range(0, 1500, 7), *range(len(data) - 300, len(data), 50)]
    table = data.index(b"token_embd.weight")
    for spot in [*spots, *range(table - 8, table + 400, 3)]:
        changed = bytearray(data)
        changed[spot] ^= 0x81
        (tmp_path / "bad.gguf").write_bytes(changed)
        try:
            file = GGUFFile(tmp_path / "bad.gguf")
            for name in list(file.tensors)[:3]:
                file.get(name)
        except UserError:
            pass


def rewritten(gguf_file: Path, out: Path, keys: dict[str, Any], drop: str = "") -> Path:
    """The file again with other metadata and without the tensor `drop`."""
    from lowbit.quantize.gguf.blocks import CODECS
    from lowbit.quantize.gguf.writer import Planned, start_file

    file = GGUFFile(gguf_file)
    kept = {n: t for n, t in file.tensors.items() if n != drop}
    plan = [Planned(n, t.shape, CODECS[t.kind]) for n, t in kept.items()]
    merged = {**file.keys, **keys}
    architecture = merged.pop("general.architecture")
    merged = {k: v for k, v in merged.items() if v is not None}
    writer = start_file(out, architecture, merged, plan)
    for name in kept:
        writer.write_tensor_data(file.get(name).numpy())
    writer.close()
    return out


@pytest.mark.parametrize(
    ("keys", "drop", "message"),
    [
        ({"general.architecture": "bert"}, "", "this file is a bert"),
        ({"llama.embedding_length": None}, "", "lacks the key 'llama.embedding_length'"),
        ({"llama.embedding_length": 128}, "", "its metadata means"),
        ({"llama.attention.head_count": [4, 4]}, "", "head_count = .4, 4., which is no"),
        ({"llama.attention.head_count": 0}, "", "head_count = 0, which is no"),
        ({"llama.block_count": 1}, "", "'blk.1.attn_k.weight' belongs to no llama"),
        ({"llama.block_count": 3}, "", "no tensor 'blk.2"),
        ({"llama.expert_count": 8}, "", "lacks the key 'llama.expert_used_count'"),
        ({"llama.rope.dimension_count": 8}, "", "rotates whole heads"),
        ({"llama.rope.scaling.type": "longrope"}, "", "longrope"),
        ({"split.count": 2}, "", "one of 2 parts"),
        ({"tokenizer.ggml.pre": "falcon"}, "", "falcon"),
        ({"tokenizer.ggml.model": "t5"}, "", "t5"),
        ({"tokenizer.ggml.merges": None}, "", "incomplete"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "", "incomplete"),
        ({}, "token_embd.weight", "no token_embd.weight"),
        ({}, "blk.0.ffn_up.weight", "no tensor 'blk.0.ffn_up.weight'"),
    ],
)
def test_files_that_are_no_llama(
    gguf_file: Path, tmp_path: Path, keys: dict[str, Any], drop: str, message: str
) -> None:
    path = rewritten(gguf_file, tmp_path / "odd.gguf", keys, drop)
    refused(path, tmp_path, message)


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "m")
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"] *= 1e5
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    export_gguf(source, tmp_path / "m.gguf", "BF16", progress=False)
    refused(tmp_path / "m.gguf", tmp_path, "holds values that torch.float16 cannot")
    gguf_to_hf(tmp_path / "m.gguf", tmp_path / "ok", dtype=torch.bfloat16, progress=False)


def test_existing_folder_is_kept(gguf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists"):
        gguf_to_hf(gguf_file, tmp_path, progress=False)
    with pytest.raises(UserError, match="no such GGUF file"):
        gguf_to_hf(tmp_path / "absent.gguf", tmp_path / "x", progress=False)
