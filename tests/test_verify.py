"""Every class of fault is found in a checkpoint that is broken that way, and none in whole ones."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lowbit.calib.config_sizes import check_sizes
from lowbit.kernels.errors import UserError
from lowbit.kernels.packing import pack_bits
from lowbit.quantize import verify
from lowbit.quantize.checkpoint.layouts.awq import unpack_interleaved
from lowbit.quantize.checkpoint.manifest import MANIFEST, write_manifest
from lowbit.quantize.verification.findings import AGAINST, FAULTS, GGUF
from safetensors.torch import load_file, save_file
from torch import Tensor

from .damage import Damage, config, group, quantization, weights, write
from .models import change_json, change_tensors, copied
from .whole_checkpoints import LIMITED, WHOLE, base_model

INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
EMBEDDING = "model.embed_tokens.weight"


class Case(NamedTuple):
    """whole: a key of WHOLE. fault: the class that must be found. where: part of what is named."""

    whole: str
    damage: Damage
    fault: str
    where: str


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A whole checkpoint by its name in WHOLE, made once. Not to be changed: copy it."""
    root = tmp_path_factory.mktemp("wholes")
    base = base_model(root / "base")

    def whole(name: str) -> Path:
        folder = root / name.replace(" ", "-")
        if name == "base":
            return base
        return folder if folder.exists() else (WHOLE | LIMITED)[name](base, folder)

    return whole


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    return lambda folder: change_tensors(folder, change)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return tensors(lambda t: t.update({name: change(t[name])}))


def filled(name: str, value: float) -> Damage:
    """The first number of a tensor set to `value`."""

    def fill(t: Tensor) -> Tensor:
        t.view(-1)[0] = value
        return t

    return changed(name, fill)


def without(name: str) -> Damage:
    return tensors(lambda t: t.pop(name))


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def header(change: Callable[[dict[str, Any]], object], raw: bytes | None = None) -> Damage:
    """The header of model.safetensors changed as a dict, or replaced by `raw`."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode() if raw is None else raw
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return damage


def index(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda folder: change_json(folder / INDEX, change)


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def second_copy(folder: Path) -> None:
    """A tensor of the first shard in the last one too."""
    name, tensor = next(iter(load_file(first_shard(folder)).items()))
    last = sorted(folder.glob("model-*.safetensors"))[-1]
    save_file({**load_file(last), name: tensor}, last, metadata={"format": "pt"})


def as_pickle(folder: Path) -> None:
    torch.save({"weight": torch.zeros(4)}, folder / "model.safetensors")


def unlisted(name: str) -> Damage:
    """The manifest without its entry for a file."""
    return lambda folder: change_json(folder / MANIFEST, lambda m: m["files"].pop(name))


def unlisted_shard(folder: Path) -> None:
    write_manifest(folder)
    unlisted(first_shard(folder).name)(folder)


def linked_out(folder: Path) -> None:
    outside = folder.parent / "outside.jinja"
    outside.write_text("secret")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(outside)


def dense_again(t: dict[str, Tensor]) -> None:
    shape = t[f"{Q}.weight_shape"].tolist()
    for leaf in ("weight_packed", "weight_scale", "weight_shape"):
        del t[f"{Q}.{leaf}"]
    t[f"{Q}.weight"] = torch.randn(shape)


def older_words(t: dict[str, Tensor]) -> None:
    """3-bit codes as compressed-tensors once packed them: ten to a word."""
    for name in [n for n in t if n.endswith("weight_packed")]:
        rows, columns = t[name.replace("packed", "shape")].tolist()
        t[name] = torch.zeros(rows, -(-columns // 10), dtype=torch.int32)


def in_plain_order(part: str) -> Callable[[dict[str, Tensor]], None]:
    """AWQ's codes or zero-points packed from output 0 to 7 of each eight."""

    def repack(t: dict[str, Tensor]) -> None:
        for name in [n for n in t if n.endswith(part)]:
            t[name] = pack_bits(unpack_interleaved(t[name]), 4)

    return repack


