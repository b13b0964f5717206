"""Rotations: Hadamard matrices, what is fused where, and that the model computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowbit.calib.model import LayeredModel
from lowbit.calib.shards import Shards
from lowbit.kernels.errors import UserError
from lowbit.kernels.hadamard import (
    Rotation,
    hadamard_base,
    hadamard_rotation,
    paley,
    random_rotation,
    sylvester,
)
from lowbit.quantize.checkpoint.load import read_config
from lowbit.quantize.passes.rotate import (
    HeadRows,
    rotate_reader,
    rotate_value_inputs,
    rotate_value_outputs,
    rotate_writer,
)
from lowbit.quantize.passes.settings import RotateSettings
from lowbit.quantize.recipe import Calibration, Execution, Recipe
from lowbit.quantize.recipe_passes import Transform, WeightPass
from lowbit.quantize.rotated_model import changed_tensors, rotated_model, write_rotated
from lowbit.quantize.runner import quantize_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GemmaConfig,
    Glm4Config,
    GraniteConfig,
    Olmo2Config,
    Qwen3NextConfig,
)

from .models import change_tensors
from .moe_models import FAMILIES as MOE
from .runtime_models import FAMILIES, OTHERS

TOKENS = torch.arange(0, 240, 7)[None]
LLAMA = FAMILIES["llama"]()
SIZES = {
    name: getattr(LLAMA, name)
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "initializer_range", "pad_token_id",
    )
}  # fmt: skip
DENSE = ("llama", "qwen2", "qwen3", "mistral", "phi3")
RELATIVES: dict[str, Callable[[], Any]] = {
    "gemma": lambda: GemmaConfig(**SIZES, head_dim=16),  # gains are 1 + weight
    "granite": lambda: GraniteConfig(**SIZES, residual_multiplier=0.3, embedding_multiplier=3.0),
    **{n: MOE[n] for n in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "granitemoe")},
}
GATED = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "layer_types": ["full_attention"] * 2,
}  # fmt: skip


def saved(folder: Path, config: Any, dtype: torch.dtype = torch.float32) -> Path:
    """A random model of `config` with random gains and biases."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, p in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            p.data = torch.rand_like(p) + 0.3
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(TOKENS).logits


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


ORDERS = sorted({b for n in range(4, 513, 4) if (b := hadamard_base(n)) is not None and b > 1})


def test_paley_matrices_are_hadamard_matrices() -> None:
    assert {12, 20, 28, 36, 44, 60, 84} <= set(ORDERS)
    for n in ORDERS:
        h = paley(n).float()  # whole numbers below 2**24 are exact
        assert h.abs().eq(1).all() and torch.equal(h @ h.T, n * torch.eye(n)), n


def test_sylvester_doubles() -> None:
    h = sylvester(64).float()
    assert h.abs().eq(1).all() and torch.equal(h @ h.T, 64 * torch.eye(64))


@pytest.mark.parametrize(
    ("n", "made"),
    [
        (64, "Hadamard 64"), (96, "Hadamard 12 x 8"), (576, "Hadamard 36 x 16"),
        (768, "Hadamard 12 x 64"), (896, "Hadamard 28 x 32"), (2560, "Hadamard 20 x 64 x 2"),
        (4096, "Hadamard 64 x 64"), (100, "random 25, Hadamard 4"), (9, "random 9"),
    ],
)  # fmt: skip
def test_a_rotation_of_any_size_is_orthogonal_and_its_own_matrix(n: int, made: str) -> None:
    rotation = hadamard_rotation(n, seed=3)
    assert str(rotation) == made
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = rotation.apply(x)
    assert relative(y.norm(dim=1), x.norm(dim=1)) < 1e-12
    assert relative(rotation.apply(x.float()).double(), y) < 1e-6
    if n < 1000:
        q = rotation.matrix()
        assert relative(q @ q.T, torch.eye(n, dtype=torch.float64)) < 1e-12
        assert relative(x @ q, y) < 1e-12


def test_a_hadamard_rotation_spreads_a_channel_evenly_a_random_one_less() -> None:
    one = torch.zeros(576)
    one[100] = 1
    flat = hadamard_rotation(576, 0).apply(one).abs()
    assert relative(flat, torch.full((576,), 576**-0.5)) < 1e-5
    assert random_rotation(576, 0).apply(one).abs().max() > 2 * flat.max()


