"""compressed-tensors' `quantization_config` to our schemes and back.

Spec: compressed-tensors' QuantizationArgs/QuantizationScheme. A module is claimed by the most exact
target: its name, then a `re:` pattern, then the class name "Linear".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

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
from .patterns import name_pattern

READABLE_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
SCALE_DTYPES = {"e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}


def format_of(scheme: LayerScheme) -> str:
    """The compressed-tensors format that stores `scheme`: the one that vLLM expects for it.

    Integer codes are packed unless activations are quantized: then each takes a byte (also 4-bit).
    """
    weights = scheme.weights
    if weights.type == "int":
        return "pack-quantized" if scheme.input_activations is None else "int-quantized"
    if weights.num_bits == 4:
        return f"{'nvfp4' if weights.scale_dtype == 'e4m3' else 'mxfp4'}-pack-quantized"
    if weights.scale_dtype == "e8m0":
        return "mxfp8-quantized"
    return "naive-quantized" if scheme.input_activations is None else "float-quantized"


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
    dynamic: bool | str = spec.dynamic
    if spec.scale_dtype != "model":
        strategy["scale_dtype"] = SCALE_DTYPES[spec.scale_dtype]
    if spec.scale_dtype == "e4m3":  # under a scale of the whole tensor, which is static
        strategy["strategy"] = "tensor_group"
        dynamic = "local" if spec.dynamic else False
    return {
        "num_bits": spec.num_bits,
        "type": spec.type,
        "symmetric": spec.symmetric,
        "dynamic": dynamic,
        **strategy,
    }


def args_to_spec(args: dict[str, Any]) -> QuantSpec:
    """compressed-tensors QuantizationArgs as a QuantSpec."""
    num_bits, kind = int(args["num_bits"]), args.get("type", "int")
    return QuantSpec(
        num_bits=num_bits,
        type=kind,
        granularity=_granularity(args),
        symmetric=bool(args.get("symmetric", True)),
        dynamic=bool(args.get("dynamic", False)),
        scale_dtype=_scale_dtype(args, num_bits, kind),
    )


def _granularity(args: dict[str, Any]) -> Granularity:
    size = args.get("group_size")
    strategy = args.get("strategy") or ("group" if size and size > 0 else "channel")
    plain = {"tensor": TensorWise(), "channel": Channel(), "token": Token()}
    if strategy in plain:
        return plain[strategy]
    if strategy in ("group", "tensor_group"):
        return Group(int(size or 0))
    if strategy == "block":
        return Block(*args["block_structure"])
    raise UserError(f"quantization strategy '{strategy}' is not supported")


def _scale_dtype(
    args: dict[str, Any], num_bits: int, kind: str
) -> Literal["model", "e4m3", "e8m0"]:
    """How scales are stored; files older than the field tell it by their groups."""
    if args.get("strategy") == "tensor_group":
        return "e4m3"
    named = args.get("scale_dtype")
    older_mx = kind == "float" and num_bits == 4 and args.get("group_size") == 32
    if named == SCALE_DTYPES["e8m0"] or (named is None and older_mx):
        return "e8m0"
    return "model"


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
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, re.error) as e:
        raise UserError(
            f"{folder}: the config_groups of config.json are not those of a compressed-tensors "
            f"checkpoint ({type(e).__name__}: {e}); download it again"
        ) from e


def quantizes_outputs(quantization: dict[str, Any]) -> bool:
    """Whether a config group quantizes what its linears put out, which lowbit does not compute."""
    groups = (quantization.get("config_groups") or {}).values()
    return any(group.get("output_activations") for group in groups)


def _read_group(group: dict[str, Any], fmt: str | None) -> tuple[list[str], LayerScheme]:
    """Targets and scheme of a config group; `fmt`: the format where the group names none."""
    fmt = group.get("format") or fmt
    if fmt not in READABLE_FORMATS:
        raise UserError(f"stored as '{fmt}'; readable: {', '.join(READABLE_FORMATS)}")
    targets = [str(t) for t in group["targets"]]
    for target in targets:
        if target.startswith("re:"):
            name_pattern(target[3:])
    activations = group.get("input_activations")
    return targets, LayerScheme(
        args_to_spec(group["weights"]), args_to_spec(activations) if activations else None
    )


def scheme_for_module(
    module: str, groups: list[tuple[list[str], LayerScheme]]
) -> LayerScheme | None:
    """The scheme that claims `module` (a linear): exact name, then regex, then class name."""
    exact = lambda t: t == module  # noqa: E731
    pattern = lambda t: t.startswith("re:") and name_pattern(t[3:]).match(module)  # noqa: E731
    by_class = lambda t: t == "Linear"  # noqa: E731
    for claims in (exact, pattern, by_class):
        for targets, scheme in groups:
            if any(claims(t) for t in targets):
                return scheme
    return None
