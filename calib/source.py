"""A model by name to a folder: a path as it is, a Hub id through the Hub's cache."""

from __future__ import annotations

import re
from pathlib import Path

from ..kernels.errors import UserError
from .hub import hub_reachable
from .shards import Shards

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken", "LICENSE*"]


def model_folder(model: str) -> Path:
    """The folder of `model`; a Hub id is downloaded (weights only as safetensors, with progress).

    Raises UserError when there is neither such a folder nor such a model on the Hub.
    """
    folder = Path(model)
    if model and folder.is_dir():
        return folder
    if folder.is_file():
        raise UserError(f"{model} is a file; give the model's folder")
    if not HUB_ID.fullmatch(model) or folder.is_absolute() or model.startswith("."):
        raise UserError(f"no such model folder: {model}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        cached = snapshot_download(model, allow_patterns=PATTERNS, local_files_only=True)
        if _has_weights(Path(cached)):
            return Path(cached)
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as e:
        raise UserError(f"no such model folder: {model}") from e
    if not hub_reachable():
        raise UserError(
            f"no folder '{model}', and the Hub does not answer for a model of that name; "
            "download it elsewhere and give its folder"
        )
    try:
        return Path(snapshot_download(model, allow_patterns=PATTERNS))
    except (HfHubHTTPError, OSError) as e:
        raise UserError(f"the Hub has no model '{model}' for you: {str(e).splitlines()[0]}") from e


def _has_weights(folder: Path) -> bool:
    """Whether a cached snapshot is whole: other programs may have fetched its tokenizer alone."""
    try:
        Shards(folder).close()
    except UserError:
        return False
    return True
