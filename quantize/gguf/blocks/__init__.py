"""GGUF block types: one small class each, a file a family; `CODECS` has them by name."""

from __future__ import annotations

from ....kernels.errors import UserError
from .base import Codec
from .iq1_quants import IQ1_M, IQ1_S
from .iq_quants import IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS
from .k_quants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from .legacy import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from .mxfp4 import MXFP4
from .nonlinear import IQ4_NL, IQ4_XS
from .plain import BF16, F16, F32
from .ternary import TQ1_0, TQ2_0

CODECS: dict[str, type[Codec]] = {
    c.name: c
    for c in (
        *(F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1),
        *(Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, TQ1_0, TQ2_0),
        *(IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M),
    )
}


def codec(kind: str) -> type[Codec]:
    """The block type named `kind`, as GGUF spells it; UserError when lowbit has none such."""
    if kind not in CODECS:
        raise UserError(f"unknown GGUF block type '{kind}'; known: {', '.join(CODECS)}")
    return CODECS[kind]
