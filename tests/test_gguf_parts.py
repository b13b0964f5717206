"""Files in parts: cut while they are written, read from any part, run by llama.cpp."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from lowbit.evals.llamacpp import LlamaCpp, available
from lowbit.kernels.errors import UserError
from lowbit.quantize.gguf.export import ExportReport, export_gguf
from lowbit.quantize.gguf.reader import GGUFFile

from .gguf_models import tiny_llama

SIZE = 20_000  # bytes of tensors in a part


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportReport]:
    """A model in one file, and the report of the same in parts beside it."""
    folder = tmp_path_factory.mktemp("parts")
    source = tiny_llama(folder / "model")
    export_gguf(source, folder / "whole.gguf", "Q8_0", progress=False)
    report = export_gguf(source, folder / "cut.gguf", "Q8_0", split_max_size=SIZE, progress=False)
    return folder, report


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("cut-*.gguf"))


def test_parts_say_what_they_are(made: tuple[Path, ExportReport]) -> None:
    folder, report = made
    files = parts(folder)
    assert len(files) == report.parts > 3
    assert files[0] == report.path
    assert files[0].name == f"cut-00001-of-{len(files):05d}.gguf"
    assert not (folder / "cut.gguf").exists()
    assert report.nbytes == sum(f.stat().st_size for f in files)
    names: list[str] = []
    for i, path in enumerate(files):
        reader = gguf.GGUFReader(path)
        kinds = {k: f.types[0].name for k, f in reader.fields.items() if k.startswith("split.")}
        assert kinds == {
            "split.no": "UINT16", "split.count": "UINT16", "split.tensors.count": "INT32"
        }  # fmt: skip
        assert reader.fields["split.no"].contents() == i
        assert reader.fields["split.count"].contents() == len(files)
        assert ("tokenizer.ggml.tokens" in reader.fields) == (i == 0)
        size = sum(int(t.n_bytes) for t in reader.tensors)
        assert size <= SIZE or len(reader.tensors) == 1
        names += [t.name for t in reader.tensors]
    assert names == list(GGUFFile(folder / "whole.gguf").tensors)
    assert reader.fields["split.tensors.count"].contents() == len(names)


def test_any_part_opens_all(made: tuple[Path, ExportReport]) -> None:
    folder, _ = made
    whole = GGUFFile(folder / "whole.gguf")
    for part in (parts(folder)[0], parts(folder)[-1]):
        cut = GGUFFile(part)
        assert cut.tensors.keys() == whole.tensors.keys()
        assert {k: v for k, v in cut.keys.items() if not k.startswith("split.")} == whole.keys
        assert all(torch.equal(cut.get(n), whole.get(n)) for n in whole.tensors)


@pytest.mark.skipif(not available(), reason="llama.cpp (xllamacpp) is not installed")
def test_llama_cpp_runs_them_alike(made: tuple[Path, ExportReport]) -> None:
    folder, report = made
    one, many = (LlamaCpp(p, 64, threads=1) for p in (folder / "whole.gguf", report.path))
    ids = list(range(5, 40))
    assert one.generate(ids, 24, ignore_eos=True) == many.generate(ids, 24, ignore_eos=True)


def test_what_does_not_fit_together_is_refused(
    made: tuple[Path, ExportReport], tmp_path: Path
) -> None:
    files = parts(made[0])
    for path in files:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    second = tmp_path / files[1].name
    second.write_bytes(files[2].read_bytes())
    with pytest.raises(UserError, match="is part 2 of"):
        GGUFFile(tmp_path / files[0].name)
    second.unlink()
    with pytest.raises(UserError, match="no such GGUF file"):
        GGUFFile(tmp_path / files[0].name)
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(files[0].read_bytes())
    with pytest.raises(UserError, match=f"one of {len(files)} parts"):
        GGUFFile(alone)


def test_old_parts_are_kept_unless_told(made: tuple[Path, ExportReport], tmp_path: Path) -> None:
    source = made[0] / "model"
    export_gguf(source, tmp_path / "m.gguf", "F16", split_max_size=SIZE, progress=False)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    with pytest.raises(UserError, match="00001-of-.* exists"):
        export_gguf(source, tmp_path / "m.gguf", "F16", split_max_size=SIZE, progress=False)
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before
    export_gguf(
        source, tmp_path / "m.gguf", "F16", split_max_size=SIZE, overwrite=True, progress=False
    )
    assert {p.name for p in tmp_path.iterdir()} == before.keys()


def test_another_number_of_parts_replaces_all_old_ones(
    made: tuple[Path, ExportReport], tmp_path: Path
) -> None:
    source, out, bystander = made[0] / "model", tmp_path / "m.gguf", tmp_path / "mm.gguf"
    bystander.write_bytes(b"GGUF")

    def files(limit: int | None, overwrite: bool = True) -> set[str]:
        options = {"split_max_size": limit, "overwrite": overwrite, "progress": False}
        export_gguf(source, out, "F16", **options)
        return {p.name for p in tmp_path.iterdir()} - {bystander.name}

    first = files(SIZE)
    with pytest.raises(UserError, match="00001-of-.* exists"):
        files(None, overwrite=False)
    second = files(3 * SIZE)
    assert 1 < len(second) < len(first)
    assert not first & second
    assert files(None) == {out.name}
    with pytest.raises(UserError, match="m.gguf exists"):
        files(SIZE, overwrite=False)
    assert files(SIZE) == first
    assert bystander.exists()