def everywhere(ending: str, value: float) -> Damage:
    return tensors(lambda t: [t[n].fill_(value) for n in t if n.endswith(ending)])


def labelled(name: str) -> Damage:
    return quantization(lambda q: q.update(checkpoint_format=name))


def chat_tokens(folder: Path) -> None:
    change_json(folder / "tokenizer.json", lambda t: t["added_tokens"][0].update(content="[INST]"))
    (folder / "chat_template.jinja").unlink()


SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip
LISTED = ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja")
HUGE = {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}
FILE_CASES = [
    Case("sharded", lambda f: first_shard(f).unlink(), "file missing", "model-00001"),
    Case("sharded", lambda f: [first_shard(f).unlink(), (f / INDEX).unlink()], "file missing",
         "model-00001"),
    Case("plain", removed("model.safetensors"), "file missing", "model.safetensors"),
    Case("manifest", removed("NOTICE"), "file missing", "NOTICE"),
    Case("manifest", write("NOTICE", "rides alone\n"), "file changed", "NOTICE"),
    Case("manifest", write("NOTICE", "short"), "file changed", "NOTICE"),
    Case("manifest", write("other.txt", "new"), "file extra", "other.txt"),
    *(Case("manifest", unlisted(name), "file not listed", name) for name in LISTED),
    Case("sharded", unlisted_shard, "file not listed", "model-00001"),
    Case("manifest", lambda f: change_json(f / MANIFEST, lambda m: m["files"].clear()),
         "file not listed", "model.safetensors"),
    Case("plain", lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "damaged file",
         "model.safetensors"),
    Case("plain", write("model.safetensors", b"1234"), "damaged file", "model.safetensors"),
    Case("plain", header(lambda h: h["model.norm.weight"].update(data_offsets=[0, 256])),
         "damaged file", EMBEDDING),
    Case("plain", header(lambda h: h.pop("model.norm.weight")), "damaged file", "model.safe"),
    Case("plain", header(lambda h: h.update(huge=HUGE)), "damaged file", "huge"),
    Case("plain", header(lambda h: h["model.norm.weight"].update(dtype="F128")), "damaged file",
         "model.norm.weight"),
    Case("plain", header(lambda h: None, b'{"a":1,"a":2}'), "damaged file", "model.safetensors"),
    Case("plain", header(lambda h: None, b"[" * 5000), "damaged file", "model.safetensors"),
    Case("plain", as_pickle, "pickle", "model.safetensors"),
    Case("plain", lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickle",
         "pytorch_model.bin"),
    Case("plain", linked_out, "link out of the folder", "chat_template.jinja"),
    Case("plain", write("config.json", "{"), "JSON", "config.json"),
    Case("plain", write("tokenizer_config.json", "[" * 5000), "JSON", "tokenizer_config.json"),
    Case("sharded", write(INDEX, "[]"), "JSON", INDEX),
    Case("sharded", index(lambda i: i.update(weight_map=[])), "index", INDEX),
    Case("sharded", index(lambda i: i["weight_map"].pop("model.norm.weight")), "index",
         "model.norm.weight"),
    Case("sharded", index(lambda i: i["weight_map"].update(gone=next(iter(
        i["weight_map"].values())))), "index", "gone"),
    Case("sharded", index(lambda i: i["weight_map"].update(x="../x.safetensors")), "index", INDEX),
    Case("sharded", removed(INDEX), "no index", INDEX),
    Case("sharded", second_copy, "tensor twice", "model."),
    Case("sharded", index(lambda i: i["metadata"].update(total_size=5)), "index size", INDEX),
]  # fmt: skip
CONFIG_CASES = [
    Case("plain", removed("config.json"), "no config", "config.json"),
    Case("w4", quantization(lambda q: q.update(quant_method="zip")), "layout", "quant"),
    Case("w4", config(quantization_config="int4"), "config", "config.json"),
    Case("w4", group(targets=["nonsuch"]), "config", "quantization_config"),
    Case("w4", group(targets=["re:(a+)+$"]), "config", "quantization_config"),
    Case("w4", weights(num_bits="four"), "config", "quantization_config"),
    Case("w4", weights(color="red"), "config key", "color"),
    Case("w4", group(color="red"), "config key", "color"),
    Case("w4", quantization(lambda q: q.update(color="red")), "config key ignored", "color"),
    Case("gptq", quantization(lambda q: q.pop("desc_act")), "config missing key", "config.json"),
    Case("awq", quantization(lambda q: q.pop("zero_point")), "config missing key", "config.json"),
    Case("hf fp8", quantization(lambda q: q.pop("activation_scheme")), "config missing key",
         "config.json"),
    Case("gptq", write("quantize_config.json", '{"bits": 8}'), "configs disagree", "bits"),
    Case("w4", group(output_activations={"num_bits": 8}), "reader limit", "output_activations"),
    Case("w4", tensors(dense_again), "targeted, not quantized", f"{Q}.weight"),
    Case("awq", tensors(lambda t: [[t.pop(f"{Q}.{x}") for x in ("qweight", "qzeros", "scales")],
         t.update({f"{Q}.weight": torch.randn(64, 64)})]), "targeted, not quantized", Q),
    Case("w4", config(model_type="nonsuch"), "model unknown", "config.json"),
    *(Case(whole, lambda f, key=key: change_json(f / "config.json", lambda c: c.pop(key)),
           "config missing key", "config.json")
      for whole, key in product(("plain", "w4"), ("model_type", "architectures"))),
    Case("w4", quantization(lambda q: q.update(quantization_status="zipped")), "config",
         "quantization_status"),
    Case("w4", quantization(lambda q: q.update(quantization_status="frozen")),
         "quantization status", "quantization_status"),
    Case("w4", quantization(lambda q: q.pop("quantization_status")), "quantization status",
         "quantization_status"),
    *(Case(whole, group(format=wrong), "config", "group_0.format") for whole, wrong in (
        ("w4", "int-quantized"), ("w4", "float-quantized"), ("w4a8", "pack-quantized"),
        ("fp8", "int-quantized"), ("mxfp4", "nvfp4-pack-quantized"))),
    Case("w4", quantization(lambda q: q.update(format="int-quantized")), "config", "config.format"),
    *(Case("w4", quantization(lambda q, rule=rule: q["ignore"].append(rule)),
           "left alone, but quantized", Q) for rule in (Q, "re:.*q_proj", "Linear")),
    Case("awq", quantization(lambda q: q.update(modules_to_not_convert=["q_proj"])),
         "left alone, but quantized", Q),
    *(Case(whole, quantization(lambda q: q.update(modules_to_not_convert=["model.layers.0"])),
           "left alone, but quantized", Q) for whole in ("hf fp8", "hf fp8 tensors")),
    Case("awq", quantization(lambda q: q.update(zero_point=False)), "config", "zero_point"),
    Case("hf fp8 tensors", quantization(lambda q: q.update(activation_scheme="none")), "config",
         "activation_scheme"),
    *(Case("hf fp8 tensors", quantization(lambda q, size=size: q.update(weight_block_size=size)),
           fault, where) for size, fault, where in (
        ([128], "config", "quantization_config"), (5, "config", "quantization_config"),
        ([16, 16], "shape", f"{Q}.weight_scale"))),
    *(Case(whole, lambda f: None, "reader limit", "proj")
      for whole in ("w3", "w8", "fp8", "gptq asymmetric", "gptq act order", "padded")),
    *(Case(whole, config(**{size: 0}), "config", "config.json")
      for whole, size in product(("plain", "w4", "awq"), SIZES)),
]  # fmt: skip
TENSOR_CASES = [
    *(Case("hf fp8 tensors", without(f"{Q}.{leaf}"), fault, where) for leaf, fault, where in (
        ("weight_scale", "config", "quantization_config"),
        ("input_scale", "missing tensor", f"{Q}.input_scale"),
        ("weight", "config", "quantization_config"))),
    Case("plain", without("model.norm.weight"), "missing tensor", "model.norm.weight"),
    Case("plain", config(tie_word_embeddings=False), "missing tensor", "lm_head.weight"),
    Case("plain", config(num_hidden_layers=3), "missing tensor", "model.layers.2."),
    Case("w4", without(f"{Q}.weight_packed"), "missing tensor", Q),
    Case("w4", without(f"{Q}.weight_scale"), "missing tensor", f"{Q}.weight_scale"),
    Case("w4 asymmetric", without(f"{Q}.weight_zero_point"), "missing tensor", Q),
    Case("w8a8 static", without(f"{Q}.input_scale"), "missing tensor", f"{Q}.input_scale"),
    Case("cache", without("model.layers.1.self_attn.k_scale"), "missing tensor", "1.self_attn.k_"),
    Case("gptq", without(f"{Q}.qzeros"), "missing tensor", f"{Q}.qzeros"),
    Case("gptq", without(f"{Q}.qweight"), "missing tensor", f"{Q}.qweight"),
    Case("awq", without(f"{Q}.scales"), "missing tensor", f"{Q}.scales"),
    Case("hf fp8", without(f"{Q}.weight_scale_inv"), "missing tensor", f"{Q}.weight_scale_inv"),
    Case("plain", tensors(lambda t: t.update({"model.extra.weight": torch.ones(4)})),
         "extra tensor", "model.extra.weight"),
    Case("w4", tensors(lambda t: t.update({f"{Q}.weight": torch.randn(64, 64)})), "extra tensor",
         f"{Q}.weight"),
    Case("w4", config(num_hidden_layers=1), "extra tensor", "model.layers.1."),
    Case("plain", changed("model.norm.weight", lambda t: t[:5]), "shape", "model.norm.weight"),
    Case("w4", changed(f"{Q}.weight_packed", lambda t: t[:5]), "shape", f"{Q}.weight_packed"),
    Case("w4", weights(group_size=16), "shape", "weight_scale"),
    Case("w4", weights(num_bits=8), "shape", "weight_packed"),
    Case("gptq", changed(f"{Q}.scales", lambda t: t.T), "shape", f"{Q}.scales"),
    Case("awq", config(intermediate_size=160), "shape", "mlp"),
    Case("plain", changed("model.norm.weight", lambda t: t.int()), "dtype", "model.norm.weight"),
    Case("w4", changed(f"{Q}.weight_packed", lambda t: t.float()), "dtype", f"{Q}.weight_packed"),
    Case("gptq", changed(f"{Q}.scales", lambda t: t.int()), "dtype", f"{Q}.scales"),
    Case("w3", tensors(older_words), "older packing", "weight_packed"),
    Case("untied", changed("lm_head.weight", lambda t: t + 1), "tied tensors differ", "lm_head"),
    Case("uneven", lambda f: None, "fused peers", "self_attn"),
    Case("gptq act order", changed(f"{Q}.g_idx", lambda t: t.flip(0)), "fused peers", "g_idx"),
    Case("w8a8 static", filled(f"{Q}.input_scale", 0.7), "fused peers' scales", "input_scale"),
]  # fmt: skip
VALUE_CASES = [
    Case("w4", filled(f"{Q}.weight_scale", float("nan")), "scale not finite", f"{Q}.weight_scale"),
    Case("gptq", filled(f"{Q}.scales", float("inf")), "scale not finite", f"{Q}.scales"),
    Case("mxfp4", filled(f"{Q}.weight_scale", 255), "scale not finite", f"{Q}.weight_scale"),
    *(Case(whole, filled(name, 1e30), "value too large", where) for whole, name, where in (
        ("w4", f"{Q}.weight_scale", Q), ("mixed", f"{Q}.weight_scale", Q),
        ("fp8", f"{Q}.weight_scale", Q), ("hf fp8", f"{Q}.weight_scale_inv", Q),
        ("hf fp8 tensors", f"{Q}.weight_scale", Q), ("w8a8 static", f"{Q}.input_scale", "input_"),
        ("hf fp8 tensors", f"{Q}.input_scale", "input_scale"),
        ("cache", "model.layers.0.self_attn.v_scale", "v_scale"),
        ("plain", "model.norm.weight", "model.norm.weight"), ("w4", EMBEDDING, EMBEDDING))),
    Case("mxfp4", filled(f"{Q}.weight_scale", 200), "value too large", Q),
    Case("gptq act order", quantization(lambda q: q.update(desc_act=False)), "g_idx order",
         f"{Q}.g_idx"),
    Case("w4", filled(f"{Q}.weight_scale", 0.0), "scale zero", Q),
    Case("awq", filled(f"{Q}.scales", 0.0), "scale zero", Q),
    Case("w8a8 static", filled(f"{Q}.input_scale", -1.0), "scale not positive", "input_scale"),
    Case("cache", filled("model.layers.0.self_attn.v_scale", 0.0), "scale not positive", "v_scale"),
    Case("plain", filled(EMBEDDING, float("nan")), "value not finite", EMBEDDING),
    Case("fp8", changed(f"{Q}.weight", lambda t: t.view(torch.uint8).fill_(0x7F).view(t.dtype)),
         "value not finite", Q),
    Case("w4a8", filled(f"{Q}.weight", 8), "code range", Q),
    Case("w4a8 asymmetric", filled(f"{Q}.weight_zero_point", -9), "zero-point range", Q),
    Case("gptq asymmetric", changed(f"{Q}.qzeros", lambda t: torch.full_like(t, -1)),
         "zero-point range", f"{Q}.qzeros"),
    Case("gptq v2", filled(f"{Q}.qzeros", 0x77777777), "symmetric zero-point", f"{Q}.qzeros"),
    Case("gptq", filled(f"{Q}.g_idx", 9), "g_idx range", f"{Q}.g_idx"),
    Case("gptq", filled(f"{Q}.g_idx", -1), "g_idx range", f"{Q}.g_idx"),
    Case("w4", changed(f"{Q}.weight_shape", lambda t: t * 2), "packing", Q),
    Case("padded", changed(f"{Q}.weight_packed", lambda t: t | -(1 << 31)), "padding bits", Q),
    Case("gptq v2", labelled("gptq"), "GPTQ label", "config.json"),
    Case("gptq", labelled("gptq_v2"), "GPTQ label", "config.json"),
    Case("awq", tensors(in_plain_order("qweight")), "AWQ order", "qweight"),
    Case("awq", tensors(in_plain_order("qzeros")), "AWQ order", "qzeros"),
    Case("hf fp8 tensors", everywhere(".input_scale", 1.0), "uncalibrated scales", "input_scale"),
    Case("fp8", everywhere(".weight_scale", 1.0), "uncalibrated scales", "weight_scale"),
    Case("fp8", everywhere(".input_scale", 1.0), "uncalibrated scales", "input_scale"),
    Case("cache", everywhere(".k_scale", 1.0), "uncalibrated scales", "k_scale"),
    Case("plain", changed(f"{DOWN}.weight", torch.zeros_like), "all zero", f"{DOWN}.weight"),
]  # fmt: skip
SIDE_CASES = [
    Case("plain", lambda f: [p.unlink() for p in f.glob("tokenizer*")], "tokenizer absent", "tok"),
    Case("plain", lambda f: change_json(f / "tokenizer.json", lambda t: t["model"]["vocab"].update(
        zz=999)), "tokenizer size", "tokenizer.json"),
    Case("plain", lambda f: change_json(f / "tokenizer.json", lambda t: t["model"].update(
        merges=[["q", "nonsuch"]])), "tokenizer damaged", "tokenizer.json"),
    Case("plain", write("tokenizer.json", "{}"), "tokenizer damaged", "tokenizer.json"),
    *(Case("plain", lambda f, file=file, value=value: change_json(
        f / file, lambda c: c.update(eos_token_id=value)), "token id", file)
      for file, value in product(("config.json", "generation_config.json"),
                                 (9999, -1, [1, 9999], "</s>", True))),
    Case("plain", chat_tokens, "chat template absent", "chat_template.jinja"),
    Case("plain", removed("generation_config.json"), "generation config absent", "generation"),
    Case("plain", config(auto_map={"AutoModel": "code.Model"}), "custom code lost", "code.py"),
]  # fmt: skip
CASES = [*FILE_CASES, *CONFIG_CASES, *TENSOR_CASES, *VALUE_CASES, *SIDE_CASES]
LOST: dict[str, Damage] = {
    "tokenizer lost": lambda f: [p.unlink() for p in f.glob("tokenizer*")],
    "chat template lost": removed("chat_template.jinja"),
    "generation config lost": removed("generation_config.json"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_checkpoint_has_no_finding(name: str, wholes: Callable[[str], Path]) -> None:
    report = verify(wholes(name))
    assert report.findings == () and report.whole


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.fault}-{c.whole}-{c.where}")
def test_each_fault_is_found(case: Case, wholes: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied(wholes(case.whole), tmp_path / "checkpoint")
    case.damage(folder)
    report = verify(folder)
    found = [f for f in report.findings if f.fault == case.fault and case.where in f.where]
    assert found, report.findings
    severity, consequence = FAULTS[case.fault]
    assert (found[0].severity, found[0].consequence) == (severity, consequence)
    assert found[0].expected and found[0].found
    assert report.whole == (not any(f.severity == "error" for f in report.findings))


@pytest.mark.parametrize("fault", LOST)
def test_what_the_original_had_and_the_checkpoint_lost(
    fault: str, wholes: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(wholes("w4"), tmp_path / "checkpoint")
    LOST[fault](folder)
    report = verify(folder, wholes("base"))
    assert [f.fault for f in report.findings] == [fault]
    assert not report.whole


def test_every_class_of_fault_is_tested() -> None:
    tested = {case.fault for case in CASES} | set(LOST)
    assert tested == set(FAULTS) - set(GGUF) - set(AGAINST)


def test_the_guide_lists_every_class() -> None:
    guide = (Path(__file__).parents[1] / "docs" / "verify.md").read_text()
    for fault, (severity, consequence) in FAULTS.items():
        assert f"| {fault} | {severity} | {consequence} |" in guide, fault


def test_latent_attention_may_rotate_no_part_of_a_head(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "head_dim": 0, "qk_rope_head_dim": 0, "num_local_experts": 0}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "qk_nope_head_dim": 16}))
    check_sizes(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(UserError, match="head_dim = 0"):
        check_sizes(tmp_path / "config.json")


def test_a_quantized_linear_of_no_size_is_a_fault(
    wholes: Callable[[str], Path], tmp_path: Path
) -> None:
    """A kind of model that nobody knows, so that the tensors alone say its sizes."""
    folder = copied(wholes("w4"), tmp_path / "checkpoint")
    config(model_type="nonsuch")(folder)
    changed(f"{Q}.weight_shape", torch.zeros_like)(folder)
    found = [f for f in verify(folder).findings if f.severity == "error"]
    assert [f.where for f in found] == [Q]


def test_negative_scales_are_legal(wholes: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied(wholes("gptq v2"), tmp_path / "checkpoint")
    change_tensors(folder, lambda t: [t[n].neg_() for n in t if n.endswith("scales")])
    assert verify(folder).findings == ()


def test_the_hub_cache_s_links_are_read(wholes: Callable[[str], Path], tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in wholes("plain").iterdir():
        if path.is_file():
            shutil.copy(path, blobs / path.name)
            (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert verify(snapshot).findings == ()
