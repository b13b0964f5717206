"""Importance matrices: what they hold, both files, and the models that are exported with them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
import typer
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.imatrix import imatrix as command
from lowbit.quantize.gguf.export import export_gguf
from lowbit.quantize.gguf.imatrix import Imatrix, Importance, read_imatrix, write_imatrix
from lowbit.quantize.gguf.imatrix_run import Settings, imatrix_of_model, partial_coverage
from lowbit.quantize.gguf.reader import GGUFFile
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from .gguf_mixes import mixtral
from .gguf_models import tiny_llama
from .runtime_models import quantize_folder

TEXT = "the thin tin then in a thing, " * 60
SETTINGS = {"samples": 4, "seq_len": 32}
QUERY = "blk.1.attn_q.weight"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "m", hidden_size=256)


@pytest.fixture(scope="module")
def found(model: Path, text: Path) -> Imatrix:
    return imatrix_of_model(model, Settings(str(text), **SETTINGS), progress=False)


def test_sums_are_those_of_what_each_linear_reads(model: Path, text: Path, found: Imatrix) -> None:
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(model)(TEXT, add_special_tokens=False).input_ids
    seen: dict[str, Tensor] = {}
    paths = {"self_attn.q_proj": "attn_q", "self_attn.o_proj": "attn_output",
             "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}  # fmt: skip
    for path, name in paths.items():
        module = hf.get_submodule(f"model.layers.1.{path}")

        def hook(_: torch.nn.Module, args: tuple[Tensor], name: str = name) -> None:
            seen[name] = args[0].flatten(0, 1).double().square().sum(0)

        module.register_forward_pre_hook(hook)
    with torch.inference_mode():
        hf(torch.tensor(ids[: 4 * 32]).view(4, 32))
    assert len(found.entries) == 2 * 7
    for name, sums in seen.items():
        entry = found.entries[f"blk.1.{name}.weight"]
        assert entry.counts.tolist() == [4 * 32]
        torch.testing.assert_close(entry.sums[0].double(), sums, rtol=1e-4, atol=0)
    assert (found.chunks, found.chunk_size) == (4, 32)


@pytest.mark.parametrize("name", ["m.gguf", "m.dat"])
def test_both_files_hold_the_same(found: Imatrix, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_imatrix(path, found)
    again = read_imatrix(path)
    assert again.datasets == found.datasets and again.chunks == 4
    assert again.entries.keys() == found.entries.keys()
    for key, entry in found.entries.items():
        torch.testing.assert_close(again.entries[key].mean(), entry.mean(), rtol=1e-6, atol=0)
    with pytest.raises(UserError, match="exists"):
        write_imatrix(path, found)


def test_a_dat_file_written_by_hand(tmp_path: Path) -> None:
    name = b"blk.0.attn_q.weight"
    entry = struct.pack("<i", len(name)) + name + struct.pack("<ii3f", 4, 3, 4.0, 8.0, 0.0)
    (tmp_path / "m.dat").write_bytes(
        struct.pack("<i", 1) + entry + struct.pack("<ii", 4, 3) + b"txt"
    )
    found = read_imatrix(tmp_path / "m.dat")
    assert found.weights("blk.0.attn_q.weight", (7, 3)).tolist() == [[1, 2, 0]]  # type: ignore[union-attr]
    assert (found.datasets, found.chunks) == (["txt"], 4)


def test_experts_have_their_own_and_those_without_tokens_count_alike(
    tmp_path: Path, text: Path
) -> None:
    folder = mixtral(tmp_path / "m", 8, layers=1)
    found = imatrix_of_model(folder, Settings(str(text), samples=1, seq_len=8), progress=False)
    entry = found.entries["blk.0.ffn_up_exps.weight"]
    assert entry.sums.shape == (8, 256)
    assert entry.counts.sum() == 8 * 2  # every token goes to two experts
    unseen = entry.counts == 0
    assert unseen.any(), "a test of what is missing needs some of it"
    assert (entry.mean()[unseen] == 1).all()
    assert not (entry.mean()[~unseen] == 1).any()
    assert any(c.name == "blk.0.ffn_up_exps.weight" for c in partial_coverage(found))
    export_gguf(folder, tmp_path / "m.gguf", "Q4_K_S", imatrix=found, progress=False)
    assert GGUFFile(tmp_path / "m.gguf").tensors["blk.0.ffn_up_exps.weight"].kind == "Q4_K"


def test_export_weighs_errors_by_it(model: Path, found: Imatrix, tmp_path: Path) -> None:
    stored = {}
    for name, imatrix in (("plain", None), ("weighed", found)):
        export_gguf(model, tmp_path / name, "Q4_K_S", imatrix=imatrix, progress=False)
        stored[name] = GGUFFile(tmp_path / name).get("blk.1.attn_q.weight")
    export_gguf(model, tmp_path / "exact", "F32", progress=False)
    exact = GGUFFile(tmp_path / "exact").get("blk.1.attn_q.weight")
    weights = found.weights("blk.1.attn_q.weight", tuple(exact.shape))
    errors = {n: (weights * (w - exact).square()).sum() for n, w in stored.items()}
    assert errors["weighed"] < errors["plain"]
    keys = GGUFFile(tmp_path / "weighed").keys
    assert keys["quantize.imatrix.entries_count"] == 14


def test_types_that_need_one_are_refused_without(model: Path, tmp_path: Path) -> None:
    small = tiny_llama(tmp_path / "small")  # whose columns fill no block of 256
    for source in (model, small):
        with pytest.raises(UserError, match="a file of IQ2_XXS needs an importance matrix"):
            export_gguf(source, tmp_path / "m.gguf", "IQ2_XXS", progress=False)
    one = ("attn_q=IQ2_XXS",)
    with pytest.raises(UserError, match="IQ2_XXS for 'blk.0.attn_q.*needs an importance matrix"):
        export_gguf(model, tmp_path / "m.gguf", "Q4_0", tensor_types=one, progress=False)
    other = Imatrix({QUERY: Importance(torch.ones(1, 32), torch.ones(1))}, [], 1, 1)
    with pytest.raises(UserError, match="another model"):
        export_gguf(model, tmp_path / "m.gguf", "Q4_K_M", imatrix=other, progress=False)
    strange = Imatrix({"a.weight": Importance(torch.ones(1, 32), torch.ones(1))}, [], 1, 1)
    with pytest.raises(UserError, match="another architecture"):
        export_gguf(model, tmp_path / "m.gguf", "Q4_K_M", imatrix=strange, progress=False)


def test_damaged_files_are_refused(found: Imatrix, tmp_path: Path) -> None:
    path = tmp_path / "m.dat"
    write_imatrix(path, found)
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], whole[:4] + b"\xff" * 4 + whole[8:]):
        path.write_bytes(data)
        with pytest.raises(UserError, match="truncated or damaged"):
            read_imatrix(path)
    for count in (0, -1, 1 << 30):
        path.write_bytes(struct.pack("<i", count) + whole[4:])
        with pytest.raises(UserError, match="is no importance matrix"):
            read_imatrix(path)
    bad = Imatrix({QUERY: Importance(torch.tensor([[float("nan")]]), torch.ones(1))}, [], 1, 1)
    write_imatrix(tmp_path / "nan.gguf", bad)
    with pytest.raises(UserError, match="1 of 1 values that are negative, NaN"):
        read_imatrix(tmp_path / "nan.gguf")


def test_command(model: Path, text: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    out = tmp_path / "m.gguf"
    options = ["--calib", str(text), "--samples", "2", "--seq-len", "16", "--json"]
    result = CliRunner().invoke(app, [str(model), "-o", str(out), *options])
    assert result.exit_code == 0, result.output
    assert '"entries": 14' in result.stdout
    assert read_imatrix(out).chunks == 2
    again = CliRunner().invoke(app, [str(model), "-o", str(out), *options])
    assert isinstance(again.exception, UserError)


def test_what_is_no_importance_matrix_is_told_so(
    model: Path, text: Path, found: Imatrix, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="text goes to --calib"):
        read_imatrix(text)
    (tmp_path / "empty.dat").touch()
    with pytest.raises(UserError, match="is no importance matrix"):
        read_imatrix(tmp_path / "empty.dat")
    with pytest.raises(UserError, match=r"NAME\.gguf"):
        write_imatrix(tmp_path / "i.txt", found)
    app = typer.Typer()
    app.command()(command)
    error = CliRunner().invoke(app, [str(model), "-o", str(tmp_path / "i.txt")]).exception
    assert isinstance(error, UserError) and "i.txt" in str(error)
    assert [p.name for p in tmp_path.iterdir()] == ["empty.dat"]


def test_it_is_measured_on_the_original_model(model: Path, text: Path, tmp_path: Path) -> None:
    packed = quantize_folder(model, tmp_path / "w4", "W4A16", 32)
    with pytest.raises(UserError, match="original model"):
        imatrix_of_model(packed, Settings(str(text), **SETTINGS), progress=False)
