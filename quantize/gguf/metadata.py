"""The keys of a file that say what it is: general.*, as far as a model folder tells.

llama.cpp's converter guesses more from the folder's name and its README (base name, version,
licence, tags); that is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from ...calib.safe_files import read_json_object
from .as_folder import contents_behind
from .writer import Int32, Planned

SAMPLING: dict[str, tuple[str, type[int] | type[float]]] = {
    "top_k": ("general.sampling.top_k", Int32),
    "top_p": ("general.sampling.top_p", float),
    "min_p": ("general.sampling.min_p", float),
    "temperature": ("general.sampling.temp", float),
}
SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def general_keys(folder: Path, planned: Iterable[Planned]) -> dict[str, Any]:
    """The general.* keys, but for those that tell the type of the weights."""
    return {
        "general.type": "model",
        **_sampling_keys(folder),
        "general.name": model_name(folder),
        "general.size_label": size_label(planned),
        "general.quantized_by": "lowbit",
    }


def model_name(folder: Path) -> str:
    """The folder's name, or that of the GGUF file or of the Hub's model that it stands for."""
    if (file := contents_behind(folder)) is not None:
        return Path(file.path).stem
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name


def size_label(planned: Iterable[Planned]) -> str:
    """How large the model is: "7.2B", or "8x7.2B" where there are 8 experts and so many weights are
    shared or one expert's."""
    experts, weights = 1, 0
    for tensor in planned:
        count = tensor.shape[0] if len(tensor.shape) > 2 else 1
        experts = max(experts, count)
        weights += prod(tensor.shape) // count
    size = short_count(weights)
    return size if experts == 1 else f"{experts}x{size}"


def short_count(n: int) -> str:
    """A number to two digits or more: 135M, 1.7B."""
    unit, suffix = next(((u, s) for u, s in SUFFIXES if n > u), (1e3, "K"))
    digits = len(str(round(n / unit)).lstrip("0"))
    return f"{n / unit:.{max(0, 2 - digits)}f}{suffix}"


def _sampling_keys(folder: Path) -> dict[str, Any]:
    """What generation_config.json recommends, where llama.cpp has a key for it."""
    path = folder / "generation_config.json"
    given = read_json_object(path) if path.is_file() else {}
    return {
        key: kind(given[name])
        for name, (key, kind) in SAMPLING.items()
        if isinstance(given.get(name), int | float) and not isinstance(given[name], bool)
    }
