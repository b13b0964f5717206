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
        raise UserError(f"{model} is a file, and not one that is read here; give a model's folder")
    if not _can_be_hub_id(model):
        raise UserError(f"no such model folder: {model}")
    try:
        return hub_folder(model)
    except UserError as e:
        raise UserError(
            f"no folder '{model}', and {e}; download it elsewhere and give its folder"
        ) from e


def hub_folder(model_id: str) -> Path:
    """The Hub's model `model_id` from its cache, or downloaded where that holds no whole one.

    Raises UserError with the reason alone.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = snapshot_download(model_id, allow_patterns=PATTERNS, local_files_only=True)
        if _has_weights(Path(cached)):
            return Path(cached)
    except LocalEntryNotFoundError:
        pass
    if not hub_reachable():
        raise UserError("the Hub does not answer for a model of that name")
    try:
        return Path(snapshot_download(model_id, allow_patterns=PATTERNS))
    except Exception as e:  # the client's http library, and so its errors, vary by version
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise UserError(f"the Hub has no model of that name for you: {reason}") from e


def _can_be_hub_id(model: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return HUB_ID.fullmatch(model) is not None


def _has_weights(folder: Path) -> bool:
    """Whether a cached snapshot is whole: other programs may have fetched its tokenizer alone."""
    try:
        Shards(folder).close()
    except UserError:
        return False
    return True
