"""A model's config and its modules, before any weight is read."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..kernels.errors import UserError
from ..kernels.meta import parameters_on_meta
from .config_sizes import check_sizes
from .safe_files import check_side_files

CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the names of causal LMs end


def load_config(folder: Path) -> Any:
    """The model's transformers config; UserError when transformers does not know it."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    check_side_files(folder)
    check_sizes(folder / "config.json")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as e:  # transformers raises whatever its config classes' checks raise
        raise UserError(
            f"{folder / 'config.json'} is not a config that transformers knows: {_reason(e)}"
        ) from e


def build_on_meta(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """The causal LM of `config` with parameters on meta; UserError when there is none."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{folder} is an encoder-decoder model ({config.model_type}); lowbit takes causal LMs"
        )
    try:
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            ).eval()
    except ValueError as e:
        raise UserError(
            f"{folder} is not a causal language model (model_type '{config.model_type}'): "
            f"{_reason(e)}"
        ) from e
    except (
        RuntimeError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError,
        ImportError,
    ) as e:  # fmt: skip
        raise UserError(f"no model can be built from {folder / 'config.json'}: {_reason(e)}") from e
    made_as = getattr(config, "architectures", None) or [type(model).__name__]
    if not isinstance(made_as, list) or not all(isinstance(a, str) for a in made_as):
        raise UserError(
            f"{folder / 'config.json'}: 'architectures' must be a list of names, got {made_as!r}"
        )
    if not any(a.endswith(CAUSAL) or a == type(model).__name__ for a in made_as):
        raise UserError(
            f"{folder} holds a {made_as[0]}, not a causal language model; give one whose "
            "'architectures' in config.json name a ...ForCausalLM"
        )
    return model


def _reason(e: Exception) -> str:
    """Another library's message on one line, or its kind where it has none."""
    return textwrap.shorten(str(e), 240, placeholder=" ...") or type(e).__name__
