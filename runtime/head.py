"""The output head in whole numbers of 8 bits, for those who ask for it: half the bytes of a large
part of what a token of a small model reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kernels.affine import quantize_affine
from ..kernels.errors import UserError
from ..quantize.quantized import Quantized
from ..quantize.ranges import choose_qparams
from ..quantize.spec import Channel, LayerScheme, QuantSpec
from .linear import LinearReport, PackedLinear

HEAD_BITS = (8,)


@torch.no_grad()
def pack_head(
    model: Any, bits: int, dtype: torch.dtype, batch_invariant: bool, taped: bool
) -> LinearReport:
    """Round the output head of a loaded model to nearest, one scale a row of the vocabulary, and
    keep it packed; an embedding that it was tied to stays as it is. dtype: of activations.

    UserError for other `bits` than HEAD_BITS, and where the head is packed already.
    """
    if bits not in HEAD_BITS:
        raise UserError(f"head_bits must be {' or '.join(map(str, HEAD_BITS))}, got {bits}")
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UserError(
            f"head_bits needs an output head of floats, not a {type(head).__name__}: leave it out"
        )
    spec = QuantSpec(bits, granularity=Channel())
    weight = head.weight.detach()
    found = choose_qparams(weight, spec, torch.float32)
    codes = quantize_affine(weight, found.scale, None, bits)
    packed = PackedLinear(
        "lm_head", [Quantized(codes, found.scale, None, spec)], LayerScheme(spec), head.bias, dtype,
        weight.device, None, None, batch_invariant, taped,
    )  # fmt: skip
    model.set_output_embeddings(packed)
    return packed.report
