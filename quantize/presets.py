"""The methods behind a preset's name: how long a run may take, and what it then does.

`fast` looks at the weights alone. `balanced` is what `quantize run` does when nothing is asked for;
`best` spends several times as long on the same calibration rows. docs/accuracy.md has what each
reaches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .passes.settings import one_of
from .spec import LayerScheme, scheme_from_name

PRESETS = ("fast", "balanced", "best")


class Methods(NamedTuple):
    """chain: as --method takes it. settings: method -> the ones that differ from the defaults."""

    chain: str
    settings: dict[str, dict[str, Any]] = {}  # noqa: RUF012 (never changed)


SEARCHED = Methods("rtn", {"rtn": {"scale_search": "mse"}})
REFINED = {"gptq": {"refine_rounds": 4}}

BY_KIND: dict[str, dict[str, Methods]] = {
    "integer weights": {
        "fast": SEARCHED,
        "balanced": Methods("gptq"),
        "best": Methods("awq+gptq", REFINED),
    },
    "integer activations": {
        "fast": Methods("rtn"),
        "balanced": Methods("smoothquant+gptq"),
        "best": Methods("smoothquant+gptq", REFINED),
    },
    "8-bit floats": {"fast": Methods("rtn"), "balanced": SEARCHED, "best": Methods("gptq")},
    "4-bit floats": {
        "fast": SEARCHED,
        "balanced": Methods("gptq"),
        "best": Methods("awq+gptq", REFINED),
    },
}


def preset_methods(preset: str, scheme: str) -> Methods:
    """What `preset` means for the scheme of that name; UserError when there is none."""
    one_of("preset", preset, PRESETS)
    return BY_KIND[_kind(scheme_from_name(scheme))][preset]


def _kind(scheme: LayerScheme) -> str:
    weights, activations = scheme.weights, scheme.input_activations
    if weights.type == "float":
        return f"{weights.num_bits}-bit floats"
    return "integer weights" if activations is None else "integer activations"
