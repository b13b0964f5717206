"""config.json's quantization_config: what its readers need of it, refuse and do not know."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...calib.safe_files import read_json_object
from ...kernels.errors import UserError
from ..checkpoint.ct_config import scheme_for_module, schemes_from_config
from ..checkpoint.kv_config import OWN_KEY
from ..checkpoint.patterns import name_pattern
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
VLLM_WIDTHS = (4, 8)  # of packed whole numbers


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
    if method in BESIDE and os.path.lexists(folder / BESIDE[method]):
        yield from _beside(folder, BESIDE[method], quantization)


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


def examine_widths(schemes: Mapping[str, LayerScheme]) -> Iterator[Finding]:
    """Widths that vLLM has no kernel for, each once."""
    told: set[int] = set()
    for module, scheme in schemes.items():
        weights = scheme.weights
        odd = weights.type == "int" and weights.num_bits not in VLLM_WIDTHS
        if odd and weights.num_bits not in told:
            told.add(weights.num_bits)
            expected = " or ".join(f"{n} bits" for n in VLLM_WIDTHS)
            yield finding("reader limit", module, expected, f"{weights.num_bits} bits")


def left_quantized(
    quantization: Mapping[str, Any], plain: Iterable[str], head: str | None, folder: Path
) -> Iterator[Finding]:
    """The linears among `plain`, stored as floats, that the config says are quantized.

    head: the output linear, which GPTQ's, AWQ's and FP8's readers leave alone by themselves.
    """
    method = quantization.get("quant_method")
    claims = CLAIMS.get(str(method))
    if claims is None:
        return
    try:
        claimed = claims(quantization, list(plain), head, folder)
    except (UserError, re.error, AttributeError, TypeError) as e:
        where = "config.json: quantization_config"
        yield finding("config", where, "names and patterns of linears left alone", e)
        return
    for module in claimed:
        yield finding(
            "targeted, not quantized", f"{module}.weight", "codes, as config.json says",
            "a float weight that config.json does not leave out",
        )  # fmt: skip


def _claimed_by_groups(
    quantization: Mapping[str, Any], plain: list[str], head: str | None, folder: Path
) -> list[str]:
    """compressed-tensors: what a group targets and `ignore` does not name."""
    groups = schemes_from_config(dict(quantization), folder)
    ignore = quantization.get("ignore") or []
    left = [m for m in plain if not any(_names(str(t), m) for t in ignore)]
    return [m for m in left if scheme_for_module(m, groups) is not None]


def _names(target: str, module: str) -> bool:
    """Whether a target of `ignore` is the linear, its class or a pattern of it."""
    if target.startswith("re:"):
        return name_pattern(target[3:]).match(module)
    return target in (module, "Linear")


def _claimed_but_listed(
    quantization: Mapping[str, Any], plain: list[str], head: str | None, folder: Path
) -> list[str]:
    """AWQ and fine-grained FP8: all but modules_to_not_convert, whose names may be parts."""
    kept = [str(k) for k in quantization.get("modules_to_not_convert") or []]
    return [m for m in plain if m != head and not any(k in m for k in kept)]


def _claimed_but_excluded(
    quantization: Mapping[str, Any], plain: list[str], head: str | None, folder: Path
) -> list[str]:
    """GPTQ: all but what `dynamic` excludes."""
    dynamic = quantization.get("dynamic") or {}
    excluded = [name_pattern(k.removeprefix("-:")) for k in dynamic if k.startswith("-:")]
    return [m for m in plain if m != head and not any(p.match(m) for p in excluded)]


CLAIMS: dict[str, Callable[[Mapping[str, Any], list[str], str | None, Path], list[str]]] = {
    "compressed-tensors": _claimed_by_groups,
    "awq": _claimed_but_listed,
    "fp8": _claimed_but_listed,
    "gptq": _claimed_but_excluded,
}
