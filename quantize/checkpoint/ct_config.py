"""compressed-tensors' `quantization_config` to our schemes and back.

Spec: compressed-tensors' QuantizationArgs/QuantizationScheme. A module is claimed by the most exact
target: its name, then a `re:` pattern, then the class name "Linear".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ...kernels.errors import UserError
from ..spec import (
    Block,
    Channel,
    Granularity,
    Group,
    LayerScheme,
    QuantSpec,
    TensorWise,
    Token,
)

READABLE_FORMATS = ("pack-quantized", "int-quantized")


def format_of(scheme: LayerScheme) -> str:
    """The compressed-tensors format that stores `scheme`."""
    if scheme.weights.type == "float":
        raise UserError("float formats are not written yet; use an integer scheme")
    if scheme.weights.num_bits == 8:
        return "int-quantized"
    return "pack-quantized"


def spec_to_args(spec: QuantSpec) -> dict[str, Any]:
    """A QuantSpec as compressed-tensors QuantizationArgs."""
    strategy: dict[str, Any]
    match spec.granularity:
        case TensorWise():
            strategy = {"strategy": "tensor", "group_size": None}
        case Channel():
            strategy = {"strategy": "channel", "group_size": None}
        case Token():
            strategy = {"strategy": "token", "group_size": None}
        case Group(size):
            strategy = {"strategy": "group", "group_size": size}
        case Block(rows, columns):
            strategy = {"strategy": "block", "group_size": None, "block_structure": [rows, columns]}
    return {
        "num_bits": spec.num_bits,
        "type": spec.type,
        "symmetric": spec.symmetric,
        "dynamic": spec.dynamic,
        **strategy,
    }


def args_to_spec(args: dict[str, Any]) -> QuantSpec:
    """compressed-tensors QuantizationArgs as a QuantSpec."""
    size = args.get("group_size")
    strategy = args.get("strategy") or ("group" if size and size > 0 else "channel")
    granularity: Granularity
    if strategy == "group":
        granularity = Group(int(size or 0))
    elif strategy == "block":
        granularity = Block(*args["block_structure"])
    elif strategy in (plain := {"tensor": TensorWise(), "channel": Channel(), "token": Token()}):
        granularity = plain[strategy]
    else:
        raise UserError(f"quantization strategy '{strategy}' is not supported")
    return QuantSpec(
        num_bits=int(args["num_bits"]),
        type=args.get("type", "int"),
        granularity=granularity,
        symmetric=bool(args.get("symmetric", True)),
        dynamic=bool(args.get("dynamic", False)),
    )


def config_from_schemes(
    schemes: dict[str, LayerScheme], ignore: list[str], version: str
) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose quantized modules are `schemes`' keys.

    `ignore` lists the linears left alone. The commonest scheme targets the class "Linear", every
    other scheme the names of its modules.
    """
    by_scheme: dict[LayerScheme, list[str]] = {}
    for module, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(module)
    ordered = sorted(by_scheme, key=lambda s: -len(by_scheme[s]))
    groups = {}
    for i, scheme in enumerate(ordered):
        activations = scheme.input_activations
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if i == 0 else sorted(by_scheme[scheme]),
            "weights": spec_to_args(scheme.weights),
            "input_activations": spec_to_args(activations) if activations else None,
            "output_activations": None,
            "format": format_of(scheme),
        }
    formats = {g["format"] for g in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "producer": {"name": "lowbit", "version": version},
    }


def schemes_from_config(
    quantization: dict[str, Any], folder: Path
) -> list[tuple[list[str], LayerScheme]]:
    """(targets, scheme) of every config group; UserError for methods and formats not read."""
    method = quantization.get("quant_method")
    if method != "compressed-tensors":
        raise UserError(
            f"{folder} is quantized with '{method}'; lowbit reads compressed-tensors checkpoints"
        )
    groups = quantization.get("config_groups", {})
    try:
        return [_read_group(group, quantization.get("format")) for group in groups.values()]
    except UserError as e:
        raise UserError(f"{folder}: {e}") from e
    except (AttributeError, KeyError, TypeError, ValueError, re.error) as e:
        raise UserError(
            f"{folder}: the config_groups of config.json are not those of a compressed-tensors "
            f"checkpoint ({type(e).__name__}: {e}); download it again"
        ) from e


def _read_group(group: dict[str, Any], fmt: str | None) -> tuple[list[str], LayerScheme]:
    """Targets and scheme of a config group; `fmt`: the format where the group names none."""
    fmt = group.get("format") or fmt
    if fmt not in READABLE_FORMATS:
        raise UserError(f"stored as '{fmt}'; readable: {', '.join(READABLE_FORMATS)}")
    targets = [str(t) for t in group["targets"]]
    for target in targets:
        re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
    activations = group.get("input_activations")
    return targets, LayerScheme(
        args_to_spec(group["weights"]), args_to_spec(activations) if activations else None
    )


def scheme_for_module(
    module: str, groups: list[tuple[list[str], LayerScheme]]
) -> LayerScheme | None:
    """The scheme that claims `module` (a linear): exact name, then regex, then class name."""
    exact = lambda t: t == module  # noqa: E731
    pattern = lambda t: t.startswith("re:") and re.match(t[3:], module) is not None  # noqa: E731
    by_class = lambda t: t == "Linear"  # noqa: E731
    for claims in (exact, pattern, by_class):
        for targets, scheme in groups:
            if any(claims(t) for t in targets):
                return scheme
    return None