@pytest.mark.parametrize("make", [hadamard_rotation, random_rotation])
def test_a_seed_names_a_rotation(make: Callable[[int, int], Rotation]) -> None:
    first, same, other = (make(64, seed).matrix() for seed in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_fused_linears_compute_the_same_in_the_other_basis() -> None:
    g = torch.Generator().manual_seed(0)
    q, r = hadamard_rotation(24, 1), hadamard_rotation(4, 2)
    x, gain = torch.randn(7, 24, generator=g), torch.rand(24, generator=g)
    w, b = torch.randn(24, 24, generator=g), torch.randn(24, generator=g)
    y = (x * gain) @ w.T + b
    assert relative(q.apply(x) @ rotate_reader(w, gain, q).T + b, y) < 1e-5
    assert relative((x * gain) @ rotate_writer(w, q).T + rotate_writer(b, q), q.apply(y)) < 1e-5
    rows = HeadRows(heads=2, dim=4, stride=10, start=3)
    rotated_w, rotated_b = (rotate_value_outputs(t, rows, r) for t in (w, b))
    turned = (x * gain) @ rotated_w.T + rotated_b
    for h, first in enumerate((3, 13)):
        assert relative(turned[:, first : first + 4], r.apply(y[:, first : first + 4])) < 1e-5, h
    rest = [i for i in range(24) if i not in (3, 4, 5, 6, 13, 14, 15, 16)]
    assert torch.equal(rotated_w[rest], w[rest]) and torch.equal(rotated_b[rest], b[rest])
    heads = r.apply(x.view(7, 6, 4)).view(7, 24)
    assert relative(heads @ rotate_value_inputs(w, r).T, x @ w.T) < 1e-5


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", DENSE)
def test_a_rotated_model_has_the_original_logits(family: str, tied: bool, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    config.tie_word_embeddings = tied
    folder = saved(tmp_path / "model", config)
    source = write_rotated(folder, tmp_path / "rotated")
    assert relative(logits(tmp_path / "rotated"), logits(folder)) < 1e-4
    assert read_config(tmp_path / "rotated")["tie_word_embeddings"] is False
    assert ("lm_head.weight" in Shards(folder)) is not tied and "lm_head.weight" in source.changed
    before, after = Shards(folder), Shards(tmp_path / "rotated")
    for name in after.names():
        moved = name not in before or not torch.equal(after.get(name), before.get(name))
        assert moved == (name in source.changed), name
    assert after.get("model.norm.weight").eq(1).all()


@pytest.mark.parametrize("family", RELATIVES)
def test_relatives_and_mixtures_of_experts(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", RELATIVES[family]())
    write_rotated(folder, tmp_path / "rotated", RotateSettings(kind="random", seed=5))
    assert relative(logits(tmp_path / "rotated"), logits(folder)) < 1e-4


@pytest.mark.parametrize(
    "settings", [RotateSettings(r2=False), RotateSettings(r1=False)], ids=["R1", "R2"]
)
def test_each_rotation_alone(settings: RotateSettings, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", FAMILIES["qwen2"]())
    source = write_rotated(folder, tmp_path / "rotated", settings)
    assert relative(logits(tmp_path / "rotated"), logits(folder)) < 1e-4
    touched = {name.split(".", 3)[-1] for name in source.changed if ".layers.0." in name}
    values = {"self_attn.v_proj.weight", "self_attn.v_proj.bias", "self_attn.o_proj.weight"}
    assert touched == values if not settings.r1 else "self_attn.v_proj.bias" not in touched


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("opt", FAMILIES["opt"], "LayerNorm"),
        ("gpt_neox", FAMILIES["gpt_neox"], "LayerNorm"),
        ("cohere", lambda: CohereConfig(**SIZES), "no RMSNorm"),
        ("gemma2", lambda: Gemma2Config(**SIZES, head_dim=16), "a branch adds"),
        ("gemma3", FAMILIES["gemma3"], "a branch adds"),
        ("olmo2", lambda: Olmo2Config(**SIZES), "a branch adds"),
        ("glm4", lambda: Glm4Config(**SIZES, head_dim=16), "a branch adds"),
        ("lfm2", OTHERS["lfm2"], "is missing"),
        ("gpt_oss", MOE["gpt_oss"], "not the layout expected"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_model_that_r1_cannot_be_fused_into_is_refused(
    family: str, config: Callable[[], Any], reason: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "model", config())
    with pytest.raises(UserError, match=reason):
        write_rotated(folder, tmp_path / "rotated")
    assert [p.name for p in tmp_path.iterdir()] == ["model"], "a refusal left output"


def test_r2_alone_goes_where_r1_does_not(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", FAMILIES["gemma3"]())
    write_rotated(folder, tmp_path / "rotated", RotateSettings(r1=False))
    assert relative(logits(tmp_path / "rotated"), logits(folder)) < 1e-4


def test_what_names_do_not_tell_is_found_by_running_a_layer(tmp_path: Path) -> None:
    """Qwen3-Next gates each channel of a head's output, in its q_proj."""
    folder = saved(tmp_path / "model", Qwen3NextConfig(**SIZES, head_dim=16, **GATED))
    with pytest.raises(UserError, match="does not compute the same"):
        rotated_model(folder, RotateSettings(r1=False))


def test_an_unknown_tensor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model", FAMILIES["llama"]())
    monkeypatch.setattr("lowbit.quantize.rotation_roles.MLP_READS", "none")
    with pytest.raises(UserError, match=r"mlp\.(gate|up)_proj.* has no known role"):
        rotated_model(folder, RotateSettings())


def test_unquantized_tensors_are_stored_in_their_dtype(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", FAMILIES["llama"](), torch.bfloat16)
    _, source = rotated_model(folder, RotateSettings())
    held = frozenset(n for n in source.changed if n.endswith("proj.weight"))
    stored = dict(changed_tensors(source, held))
    assert "model.layers.0.self_attn.q_proj.weight" in held
    assert set(stored) == set(source.changed) - held
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= set(stored)
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert source.get("lm_head.weight").dtype == torch.float32


def test_float16_that_overflows_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", FAMILIES["llama"](), torch.float16)
    change_tensors(folder, lambda t: t["model.embed_tokens.weight"].fill_(6e4))
    with pytest.raises(UserError, match=r"embed_tokens.*beyond torch.float16"):
        write_rotated(folder, tmp_path / "rotated")


@torch.inference_mode()
def test_the_layer_loops_model_is_the_rotated_checkpoint(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", FAMILIES["llama"]())
    write_rotated(folder, tmp_path / "rotated")
    fused, _ = rotated_model(folder, RotateSettings())
    written = LayeredModel(tmp_path / "rotated")
    assert fused.head == written.head == "lm_head"
    for name in [*fused.layers, "lm_head"]:
        with fused.loaded(name) as a, written.loaded(name) as b:
            for (n, p), (_, other) in zip(a.named_parameters(), b.named_parameters(), strict=True):
                assert torch.equal(p, other), f"{name}.{n}"


def test_rotation_lowers_the_error_of_inputs_with_outlier_channels() -> None:
    """8 bits a token, 4 bits a weight's row: the largest channel no longer sets the step."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(256, 576, generator=g), torch.randn(64, 576, generator=g) * 0.02
    x[:, [5, 77, 300]] *= 60
    w[:, [8, 90]] *= 20

    def rounded(t: Tensor, bits: int) -> Tensor:
        step = t.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        return (t / step).round() * step

    def error(x: Tensor, w: Tensor) -> float:
        return float((rounded(x, 8) @ rounded(w, 4).T - x @ w.T).norm() / (x @ w.T).norm())

    plain = error(x, w)
    random, hadamard = (
        error(q.apply(x), q.apply(w)) for q in (random_rotation(576, 0), hadamard_rotation(576, 0))
    )
    assert hadamard < random < 0.3 * plain, (plain, random, hadamard)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_recipe_that_rotates_equals_quantizing_the_rotated_checkpoint(
    method: Any, shallow: Path, story: Path, tmp_path: Path
) -> None:
    quantizer = WeightPass(method=method, scheme="W4A16", group_size=32)
    rows = Calibration(source=str(story), samples=4, seq_len=64)
    how = Execution(dtype="float32")
    write_rotated(shallow, tmp_path / "rotated")
    passes = (Transform(method="rotate"), quantizer)
    quantize_model(shallow, tmp_path / "at once", Recipe(passes, rows, how))
    quantize_model(tmp_path / "rotated", tmp_path / "in two", Recipe((quantizer,), rows, how))
    a, b = Shards(tmp_path / "at once"), Shards(tmp_path / "in two")
    assert set(a.names()) == set(b.names()) and "lm_head.weight" in a
    different = [n for n in a.names() if not torch.equal(a.get(n), b.get(n))]
    assert not different
    config = read_config(tmp_path / "at once")
    assert config == read_config(tmp_path / "in two") and not config["tie_word_embeddings"]
