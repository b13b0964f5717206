"""The original of a checkpoint as its recipe changed it before quantizing: what to compare with.

lowbit's report of the run names the recipe. A rotation is made again, for it is fixed by its
settings; what AWQ and SmoothQuant moved between weights is fitted, as far as it can be.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ...calib.safe_files import read_json_object
from ...calib.shards import TensorSource
from ...kernels.errors import UserError
from ..checkpoint.side_files import REPORT
from ..fp8_source import open_source
from ..recipe import Recipe
from .findings import Finding, finding
from .tensors import Model


class Original(NamedTuple):
    """source: the tensors, experts apart where the checkpoint's model has them so; None where they
    cannot be compared. rotated: whether they are calculated, so that they agree up to rounding.
    scaled: whether rows and columns are, by factors that are not known."""

    source: TensorSource | None
    rotated: bool
    scaled: bool
    findings: list[Finding]


def open_original(folder: Path, base: Path, model: Model) -> Original:
    """The original in `base` of the checkpoint `folder`. UserError when it cannot be read."""
    recipe, found = _recipe(folder)
    methods = [] if recipe is None else [t.method for t in recipe.transforms]
    scaled = any(m != "rotate" for m in methods)
    if scaled:
        told = f"{' and '.join(m for m in methods if m != 'rotate')}: weights are compared up to "
        told += "a factor a row and a column, norms and biases are not"
        found.append(finding("transformed", REPORT, "a recipe that rescales no weight", told))
    source: TensorSource = open_source(base)
    rotate = None
    if recipe is not None:
        rotate = next((t.rotate for t in recipe.transforms if t.method == "rotate"), None)
    if rotate is not None:
        from ..rotated_model import rotated_model  # slow: transformers

        try:
            _, source = rotated_model(base, rotate, source=source, verify=False)
        except UserError as e:
            expected = "a rotation that can be made again"
            found.append(finding("not compared", REPORT, expected, e))
            return Original(None, True, scaled, found)
    return Original(_split(source, model), rotate is not None, scaled, found)


def _recipe(folder: Path) -> tuple[Recipe | None, list[Finding]]:
    """The recipe of lowbit's report; None where there is no report, and why it cannot be read."""
    if not os.path.lexists(folder / REPORT):
        return None, []
    try:
        recipe = read_json_object(folder / REPORT).get("recipe")
        return (Recipe.from_dict(recipe) if isinstance(recipe, dict) else None), []
    except UserError as e:
        told = f"compared as if no weight had been changed before: {e}"
        return None, [finding("not compared", REPORT, "a recipe", told)]


def _split(original: TensorSource, model: Model) -> TensorSource:
    if model.module is None:
        return original
    from ...calib.expert_shards import by_expert

    return by_expert(model.module, original)
