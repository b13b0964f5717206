"""Linears that engines run as one (q/k/v, gate/up), tied embeddings, and the cache's scales."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...calib.shards import TensorSource
from ...kernels.errors import UserError
from ..checkpoint.kv_config import LAYER, SCALE_NAMES, kv_spec_from_config, scale_names
from ..linear_names import fused_peers
from ..quantized import plain_g_idx
from ..spec import LayerScheme
from .findings import Finding, finding
from .tensors import Model, Wanted
from .values import Gathered, examine_measured

SHARED = ("weight_global_scale", "input_scale", "input_global_scale")
KEYS = re.compile(r"(?:^|\.)(k_proj|qkv_proj|query_key_value|c_attn)\.")


def examine_peers(
    schemes: Mapping[str, LayerScheme], plain: list[str], source: TensorSource
) -> Iterator[Finding]:
    """Fused peers that differ in scheme, in a scale that they share, or in the order of columns.

    plain: linears stored as floats.
    """
    for peers in fused_peers([*schemes, *plain]):
        quantized = [m for m in peers if m in schemes]
        if len(peers) == 1 or not quantized:
            continue
        kinds = {m: schemes.get(m) for m in peers}
        if len(set(kinds.values())) > 1:
            told = ", ".join(f"{m.rpartition('.')[2]} {_kind(s)}" for m, s in kinds.items())
            yield finding("fused peers", peers[0], "one scheme for all of them", told)
            continue
        for leaf in SHARED:
            names = [f"{m}.{leaf}" for m in quantized if f"{m}.{leaf}" in source]
            values = [source.get(n).reshape(-1)[:1].float() for n in names]
            if len({v.item() for v in values if v.numel()}) > 1:
                found = ", ".join(f"{v.item():.6g}" for v in values)
                yield finding("fused peers' scales", names[0], f"one {leaf} for all", found)
        yield from _orders([f"{m}.g_idx" for m in quantized if f"{m}.g_idx" in source], source)


def _orders(names: list[str], source: TensorSource) -> Iterator[Finding]:
    orders = [source.get(n) for n in names]
    if any(not torch.equal(o, orders[0]) for o in orders):
        yield finding("fused peers", names[0], "one g_idx for all of them", "they differ")


def examine_order(
    quantization: Mapping[str, Any],
    schemes: Mapping[str, LayerScheme],
    wanted: Mapping[str, Wanted],
    source: TensorSource,
) -> Iterator[Finding]:
    """GPTQ's columns in an order of their own, where config.json says that there is none."""
    if quantization.get("quant_method") != "gptq" or quantization.get("desc_act"):
        return
    for module, linear in wanted.items():
        name, columns = f"{module}.g_idx", linear.shape[1]
        if name in source and source.info[name].shape == (columns,):
            spec, g_idx = schemes[module].weights, source.get(name).int()
            known = bool(((g_idx >= 0) & (g_idx < spec.groups(columns))).all())
            if known and not torch.equal(g_idx, plain_g_idx(columns, spec)):
                found = "another order, and desc_act is not true"
                yield finding("g_idx order", name, "groups in the order of columns", found)


def _kind(scheme: LayerScheme | None) -> str:
    if scheme is None:
        return "not quantized"
    weights = scheme.weights
    return f"{weights.type}{weights.num_bits} {weights.granularity}"


def examine_ties(model: Model) -> Iterator[Finding]:
    """Tensors that config.json ties together, stored more than once and not alike."""
    if model.module is None:
        return
    stored = {n: s for s, n in model.in_model.items()}
    tied: dict[int, list[str]] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        if name in stored:
            tied.setdefault(id(parameter), []).append(stored[name])
    for first, *others in tied.values():
        for other in others:
            if not _equal(first, other, model.source):
                yield finding("tied tensors differ", other, f"the same as {first}", "other values")


def _equal(a: str, b: str, source: TensorSource) -> bool:
    if source.info[a].shape != source.info[b].shape:
        return False
    return torch.equal(source.get(a), source.get(b))


def examine_cache(
    config: Mapping[str, Any], source: TensorSource, gathered: Gathered
) -> Iterator[Finding]:
    """The calibrated scales of keys and values, where config.json says that there are some."""
    try:
        spec = kv_spec_from_config(dict(config))
    except UserError as e:
        yield finding("config", "config.json", "how a cache is quantized", e)
        return
    names = scale_names(source.names())
    for name in names:
        values = source.get(name).float()
        yield from examine_measured(name, values)
        gathered.count(name.rpartition(".")[2], values)
    if spec is None or not spec.is_static:
        return
    sides = [s for s, p in zip(SCALE_NAMES, (spec.key, spec.value), strict=True) if p is not None]
    for module in _attentions(source):
        number = LAYER.search(f"{module}.")
        if number is not None and int(number[1]) in spec.skip_layers:
            continue
        for side in sides:
            if f"{module}.{side}" not in names:
                expected = "a calibrated scale of the cache"
                yield finding("missing tensor", f"{module}.{side}", expected, "no such tensor")


def _attentions(source: TensorSource) -> list[str]:
    """Names of the modules that project keys, in order."""
    found = {}
    for name in source.names():
        keys = KEYS.search(name)
        if keys is not None and LAYER.search(name) is not None:
            found[name[: keys.start()]] = None
    return list(found)
