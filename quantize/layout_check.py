"""Whether a recipe's linears can be stored in the format that it names, asked before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..kernels.errors import UserError, did_you_mean
from .recipe_passes import WeightPass
from .spec import LayerScheme

NATIVE = "compressed-tensors"
FORMATS = (NATIVE, "gptq", "gptq_v2", "awq", "fp8")  # of checkpoint/layouts, without torch
WITH_G_IDX = ("gptq", "gptq_v2")


def check_format(name: str, passes: Sequence[WeightPass], has_budget: bool) -> None:
    """UserError when the format called `name` cannot hold what `passes` make, whatever the model.

    has_budget: each linear's width is chosen later.
    """
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        raise UserError(f"unknown format '{name}'{did_you_mean(name, FORMATS)} (known: {known})")
    orders = {p.gptq.act_order for p in passes if p.method == "gptq"}
    if "desc_act" in orders and name not in WITH_G_IDX:
        raise UserError(
            f"act_order 'desc_act' needs a format that stores g_idx ({', '.join(WITH_G_IDX)}), not "
            f"{name}; choose one of them, or act_order 'static'"
        )
    if name == NATIVE:
        return
    if has_budget:
        raise UserError(
            f"a bit budget gives linears widths of their own, counted as {NATIVE} stores them; "
            f"leave out the format {name} and convert the checkpoint afterwards"
        )
    from .checkpoint.layouts import layout_named  # slow: torch

    layout = layout_named(name)
    for taken_by in passes:
        scheme = taken_by.layer_scheme
        why = layout.refusal(scheme) or layout.risk(scheme)
        if why is not None:
            other = "gptq_v2" if layout.refusal(scheme) is None else NATIVE
            raise UserError(
                f"the format {name} cannot store {taken_by.scheme}: {why}; choose {layout.takes}, "
                f"or the format {other}"
            )


def check_linears(name: str, linears: Mapping[str, tuple[LayerScheme, tuple[int, int]]]) -> None:
    """UserError when the format called `name` cannot hold a linear of this scheme and shape [out,
    in], or not all of them together."""
    if name == NATIVE:
        return
    from .checkpoint.layouts import layout_named

    layout = layout_named(name)
    for module, (scheme, shape) in linears.items():
        why = layout.refusal(scheme, shape)
        if why is not None:
            raise UserError(f"'{module}': {why}; ignore it, or choose the format {NATIVE}")
    why = layout.refusal_together({module: scheme for module, (scheme, _) in linears.items()})
    if why is not None:
        raise UserError(f"{why}; give all linears one scheme, or choose the format {NATIVE}")
