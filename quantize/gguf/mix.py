"""Which block type each tensor of a file gets: llama-quantize's choice for the plain file types.

Norms, biases and every other 1-D tensor stay float32. The matrix that gives the logits (output, or
token_embd when tied) decides more than its size suggests, so 4- and 5-bit files store it as Q6_K.
A tensor whose columns do not fill whole blocks falls back, at last to F16.
"""

from __future__ import annotations

from ...kernels.errors import UserError
from .blocks import CODECS, Codec
from .blocks.k_quants import Q6_K
from .blocks.legacy import Q8_0
from .blocks.plain import F16, F32

FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32,
}  # fmt: skip


def check_file_type(file_type: str) -> str:
    """`file_type` in its usual spelling; UserError when there is none such."""
    if file_type.upper() not in FILE_TYPES:
        raise UserError(f"unknown GGUF type '{file_type}'; known: {', '.join(FILE_TYPES)}")
    return file_type.upper()


def choose_codec(name: str, shape: tuple[int, ...], file_type: str, tied: bool) -> type[Codec]:
    """The block type of the tensor `name` (GGUF's name) in a file of `file_type`."""
    if len(shape) < 2:
        return F32
    base = CODECS[file_type]
    output = "token_embd.weight" if tied else "output.weight"
    small = base.block > 1 and base is not Q8_0
    wanted = (Q6_K, Q8_0, F16) if name == output and small else (base, F16)
    return next(c for c in wanted if shape[-1] % c.block == 0)
