"""What a GGUF file's matrices read is rounded as llama.cpp rounds it, here and in the reports."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest
import torch
from lowbit.evals.llamacpp import LlamaCpp, available
from lowbit.evals.llamacpp_inputs import llamacpp_inputs, rounded_input
from lowbit.evals.scorer import load_scorer
from lowbit.kernels.errors import UserError
from lowbit.quantize.cli.app import app
from lowbit.quantize.gguf.as_folder import folder_of
from lowbit.quantize.gguf.blocks import CODECS
from lowbit.quantize.gguf.export import export_gguf
from torch import Tensor
from typer.testing import CliRunner

from .gguf_models import tiny_llama
from .gguf_zoo import make_member

SUPER_BYTES = 4 + 256 + 2 * 16  # of llama.cpp's Q8_K: d float32, the codes, sums of 16


def reference(x: Tensor) -> Tensor:
    """x float32 [n, 256] through llama.cpp's own Q8_K."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp (xllamacpp) is not installed")
    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    out, x = torch.zeros(len(x), SUPER_BYTES, dtype=torch.uint8), x.contiguous()
    arguments = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    library.quantize_row_q8_K_ref(*arguments, ctypes.c_int64(x.numel()))
    steps = out[:, :4].contiguous().view(torch.float32)
    return steps * out[:, 4:260].view(torch.int8)


def test_superblocks_are_llama_cpps() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator) * torch.logspace(-6, 3, 64)[:, None]
    x[0], x[1], x[2, 7] = 0.0, 0.5, -100.0
    assert torch.equal(rounded_input(x, "Q4_K"), reference(x))
    wide = x.view(4, 16, 256).transpose(1, 2)  # strides as a model may have them
    assert torch.equal(
        rounded_input(wide, "IQ2_S"), reference(wide.reshape(-1, 256)).view(4, 256, 16)
    )


def test_each_type_reads_what_it_is_multiplied_with() -> None:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    assert rounded_input(x, "F32") is x
    assert torch.equal(rounded_input(x, "F16"), x.half().float())
    assert torch.equal(rounded_input(x, "BF16"), x.bfloat16().float())
    blocks = {kind: rounded_input(x, kind) for kind in CODECS if CODECS[kind].block > 1}
    small = {kind for kind, values in blocks.items() if torch.equal(values, blocks["Q8_0"])}
    assert small == {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"}
    assert all(torch.equal(blocks[k], blocks["Q6_K"]) for k in blocks.keys() - small)
    assert not torch.equal(blocks["Q6_K"], blocks["Q8_0"])


@pytest.mark.skipif(not available(), reason="llama.cpp (xllamacpp) is not installed")
def test_experts_too_compute_what_llama_cpp_does(tmp_path: Path) -> None:
    path = tmp_path / "moe.gguf"
    export_gguf(make_member("mixtral", tmp_path / "moe"), path, "Q8_0", progress=False)
    folder = folder_of(path, lambda line: None, tmp_path)
    llama_cpp = LlamaCpp(path, 64, threads=1, precise=True)
    ids = [5, 9, 20, 31, 44]
    theirs = llama_cpp.next_logprobs(ids, 20)

    def distance(inputs: str) -> float:
        ours = load_scorer(folder, inputs=inputs)(torch.tensor([ids]))[-1].log_softmax(-1)
        return max(abs(ours[i].item() - value) for i, value in theirs.items())

    assert distance("llama.cpp") < 0.1 * distance("exact")


def test_eval_tells_whose_inputs_are_rounded(tmp_path: Path) -> None:
    model, path, text = tiny_llama(tmp_path / "m"), tmp_path / "m.gguf", tmp_path / "text.txt"
    export_gguf(model, path, "Q4_0", progress=False)
    text.write_text("the thin tin then in a thing, and a hat in the bin " * 20)
    options = ["--text", str(text), "--ctx", "64", "--windows", "2", "--json"]

    def rows(*more: str) -> list[dict[str, object]]:
        command = ["eval", str(path), "--base", str(model), *options, *more]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        return json.loads(result.stdout)["rows"]

    base, exact = rows()
    assert base["inputs"] is None and exact["inputs"] is None
    base, rounded = rows("--inputs", "llama.cpp")
    assert base["inputs"] is None and rounded["inputs"] == "llama.cpp"
    assert rounded["divergence"] != exact["divergence"]
    assert rounded["size"] == exact["size"]


def test_folders_of_no_file_are_refused(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "m")
    with pytest.raises(UserError, match="stands for no GGUF file"):
        llamacpp_inputs(model)
    with pytest.raises(UserError, match=r"inputs must be one of exact, llama\.cpp, got 'int8'"):
        load_scorer(model, inputs="int8")
    command = ["eval", str(model), "--text", __file__, "--ctx", "16", "--inputs", "llama.cpp"]
    result = CliRunner().invoke(app, command)
    assert "those of a GGUF file, but none is measured" in str(result.exception or result.output)
