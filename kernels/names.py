"""A checkpoint's tensor names in the terms of the model that is to hold them.

transformers renames modules from time to time (GPT-NeoX's embed_out is lm_head now) and keeps a
table of old names for each model; some checkpoints leave the base model's prefix out. Tensors that
transformers would merge or split on loading (fused experts) are not converted here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

OUTDATED = re.compile(r"\.(rotary_emb\.inv_freq|attention\.bias|masked_bias)$")
"""Buffers that older checkpoints hold and models compute by themselves now."""


def names_in_model(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Stored tensor name -> the name that it has in `model`; names of unknown modules stay."""
    renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    modules = {name for name, _ in model.named_modules()}
    prefix = f"{model.base_model_prefix}."
    names = {}
    for name in stored:
        renamed = name
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        candidates = (renamed, renamed.removeprefix(prefix), prefix + renamed)
        known = (c for c in candidates if c.rpartition(".")[0] in modules)
        names[name] = next(known, renamed)
    return names


def is_ignored(model: Any, name: str) -> bool:
    """Whether transformers leaves the stored tensor `name` aside without a word."""
    unexpected = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(p, name) for p in (OUTDATED, *unexpected))


def merges_on_loading(model: Any) -> bool:
    """Whether transformers makes some of the model's parameters out of several stored tensors."""
    return any(isinstance(t, WeightConverter) for t in get_model_conversion_mapping(model))
