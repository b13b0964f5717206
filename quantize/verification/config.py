"""config.json's quantization_config: what its readers need of it, refuse and do not know."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...calib.safe_files import read_json_object
from ...kernels.errors import UserError
from ..checkpoint.ct_config import format_of, schemes_from_config
from ..checkpoint.kv_config import OWN_KEY
from ..spec import LayerScheme
from .findings import Finding, finding

ARGS = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic",
    "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
}  # fmt: skip
GROUP = {"targets", "weights", "input_activations", "output_activations", "format"}
TOP = {
    "config_groups", "quant_method", "kv_cache_scheme", "format", "quantization_status",
    "global_compression_ratio", "ignore", "sparsity_config", "moe_sparsity_config",
    "transform_config", "version", "producer",
}  # fmt: skip
NEEDED = {  # what vLLM asks of each method's config, in the names that it takes
    "gptq": (("bits",), ("group_size",), ("desc_act",)),
    "awq": (("bits", "w_bit"), ("group_size", "q_group_size"), ("zero_point",)),
    "fp8": (("activation_scheme",),),
    "compressed-tensors": (("config_groups",),),
}
BESIDE = {"gptq": "quantize_config.json", "awq": "quant_config.json"}
COMPARED = ("bits", "group_size", "sym", "desc_act", "checkpoint_format", "zero_point", "version")
STATUSES = ("initialized", "calibration", "frozen", "compressed", "decompressed")
ACTIVATIONS = ("dynamic", "static")  # schemes of fine-grained FP8
BY_NAME = ("model_type", "architectures")  # by which readers find the model's code


def read_config_object(folder: Path) -> tuple[dict[str, Any], list[Finding]]:
    """config.json, empty where it cannot be used, and why."""
    path = folder / "config.json"
    if not os.path.lexists(path):
        return {}, [finding("no config", "config.json", "a config.json", "no such file")]
    try:
        config = read_json_object(path)
    except UserError as e:
        return {}, [finding("JSON", "config.json", "a JSON object", e)]
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        found = finding("config", "config.json", "an object as quantization_config", quantization)
        return {k: v for k, v in config.items() if k != "quantization_config"}, [found]
    return config, []


def examine_keys(folder: Path, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Keys that readers need and do not find, refuse, or go on without."""
    if OWN_KEY in config:
        yield finding(
            "config key ignored", f"config.json: {OWN_KEY}", "kv_cache_scheme",
            "a format of the cache that only lowbit knows",
        )  # fmt: skip
    for key in BY_NAME:
        if not config.get(key):
            yield finding("config missing key", "config.json", key, sorted(config))
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    method = str(quantization.get("quant_method"))
    for names in NEEDED.get(method, ()):
        if not any(name in quantization for name in names):
            where = "config.json: quantization_config"
            yield finding("config missing key", where, " or ".join(names), sorted(quantization))
    if method == "compressed-tensors":
        yield from _compressed_tensors_keys(quantization)
    yield from _refused_values(method, quantization)
    if method in BESIDE and os.path.lexists(folder / BESIDE[method]):
        yield from _beside(folder, BESIDE[method], quantization)


def _refused_values(method: str, quantization: Mapping[str, Any]) -> Iterator[Finding]:
    """Values that the method's readers do not take."""
    at = "config.json: quantization_config"
    if method == "awq" and quantization.get("zero_point", True) is not True:
        found = quantization["zero_point"]
        yield finding("config", f"{at}.zero_point", "true: qzeros are stored, and read", found)
    scheme = quantization.get("activation_scheme", ACTIVATIONS[0])
    if method == "fp8" and scheme not in ACTIVATIONS:
        expected = " or ".join(ACTIVATIONS)
        yield finding("config", f"{at}.activation_scheme", expected, scheme)
    if method == "compressed-tensors":
        status = quantization.get("quantization_status")
        where = f"{at}.quantization_status"
        if status is not None and status not in STATUSES:
            yield finding("config", where, f"one of {', '.join(STATUSES)}", status)
        elif status != "compressed":
            yield finding("quantization status", where, "compressed", status)


def examine_formats(
    folder: Path,
    quantization: Mapping[str, Any],
    schemes: Mapping[str, LayerScheme],
    stored: Container[str],
) -> Iterator[Finding]:
    """What compressed-tensors' config calls the way in which linears are stored, against how they
    are, told once a group. stored: names of the tensors."""
    if quantization.get("quant_method") != "compressed-tensors":
        return
    at = "config.json: quantization_config"
    packed = {(s, f"{m}.weight_packed" in stored) for m, s in schemes.items()}
    groups, common = quantization["config_groups"], quantization.get("format")
    every: set[str] = set()
    named: set[str] = set()
    for name, (_, scheme) in zip(
        groups, schemes_from_config(dict(quantization), folder), strict=True
    ):
        right = {f for s, p in packed for f in _formats(s, p) if s == scheme}
        said = str(groups[name].get("format") or common)
        if right and said not in right:
            yield finding("config", f"{at}.{name}.format", " or ".join(sorted(right)), said)
        every |= right
        named.add(said)
    right = {"mixed-precision", *(every if len(named) == 1 else ())}
    if every and common is not None and str(common) not in right:
        yield finding("config", f"{at}.format", " or ".join(sorted(right)), common)


def _formats(scheme: LayerScheme, packed: bool) -> tuple[str, ...]:
    """What compressed-tensors calls a linear of `scheme`, its codes packed or a byte each."""
    if scheme.weights.type == "int":
        return ("pack-quantized",) if packed else ("int-quantized", "naive-quantized")
    if scheme.weights.num_bits == 8 and scheme.weights.scale_dtype == "model":
        return "float-quantized", "naive-quantized"
    return (format_of(scheme),)


def _compressed_tensors_keys(quantization: Mapping[str, Any]) -> Iterator[Finding]:
    at = "config.json: quantization_config"
    for key in quantization.keys() - TOP:
        yield finding("config key ignored", f"{at}.{key}", f"one of {', '.join(sorted(TOP))}", key)
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict):
        return  # the layout says so
    arguments = [(f"{at}.kv_cache_scheme", quantization.get("kv_cache_scheme"))]
    for name, group in groups.items():
        if not isinstance(group, dict):
            continue
        for key in group.keys() - GROUP:
            yield finding("config key", f"{at}.{name}.{key}", f"one of {sorted(GROUP)}", key)
        if group.get("output_activations"):
            yield finding(
                "reader limit", f"{at}.{name}.output_activations", "null",
                "quantized outputs, which lowbit does not compute either",
            )  # fmt: skip
        parts = ("weights", "input_activations", "output_activations")
        arguments += [(f"{at}.{name}.{part}", group.get(part)) for part in parts]
    for where, args in arguments:
        for key in args.keys() - ARGS if isinstance(args, dict) else ():
            yield finding("config key", f"{where}.{key}", f"one of {sorted(ARGS)}", key)


def _beside(folder: Path, name: str, quantization: Mapping[str, Any]) -> Iterator[Finding]:
    """The method's own file against config.json; which of them is read depends on the reader."""
    try:
        beside = read_json_object(folder / name)
    except UserError as e:
        yield finding("JSON", name, "a JSON object", e)
        return
    for key in COMPARED:
        if key in beside and key in quantization and beside[key] != quantization[key]:
            yield finding("configs disagree", f"{name}: {key}", quantization[key], beside[key])
