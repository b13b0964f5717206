"""GPTQ's `quantization_config` (the same as quantize_config.json) to schemes and back.

One width and group size for all, and exceptions under `dynamic`: a pattern after "+:" with what
differs, or after "-:" for linears left alone; the first that matches counts. Engines that run q/k/v
or gate/up as one linear ask for it by its fused name, so patterns cover that too. transformers
(through optimum) knows no exceptions, but a list of the linears of each layer that are quantized.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....kernels.errors import UserError
from ...spec import Channel, Granularity, Group, LayerScheme, QuantSpec
from ..patterns import NamePattern, name_pattern

IN_A_LAYER = re.compile(r"(.*?\.\d+)\.(.+)")  # a decoder layer and the name inside it
FUSED_NAMES = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
}


def gptq_config(
    checkpoint_format: str,
    schemes: Mapping[str, LayerScheme],
    ignore: list[str],
    version: str,
    act_order: bool,
) -> dict[str, Any]:
    """The config of a checkpoint whose quantized linears are `schemes`' keys.

    ignore: the linears left alone; act_order: whether some columns lie in no order of groups.
    """
    by_scheme: dict[QuantSpec, list[str]] = {}
    for module, scheme in schemes.items():
        by_scheme.setdefault(scheme.weights, []).append(module)
    common, *others = sorted(by_scheme, key=lambda s: -len(by_scheme[s]))
    dynamic: dict[str, dict[str, Any]] = {}
    for spec in others:
        differs = {k: v for k, v in _facts(spec).items() if _facts(common)[k] != v}
        dynamic |= {f"+:{p}": differs for p in _patterns(by_scheme[spec])}
    inner = [n for n in ignore if IN_A_LAYER.match(n)]
    dynamic |= {f"-:{p}": {} for p in _patterns(inner)}
    return {
        "quant_method": "gptq",
        **_facts(common),
        "desc_act": act_order,
        "checkpoint_format": checkpoint_format,
        "format": checkpoint_format,
        "pack_dtype": "int32",
        "lm_head": any(m.rpartition(".")[2] == "lm_head" for m in schemes),
        "true_sequential": True,
        **({"dynamic": dynamic} if dynamic else {}),
        **_quantized_in_a_layer(list(schemes), inner),
        "meta": {"quantizer": [f"lowbit:{version}"]},
    }


def read_schemes(
    quantization: Mapping[str, Any], modules: list[str], folder: Path
) -> dict[str, LayerScheme]:
    """The scheme of each of `modules`, which are stored quantized."""
    pack_dtype = str(quantization.get("pack_dtype") or "int32").removeprefix("torch.")
    if pack_dtype != "int32":
        raise UserError(f"{folder}: codes are packed in {pack_dtype}; lowbit reads int32")
    try:
        dynamic = _compiled(quantization.get("dynamic") or {})
        return {m: _scheme({**quantization, **_override(m, dynamic)}) for m in modules}
    except UserError as e:
        raise UserError(f"{folder}: {e}") from e
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, re.error) as e:
        raise UserError(
            f"{folder}: the quantization_config of config.json is not that of a GPTQ checkpoint "
            f"({type(e).__name__}: {e}); download it again"
        ) from e


def _quantized_in_a_layer(modules: list[str], ignored: list[str]) -> dict[str, Any]:
    """`modules_in_block_to_quantize`, where some linears of the layers are left alone and all
    layers are alike; else nothing."""
    layers: dict[str, list[str]] = {}
    for module in modules:
        if (found := IN_A_LAYER.match(module)) is not None:
            layers.setdefault(found[1], []).append(found[2])
    alike = len({frozenset(leaves) for leaves in layers.values()}) == 1
    if not ignored or not alike:
        return {}
    return {"modules_in_block_to_quantize": [next(iter(layers.values()))]}


def _facts(spec: QuantSpec) -> dict[str, Any]:
    match spec.granularity:
        case Group(size):
            group_size = size
        case _:
            group_size = -1
    return {"bits": spec.num_bits, "group_size": group_size, "sym": spec.symmetric}


def _scheme(facts: Mapping[str, Any]) -> LayerScheme:
    bits, size = int(facts["bits"]), int(facts["group_size"])
    if bits not in (2, 3, 4, 8):
        raise UserError(f"GPTQ codes have 2, 3, 4 or 8 bits, got {bits}")
    granularity: Granularity = Channel() if size == -1 else Group(size)
    return LayerScheme(QuantSpec(bits, "int", granularity, bool(facts.get("sym", True))))


def _compiled(dynamic: Mapping[str, Any]) -> list[tuple[NamePattern, bool, dict[str, Any]]]:
    """(pattern, whether its modules are quantized, what differs) of each exception."""
    return [
        (name_pattern(key.removeprefix("-:").removeprefix("+:")), not key.startswith("-:"), differs)
        for key, differs in dynamic.items()
    ]


def _override(
    module: str, dynamic: list[tuple[NamePattern, bool, dict[str, Any]]]
) -> dict[str, Any]:
    for pattern, quantized, differs in dynamic:
        if pattern.match(module):
            if not quantized:
                raise UserError(
                    f"'{module}' is stored quantized, but quantization_config's dynamic leaves it "
                    f"alone (-:{pattern.text})"
                )
            return {k: v for k, v in differs.items() if k in ("bits", "group_size", "sym")}
    return {}


def _patterns(modules: list[str]) -> list[str]:
    """A pattern for each of the modules, fused peers under one that also has the fused name."""
    left, patterns = dict.fromkeys(modules), []
    for module in modules:
        if module not in left:
            continue
        parent, dot, leaf = module.rpartition(".")
        names = [leaf]
        for peers, fused in FUSED_NAMES.items():
            together = [f"{parent}{dot}{peer}" for peer in peers]
            if leaf in peers and all(t in left for t in together):
                names = [*peers, fused]
        for name in names:
            left.pop(f"{parent}{dot}{name}", None)
        last = names[0] if len(names) == 1 else f"(?:{'|'.join(names)})"
        patterns.append(f"^{re.escape(parent + dot)}{last}$")
    return patterns
