"""Which tensors of a model folder are linears' weights, from names and shapes alone.

The model is not built, so that transformers need not know it. A linear of a decoder layer is a 2-D
float `NAME.weight` below a numbered layer of the language model. Left alone: embeddings and norms;
routers, whose choice of experts a small error flips; encoders of images and sound; the layers
beyond num_hidden_layers that some models keep for multi-token prediction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..calib.model import FLOATS
from ..calib.shards import TensorInfo
from ..kernels.errors import UserError

LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")
EMBEDDING = re.compile(r"embed|^(wte|wpe)$|norm|^ln|position|rotary")
ROUTER = frozenset({"gate", "router", "gating", "shared_expert_gate", "wg"})
OTHER_SENSES = re.compile(r"vision|visual|image|audio|speech|encoder|projector|resampler|connector")
HEADS = ("lm_head", "embed_out", "output")  # how the output linear is called
LONGEST_KERNEL = 8  # of the convolutions in decoder layers
CONV1D = "transposed linears (Conv1D), whose weights are [in, out]"
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


class LinearNames(NamedTuple):
    """inner: linears of the decoder layers; outer: other modules with a matrix, embeddings left
    out; all on meta. head: the output linear, None where it shares the embedding's weight.
    stacked: tensors of a decoder layer that hold one matrix for each expert."""

    inner: dict[str, nn.Linear]
    outer: dict[str, nn.Linear]
    head: str | None
    stacked: list[str]


def find_linears(info: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> LinearNames:
    """The linears of the model with tensors `info` and a config.json of `config`.

    UserError where there are none, where weights are not floats, and for models whose weights are
    transposed.
    """
    depth = _text_value(config, "num_hidden_layers")
    inner, outer, stacked = {}, {}, []
    for name, tensor in info.items():
        module, _, leaf = name.rpartition(".")
        decoder = _in_decoder(name, depth)
        if decoder and tensor.dtype in FLOATS and _is_stack(name, tensor.shape):
            stacked.append(name)
        if leaf != "weight" or len(tensor.shape) != 2:
            continue
        last = module.rpartition(".")[2]
        if EMBEDDING.search(last) and last not in HEADS:
            continue
        if tensor.dtype not in FLOATS:
            raise UserError(
                f"'{name}' is stored as {tensor.dtype}, so the model is quantized already; give "
                "the original one"
            )
        rows, columns = tensor.shape
        bias = info.get(f"{module}.bias")
        if bias is not None and bias.shape == (columns,) and rows != columns:
            raise UserError(f"the model has {CONV1D}, like '{name}'; lowbit quantizes nn.Linear")
        is_linear = decoder and ROUTER.isdisjoint(module.split("."))
        (inner if is_linear else outer)[module] = _on_meta(tensor.shape)
    if not inner:
        raise UserError(
            "no weight of a decoder layer was found among the tensors' names (a matrix named like "
            "'model.layers.0.self_attn.q_proj.weight'); choose another model"
        )
    head = next((m for m in outer if m.rpartition(".")[2] in HEADS), None)
    if head is None:
        outer[HEADS[0]] = nn.Linear(1, 1, bias=False, device="meta")  # has no tensor of its own
    elif _text_value(config, "tie_word_embeddings"):
        head = None
    return LinearNames(inner, outer, head, stacked)


def fused_peers(modules: list[str]) -> list[list[str]]:
    """`modules` in groups that inference engines run as one linear: q/k/v, gate/up, w1/w3."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        together = next((f for f in FUSED if leaf in f), (leaf,))
        groups.setdefault((parent, *together), []).append(module)
    return list(groups.values())


def _in_decoder(name: str, depth: int | None) -> bool:
    """Whether the tensor lies in a decoder layer of the language model that has `depth` layers."""
    found = LAYER.search(name)
    if found is None or OTHER_SENSES.search(name[: found.start()]):
        return False
    return depth is None or int(found[1]) < depth


def _is_stack(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor holds a matrix for each expert; a convolution's last dimension is small."""
    return len(shape) == 3 and ("expert" in name or min(shape[1:]) > LONGEST_KERNEL)


def _text_value(config: Mapping[str, Any], key: str) -> Any:
    """A value of the language model's config, which multimodal models keep apart."""
    text = config.get("text_config")
    return text[key] if isinstance(text, Mapping) and key in text else config.get(key)


def _on_meta(shape: tuple[int, ...]) -> nn.Linear:
    rows, columns = shape
    return nn.Linear(columns, rows, bias=False, device="meta", dtype=torch.float32)
