"""Export: every tensor's values, codes carried over exactly, refusals, whole files only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from lowbit.kernels.affine import dequantize_affine
from lowbit.kernels.errors import UserError
from lowbit.quantize.checkpoint.load import Checkpoint
from lowbit.quantize.gguf import export as export_module
from lowbit.quantize.gguf import writer as writer_module
from lowbit.quantize.gguf.blocks import CODECS, Codec
from lowbit.quantize.gguf.blocks.legacy import SymmetricCodec
from lowbit.quantize.gguf.export import export_gguf
from lowbit.quantize.gguf.names import interleave
from lowbit.quantize.gguf.reader import GGUFFile
from lowbit.quantize.gguf.repack import can_repack, repack
from lowbit.quantize.quantized import Quantized
from lowbit.quantize.spec import Channel, Group, QuantSpec, TensorWise
from safetensors.torch import load_file, save_file
from torch import Tensor

from .gguf_models import llama_name, tiny_llama
from .runtime_models import quantize_folder, with_config

HEADS = {"q_proj": 4, "k_proj": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model")


def placed(module: str, rows: Tensor) -> Tensor:
    heads = HEADS.get(module.rpartition(".")[2])
    return interleave(rows, heads) if heads else rows


def tamper(folder: Path, **tensors: Tensor | None) -> Path:
    """Replace, add or (None) remove tensors of a one-file model; "__" in a name is a dot."""
    stored = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        stored.pop(name.replace("__", "."), None)
        if value is not None:
            stored[name.replace("__", ".")] = value
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


PLAIN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@pytest.mark.parametrize("file_type", PLAIN)
def test_every_tensor_holds_the_encoded_weight(model: Path, tmp_path: Path, file_type: str) -> None:
    report = export_gguf(model, tmp_path / "m.gguf", file_type, progress=False)
    file, weights = GGUFFile(tmp_path / "m.gguf"), load_file(model / "model.safetensors")
    assert len(file.tensors) == len(weights) == 3 + 2 * 9
    small = file_type[0] == "Q" and file_type != "Q8_0"
    for name, weight in weights.items():
        stored = f"{llama_name(name.removesuffix('.weight'))}.weight"
        kind = "F32" if weight.dim() == 1 else file_type
        if stored == "output.weight" and small:
            kind = "Q8_0"  # 64 columns do not fill a block of Q6_K
        assert file.tensors[stored].kind == kind
        x = placed(name.removesuffix(".weight"), weight).reshape(-1, weight.shape[-1])
        expected = CODECS[kind].decode(CODECS[kind].encode(x)).view(weight.shape)
        assert torch.equal(file.get(stored), expected), name
    assert report.nbytes == (tmp_path / "m.gguf").stat().st_size
    assert report.weights == sum(w.numel() for w in weights.values())
    data = sum(t.nbytes for t in file.tensors.values())
    assert report.bits_per_weight == 8 * data / report.weights
    assert sum(t.nbytes for t in report.totals.values()) == data
    assert (report.repacked, report.rounded_again) == ([], [])
    assert list(report.fallbacks) == (["output.weight"] if small else [])


def test_gguf_s_own_reader_agrees(model: Path, tmp_path: Path) -> None:
    export_gguf(model, tmp_path / "m.gguf", "Q5_1", progress=False)
    theirs, ours = gguf.GGUFReader(tmp_path / "m.gguf"), GGUFFile(tmp_path / "m.gguf")
    contents = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.keys == contents
    assert contents["general.file_type"] == 9
    assert contents["tokenizer.ggml.pre"] == "gpt-2"
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(ours.get(tensor.name), values.view(ours.tensors[tensor.name].shape))


def test_same_input_same_bytes(model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        export_gguf(model, tmp_path / name, "Q4_0", progress=False)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# scheme, group size, file type: combinations whose codes a GGUF block holds
EXACT = [
    ("W4A16", 32, "Q4_0"),
    ("W4A16", 64, "Q4_0"),
    ("W4A16", -1, "Q4_0"),
    ("W4A16", 32, "Q8_0"),
    ("W4A16", 32, "Q5_0"),
    ("W3A16", 32, "Q4_0"),
    ("W2A16", 32, "Q4_0"),
    ("W8A16", None, "Q8_0"),
    ("W4A16_ASYM", 32, "Q8_0"),
    ("W4A16_ASYM", 32, "Q5_0"),
]


@pytest.mark.parametrize(("scheme", "group_size", "file_type"), EXACT)
def test_codes_are_carried_over(
    model: Path, tmp_path: Path, scheme: str, group_size: int | None, file_type: str
) -> None:
    """Same codes, same scales up to float16, q/k rows moved: no second rounding."""
    if group_size == 64:  # the model's down_proj has 96 columns
        model = tiny_llama(tmp_path / "wide", intermediate_size=128)
    folder = quantize_folder(model, tmp_path / "q", scheme, group_size)
    report = export_gguf(folder, tmp_path / "m.gguf", file_type, progress=False)
    file, checkpoint = GGUFFile(tmp_path / "m.gguf"), Checkpoint(folder)
    assert sorted(report.repacked) == sorted(checkpoint.schemes)
    assert len(checkpoint.schemes) == 2 * 7
    assert report.rounded_again == []
    for module in checkpoint.schemes:
        q = checkpoint.quantized(module)
        half = q.scale.to(torch.float16)
        expected = placed(module, dequantize_affine(q.codes, half, q.zero_point))
        assert file.tensors[f"{llama_name(module)}.weight"].kind == file_type
        assert torch.equal(file.get(f"{llama_name(module)}.weight"), expected), module


@pytest.mark.parametrize("file_type", ["Q4_1", "Q5_1"])
@pytest.mark.parametrize("scheme", ["W4A16_ASYM", "W4A16", "W3A16_ASYM"])
def test_codes_are_carried_over_to_types_with_a_minimum(
    model: Path, tmp_path: Path, scheme: str, file_type: str
) -> None:
    """The codes are the same; the minimum, a multiple of the scale, is rounded to float16."""
    folder = quantize_folder(model, tmp_path / "q", scheme, 32)
    report = export_gguf(folder, tmp_path / "m.gguf", file_type, progress=False)
    file, checkpoint = GGUFFile(tmp_path / "m.gguf"), Checkpoint(folder)
    assert sorted(report.repacked) == sorted(checkpoint.schemes)
    for module in checkpoint.schemes:
        q = checkpoint.quantized(module)
        half = q.scale.to(torch.float16)
        offset = 1 << (q.spec.num_bits - 1)
        zero = q.zero_point.float() if q.zero_point is not None else torch.zeros_like(half).float()
        minimum = (-half.float() * (zero + offset)).to(torch.float16).float()
        d, m = (x.float().repeat_interleave(32, 1) for x in (half, minimum))
        expected = placed(module, d * (q.codes + offset) + m)
        assert torch.equal(file.get(f"{llama_name(module)}.weight"), expected), module
        values = placed(module, checkpoint.dense_weight(module))
        limit = 1e-3 * (half.float().max() * (1 << q.spec.num_bits)).item()
        assert (expected - values).abs().max() < limit


def test_what_does_not_fit_is_rounded_again_and_said(model: Path, tmp_path: Path) -> None:
    folder = quantize_folder(model, tmp_path / "q", "W4A16_ASYM", 32)
    report = export_gguf(folder, tmp_path / "m.gguf", "Q4_0", progress=False)
    assert len(report.rounded_again) == 14
    assert report.repacked == []
    file, checkpoint = GGUFFile(tmp_path / "m.gguf"), Checkpoint(folder)
    module = "model.layers.1.self_attn.k_proj"
    x = placed(module, checkpoint.dense_weight(module))
    expected = CODECS["Q4_0"].decode(CODECS["Q4_0"].encode(x))
    assert torch.equal(file.get("blk.1.attn_k.weight"), expected)


@pytest.mark.parametrize(
    ("spec", "columns", "codec", "fits"),
    [
        (QuantSpec(4, granularity=Group(32)), 64, "Q4_0", True),
        (QuantSpec(4, granularity=Group(48)), 96, "Q4_0", False),
        (QuantSpec(4, granularity=Group(16)), 64, "Q4_0", False),
        (QuantSpec(4), 80, "Q4_0", False),
        (QuantSpec(4, granularity=TensorWise()), 64, "Q4_0", True),
        (QuantSpec(5, granularity=Channel()), 64, "Q4_0", False),
        (QuantSpec(5, granularity=Channel()), 64, "Q5_0", True),
        (QuantSpec(8, granularity=Channel()), 64, "Q8_0", True),
        (QuantSpec(8, granularity=Channel()), 64, "Q4_1", False),
        (QuantSpec(5, granularity=Channel(), symmetric=False), 64, "Q5_1", True),
        (QuantSpec(4, granularity=Channel(), symmetric=False), 64, "Q4_0", False),
        (QuantSpec(4, granularity=Group(32)), 64, "F16", False),
        (QuantSpec(4, "float", Group(32)), 64, "Q4_0", False),
    ],
)
def test_what_fits_is_known_beforehand(
    spec: QuantSpec, columns: int, codec: str, fits: bool
) -> None:
    """Codes at both ends of the range: `can_repack` promises exactly what `repack` then does."""
    assert can_repack(spec, columns, CODECS[codec]) == fits
    if spec.type == "float":
        return
    low, high = -(1 << (spec.num_bits - 1)), (1 << (spec.num_bits - 1)) - 1
    codes = torch.full((4, columns), high, dtype=torch.int8)
    codes[:, ::2] = low
    rows = 1 if isinstance(spec.granularity, TensorWise) else 4
    scale = torch.full((rows, spec.groups(columns)), 0.25)
    zero = None if spec.symmetric else torch.full_like(scale, low, dtype=torch.int8)
    blocks = repack(Quantized(codes, scale, zero, spec), CODECS[codec])
    assert (blocks is not None) == fits
    if blocks is not None:
        assert torch.equal(CODECS[codec].decode(blocks), dequantize_affine(codes, scale, zero))


def test_tied_embedding_becomes_q6_k(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m", hidden_size=256, tie_word_embeddings=True)
    report = export_gguf(folder, tmp_path / "m.gguf", "Q4_0", progress=False)
    file = GGUFFile(tmp_path / "m.gguf")
    assert "output.weight" not in file.tensors
    assert file.tensors["token_embd.weight"].kind == "Q6_K"
    assert report.totals["Q6_K"].tensors == 1
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    codec = CODECS["Q6_K"]
    assert torch.equal(file.get("token_embd.weight"), codec.decode(codec.encode(weight)))


def test_columns_that_fill_no_block_stay_f16(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m", intermediate_size=80)
    report = export_gguf(folder, tmp_path / "m.gguf", "Q4_1", progress=False)
    down = ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight"]
    assert sorted(report.fallbacks) == [*down, "output.weight"]
    assert "80 columns" in report.fallbacks["blk.0.ffn_down.weight"]
    assert GGUFFile(tmp_path / "m.gguf").tensors["blk.0.ffn_down.weight"].kind == "F16"


def test_biases_go_along(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m", attention_bias=True, mlp_bias=True)
    biases = {
        name.replace(".", "__"): torch.randn(tensor.shape)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.endswith(".bias")
    }
    tamper(folder, **biases)
    export_gguf(folder, tmp_path / "m.gguf", "Q8_0", progress=False)
    file, weights = GGUFFile(tmp_path / "m.gguf"), load_file(folder / "model.safetensors")
    found = [n for n in file.tensors if n.endswith(".bias")]
    assert len(found) == 2 * 7
    for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"):
        name = f"model.layers.1.{module}"
        stored = file.get(f"{llama_name(name)}.bias")
        assert torch.equal(stored, placed(name, weights[f"{name}.bias"]))


def test_llama_3_rope_becomes_a_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    folder = tiny_llama(tmp_path / "m", rope_parameters=rope)
    export_gguf(folder, tmp_path / "m.gguf", "F16", progress=False)
    divisors = GGUFFile(tmp_path / "m.gguf").get("rope_freqs.weight")
    assert divisors.shape == (8,)
    assert divisors[0] == 1
    assert divisors[-1] == 8


ODD: list[tuple[dict[str, Tensor | None], str]] = [
    ({"model__norm__weight": None}, "no tensor 'model.norm.weight'"),
    ({"model__extra__weight": torch.ones(2)}, "'model.extra.weight' has no place"),
    ({"lm_head__weight_g_idx": torch.ones(64)}, "'lm_head.weight_g_idx' has no place"),
    ({"model__norm__weight": torch.ones(63)}, r"shape \(63,\), config.json means \(64,\)"),
    ({"lm_head__weight": torch.full((288, 64), float("nan"))}, "'lm_head.weight' holds NaN"),
    ({"lm_head__weight": torch.full((288, 64), float("inf"))}, "infinite"),
    ({"lm_head__weight": torch.full((288, 64), 7e4)}, "7e.04, beyond float16.*BF16"),
]


@pytest.mark.parametrize(("change", "message"), ODD, ids=lambda v: v if isinstance(v, str) else "")
def test_odd_weights_are_refused_and_leave_nothing(
    model: Path, tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tamper(folder, **change)
    out = tmp_path / "out"
    with pytest.raises(UserError, match=message):
        export_gguf(folder, out / "m.gguf", "Q4_0", progress=False)
    assert not out.exists() or list(out.iterdir()) == []


def test_refused_requests(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    with pytest.raises(UserError, match="unknown GGUF type 'Q9'"):
        export_gguf(model, out, "Q9", progress=False)
    with pytest.raises(UserError, match="no such model folder"):
        export_gguf(tmp_path / "absent", out, "F16", progress=False)
    with pytest.raises(UserError, match="is a folder"):
        export_gguf(model, tmp_path, "F16", progress=False)
    out.write_bytes(b"mine")
    with pytest.raises(UserError, match="--overwrite"):
        export_gguf(model, out, "F16", progress=False)
    assert out.read_bytes() == b"mine"
    export_gguf(model, out, "F16", overwrite=True, progress=False)
    assert out.read_bytes()[:4] == b"GGUF"


def test_what_llama_cpp_has_its_own_of_is_left_out(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models--someone--Tiny-Llama" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    attention = "model__layers__0__self_attn"
    tamper(
        folder, **{f"{attention}__{n}": torch.ones(1) for n in ("k_scale", "rotary_emb__inv_freq")}
    )
    export_gguf(folder, tmp_path / "m.gguf", "F16", progress=False)
    file = GGUFFile(tmp_path / "m.gguf")
    assert len(file.tensors) == 21
    assert file.keys["general.name"] == "Tiny-Llama"


def test_foreign_architecture_is_named(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with_config(folder, architectures=["OPTForCausalLM"])
    with pytest.raises(UserError, match="OPTForCausalLM"):
        export_gguf(folder, tmp_path / "m.gguf", "F16", progress=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_interrupted_export_leaves_the_old_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    out = tmp_path / "m.gguf"
    if overwrite:
        out.write_bytes(b"old")
    seen: list[str] = []

    def interrupted(*args: Any) -> Any:
        seen.append(args[1].modules[0])
        if len(seen) == 5:
            raise KeyboardInterrupt
        return encode(*args)

    encode = export_module.encode
    monkeypatch.setattr(export_module, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_gguf(model, out, "F16", overwrite=overwrite, progress=False)
    assert [f.name for f in tmp_path.iterdir()] == (["m.gguf"] if overwrite else [])
    assert not overwrite or out.read_bytes() == b"old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full to act a full disk")
def test_full_disk_is_a_clear_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m.gguf"
    start = writer_module.start_file

    def on_a_full_disk(path: Path, *args: Any) -> Any:
        path.symlink_to("/dev/full")
        return start(path, *args)

    monkeypatch.setattr(writer_module, "start_file", on_a_full_disk)
    with pytest.raises(UserError, match="cannot write .*m.gguf: No space left"):
        export_gguf(model, out, "F16", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_one_tensor_in_memory_at_a_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a tensor is encoded, the blocks of those before it are in the file already."""
    sizes: list[int] = []
    temporary = tmp_path / "m.gguf.partial" / "m.gguf"

    def watched(*args: Any) -> Any:
        sizes.append(temporary.stat().st_size)
        return encode(*args)

    encode = export_module.encode
    monkeypatch.setattr(export_module, "encode", watched)
    export_gguf(model, tmp_path / "m.gguf", "F32", progress=False)
    total = (tmp_path / "m.gguf").stat().st_size
    assert sizes == sorted(sizes)
    assert sizes[0] < total / 2
    assert sizes[-1] > total / 2


def test_report_as_json(model: Path, tmp_path: Path) -> None:
    from lowbit.quantize.cli.export import facts

    report = export_gguf(model, tmp_path / "m.gguf", "Q4_0", progress=False)
    plain = json.loads(json.dumps(facts(report)))
    assert plain["totals"]["Q4_0"]["tensors"] == report.totals["Q4_0"].tensors == 15
    assert plain["path"].endswith("m.gguf")


def test_symmetric_levels_cover_the_block_types() -> None:
    """The codecs' ranges are those that `can_repack` reasons with."""
    codecs: list[type[Codec]] = [CODECS[n] for n in ("Q4_0", "Q5_0", "Q8_0")]
    for codec, bits in zip(codecs, (4, 5, 8), strict=True):
        assert issubclass(codec, SymmetricCodec)
        assert (codec.low, codec.high) == (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
