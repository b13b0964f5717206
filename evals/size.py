"""What a checkpoint weighs, from its shards' headers alone. Metadata counts.

Bits per weight of the quantized linears: the bits of every tensor that stands in place of their
weights (codes, scales, zero-points, shapes, group indices) over the number of those weights.
Of the whole model: the bits of all tensors over the number of all weights, embeddings included.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from ..calib.shards import Shards, TensorSource
from ..quantize.checkpoint.layouts import find_layout
from ..quantize.checkpoint.load import Checkpoint, read_config
from ..quantize.gguf.as_folder import contents_behind


class SizeReport(NamedTuple):
    """`file_bytes`: of the .safetensors files, headers included; `tensor_bytes`: without them.

    `weights`: how many the whole model has, `quantized_weights`: how many of them are quantized
    linears'. The bits per weight are None where there are none, or where lowbit cannot read the
    layout and thus not count the weights (the byte counts always hold).
    """

    file_bytes: int
    tensor_bytes: int
    weights: int | None
    bits_per_weight: float | None
    quantized_weights: int | None
    quantized_bits_per_weight: float | None


def size_report(folder: str | Path) -> SizeReport:
    """Bytes and bits per weight of a model folder; UserError when it is damaged or no model."""
    folder = Path(folder)
    if (file := contents_behind(folder)) is not None:  # the folder stands for a GGUF file
        bits = file.bits_per_weight
        return SizeReport(file.nbytes, file.tensor_bytes, file.weights, bits, None, None)
    quantization = read_config(folder).get("quantization_config")
    if quantization and find_layout(quantization) is None:
        return _bytes_only(Shards(folder))
    checkpoint = Checkpoint(folder)
    tensors = checkpoint.shards.info
    codes = [n for n in tensors if _stands_for_weight(n, checkpoint)]
    quantized_bytes = sum(tensors[n].nbytes for n in codes)
    quantized = sum(math.prod(checkpoint.shape(m)) for m in checkpoint.schemes)
    plain = sum(math.prod(info.shape) for n, info in tensors.items() if n not in set(codes))
    size = _bytes_only(checkpoint.shards)
    return size._replace(
        weights=quantized + plain,
        bits_per_weight=8 * size.tensor_bytes / (quantized + plain),
        quantized_weights=quantized,
        quantized_bits_per_weight=8 * quantized_bytes / quantized if quantized else None,
    )


def _bytes_only(shards: TensorSource) -> SizeReport:
    files = {info.file for info in shards.info.values()}
    tensor_bytes = sum(info.nbytes for info in shards.info.values())
    shards.close()
    file_bytes = sum((shards.folder / f).stat().st_size for f in files)
    return SizeReport(file_bytes, tensor_bytes, None, None, None, None)


def _stands_for_weight(name: str, checkpoint: Checkpoint) -> bool:
    module, _, leaf = name.rpartition(".")
    if module not in checkpoint.schemes or checkpoint.layout is None:
        return False
    return leaf in checkpoint.layout.leaves and not leaf.startswith("input")
