"""Open what a run works on: the model in one of the two ways, its dtype, the calibration rows.

A run and its plan begin alike, so that what the one refuses the other does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calib.device import resolve_dtype
from ..calib.model import LayeredModel
from ..calib.shards import Shards, TensorSource
from ..calib.text import Text, load_text, load_tokenizer, token_rows
from ..kernels.errors import UserError
from .checkpoint.journal import unfinished_identity
from .checkpoint.load import read_config
from .fp8_source import READABLE, open_model, open_source
from .linear_names import LinearNames, find_linears
from .recipe import DTYPES, Recipe
from .recipe_passes import DATA_FREE
from .rotated_model import rotated_model
from .rotated_source import RotatedSource
from .spec import LayerScheme


def can_stream(recipe: Recipe) -> bool:
    """Whether every pass looks at weights alone, no static scales of activations or of the cache
    are needed and no budget has to be spent where it matters most."""
    return (
        recipe.budget is None
        and bool(recipe.weight_passes)
        and not recipe.transforms
        and not recipe.needs
        and all(
            p.method in DATA_FREE and not _wants_inputs(p.layer_scheme)
            for p in recipe.weight_passes
        )
    )


def _wants_inputs(scheme: LayerScheme) -> bool:
    """Whether a scale of the inputs is stored, which only calibration can tell."""
    inputs = scheme.input_activations
    return inputs is not None and (not inputs.dynamic or inputs.scale_dtype == "e4m3")


def stacks_experts(folder: Path) -> bool:
    """Whether experts are stored in one tensor, which only the model can take apart."""
    source = open_source(folder)
    stacked = find_linears(source.info, read_config(folder)).stacked
    source.close()
    return bool(stacked)


def streamed_linears(folder: Path, config: dict[str, Any]) -> tuple[TensorSource, LinearNames]:
    """The model's tensors and which of them are linears'. Stacked experts are taken apart where
    transformers knows the model."""
    source: TensorSource = open_source(folder)
    if isinstance(source, Shards) and "quantization_config" in config:
        raise UserError(
            f"{folder} is already quantized; give the original model (quantizing twice only adds "
            f"error) or one of the kinds that are dequantized as they are read: {READABLE}"
        )
    if config.get("is_encoder_decoder"):
        raise UserError(f"{folder} is an encoder-decoder model; lowbit takes causal LMs")
    names = find_linears(source.info, config)
    if names.stacked:
        source = open_model(folder, torch.float32, "cpu").shards
        names = find_linears(source.info, config)
    if names.stacked:
        raise UserError(
            f"'{names.stacked[0]}' holds experts in a way that lowbit cannot take apart into the "
            "linears that it quantizes; choose another model"
        )
    return source, names


def open_for_passes(
    folder: Path,
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
    verify: bool = True,
) -> tuple[LayeredModel, RotatedSource | None]:
    """The model layer by layer, rotated where the recipe says so.

    verify: whether the rotation is tried on layers, which reads their weights.
    """
    rotate = next((t.rotate for t in recipe.transforms if t.method == "rotate"), None)
    plain = open_model(folder, dtype, device)
    if rotate is None:
        return plain, None
    source = open_source(folder)
    return rotated_model(folder, rotate, dtype, device, source, plain.config, verify)


def forward_dtype(
    recipe: Recipe,
    device: torch.device,
    folder: Path,
    out: Path | None = None,
    restart: bool = False,
) -> torch.dtype:
    """The forward passes' dtype; an unfinished run keeps what it began with where it is "auto"."""
    begun = None if restart or out is None else unfinished_identity(out)
    name = recipe.execution.dtype
    if begun is not None and name == "auto" and begun.get("dtype") in DTYPES:
        name = begun["dtype"]
    shards = open_source(folder)
    widest = max(shards.info.values(), key=lambda info: info.nbytes)
    shards.close()
    return resolve_dtype(name, device, widest.dtype)


def check_seq_len(model: LayeredModel, recipe: Recipe) -> None:
    """UserError where calibration rows are longer than the model takes."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    seq_len = recipe.calibration.seq_len
    if limit is not None and seq_len > limit:
        raise UserError(f"seq_len {seq_len} exceeds the model's {limit} positions; lower --seq-len")


def calibration_rows(model: LayeredModel, recipe: Recipe) -> tuple[Tensor, Text]:
    """Token ids int64 [samples, seq_len] of the recipe's calibration text, and the text.

    UserError where the text cannot be had or is too short, and where the rows or their tokens are
    not the model's.
    """
    check_seq_len(model, recipe)
    calibration = recipe.calibration
    tokenizer = load_tokenizer(model.folder)
    text = load_text(calibration.source, "calibration", tokenizer)
    seed = calibration.seed if calibration.shuffle else None
    rows = token_rows(text, tokenizer, calibration.samples, calibration.seq_len, seed)
    vocabulary = model.config.get_text_config().vocab_size
    if int(rows.max()) >= vocabulary:
        raise UserError(
            f"the tokenizer gives id {int(rows.max())}, but the model has {vocabulary} embeddings: "
            f"{model.folder} holds another model's tokenizer"
        )
    return rows, text
