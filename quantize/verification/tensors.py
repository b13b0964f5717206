"""Names, shapes and dtypes: what the model and its quantization ask for, against what is stored.

The model is built by transformers from config.json, on the meta device, so what it asks for is what
transformers and vLLM ask for. Where transformers does not know it, tensors are held against each
other alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...calib.config_sizes import check_sizes
from ...calib.shards import TensorInfo, TensorSource
from ...kernels.errors import UserError
from ...kernels.names import is_ignored, names_in_model
from ...kernels.packing import padded_words
from ..checkpoint.kv_config import scale_names
from ..checkpoint.layouts import Layout, Stored
from ..spec import LayerScheme
from .findings import Finding, finding

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CODES = ("weight_packed", "qweight")  # leaves that only a quantized linear has
TOLERATED = ("weight_g_idx", "weight_shape", "input_zero_point")  # written by some, needed by none


class Model(NamedTuple):
    """What config.json asks for. module: the model on meta, None where transformers does not know
    it. source: the stored tensors, a layer's experts taken apart. in_model: stored tensor name ->
    the model's name. head: the output linear's stored name."""

    module: Any
    source: TensorSource
    in_model: dict[str, str]
    head: str | None


class Wanted(NamedTuple):
    """A linear's [out, in] and the tensors that store it."""

    shape: tuple[int, int]
    tensors: dict[str, Stored]


def build_model(
    folder: Path, config_json: Mapping[str, Any], source: TensorSource
) -> tuple[Model, list[Finding]]:
    """The model of config.json and the stored tensors in its terms.

    That transformers knows the kind of model and cannot build this one is an error.
    """
    from ...calib.expert_shards import by_expert
    from ...calib.experts import split_experts
    from ...calib.meta_model import build_on_meta, load_config

    try:
        check_sizes(folder / "config.json")
    except UserError as e:
        told = finding("config", "config.json", "sizes that a model can have", e)
        return Model(None, source, {n: n for n in source.names()}, None), [told]
    try:
        config = load_config(folder)
        vars(config).pop("quantization_config", None)
        with torch.device("meta"):
            module = build_on_meta(folder, config, torch.float32)
        split_experts(module)
        source = by_expert(module, source)
    except UserError as e:
        if is_known(config_json):
            told = finding("config", "config.json", "a model that can be built", e)
        else:
            told = finding("model unknown", "config.json", "a model that transformers knows", e)
        return Model(None, source, {n: n for n in source.names()}, None), [told]
    in_model = names_in_model(module, source.names())
    head = module.get_output_embeddings()
    path = next((n for n, m in module.named_modules() if m is head), None)
    return Model(module, source, in_model, path), []


def is_known(config_json: Mapping[str, Any]) -> bool:
    """Whether config.json names a kind of causal LM that is part of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config_json.get("model_type")
    known = isinstance(kind, str) and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return known and "auto_map" not in config_json


def half_linears(layout: Layout, source: TensorSource) -> tuple[set[str], list[Finding]]:
    """Linears that have codes without scales, or scales without codes, and a finding for each."""
    broken: set[str] = set()
    found: list[Finding] = []
    leaves: dict[str, set[str]] = {}
    for name in source.names():
        module, _, leaf = name.rpartition(".")
        leaves.setdefault(module, set()).add(leaf)
    for module, there in leaves.items():
        code = source.info.get(f"{module}.weight")
        coded = bool(there & set(CODES)) or (code is not None and _holds_codes(code))
        scaled = layout.scale_leaf in there
        if coded and not scaled:
            name = f"{module}.{layout.scale_leaf}"
            found.append(finding("missing tensor", name, "scales of the codes", "no such tensor"))
        elif scaled and not coded and code is None:
            expected = "qweight" if layout.scale_leaf == "scales" else "weight_packed or weight"
            name = f"{module}.{expected}"
            found.append(finding("missing tensor", name, "codes of the scales", "no such tensor"))
        else:
            continue
        broken.add(module)
    return broken, found


def _holds_codes(info: TensorInfo) -> bool:
    return info.dtype in (torch.float8_e4m3fn, torch.int8)


def wanted_tensors(
    layout: Layout, schemes: Mapping[str, LayerScheme], model: Model
) -> tuple[dict[str, Wanted], list[Finding]]:
    """What every quantized linear has to be stored as, and why that of some cannot be said."""
    wanted: dict[str, Wanted] = {}
    found: list[Finding] = []
    alike: dict[tuple[LayerScheme, tuple[int, int]], dict[str, Stored]] = {}
    for module, scheme in schemes.items():
        linear = _linear(module, layout, model)
        if isinstance(linear, Finding):
            found.append(linear)
            continue
        try:
            shape = linear or layout.shape(module, scheme.weights, model.source)
            if min(shape) < 1:
                found.append(finding("shape", module, "sizes above 0", shape))
                continue
            refusal = layout.refusal(scheme, shape)
            if refusal is not None:
                expected = f"a linear that {layout.name} holds"
                found.append(finding("shape", module, expected, refusal))
                continue
            if (scheme, shape) not in alike:
                alike[scheme, shape] = layout.tensors("", scheme, shape)
            tensors = {f"{module}{leaf}": t for leaf, t in alike[scheme, shape].items()}
            wanted[module] = Wanted(shape, tensors)
        except UserError as e:
            found.append(finding("config", module, f"a linear as {layout.name} stores it", e))
    return wanted, found


def examine_linears(
    wanted: Mapping[str, Wanted], schemes: Mapping[str, LayerScheme], source: TensorSource
) -> Iterator[Finding]:
    """The headers of every quantized linear's tensors."""
    for module, linear in wanted.items():
        yield from _compare(linear, schemes[module], source)


def _linear(module: str, layout: Layout, model: Model) -> tuple[int, int] | Finding | None:
    """[out, in] of the model's linear, None where the model is unknown; a finding for what the
    model does not have or has as something else."""
    if model.module is None:
        return None
    scale = f"{module}.{layout.scale_leaf}"
    path = model.in_model.get(scale, scale).removesuffix(f".{layout.scale_leaf}")
    try:
        linear = model.module.get_submodule(path)
    except AttributeError:
        kind = type(model.module).__name__
        return finding("extra tensor", module, f"a linear of {kind}", "a quantized linear")
    if not isinstance(linear, torch.nn.Linear):
        return finding("extra tensor", module, "a linear", f"a {type(linear).__name__}, quantized")
    return linear.out_features, linear.in_features


def _compare(linear: Wanted, scheme: LayerScheme, source: TensorSource) -> Iterator[Finding]:
    rows, columns = linear.shape
    for name, stored in linear.tensors.items():
        info = source.info.get(name)
        if info is None:
            if not stored.optional:
                found = "no such tensor"
                yield finding("missing tensor", name, _described(stored.shape, stored.dtype), found)
            continue
        padded = (rows, padded_words(columns, scheme.weights.num_bits))
        if name.endswith(".weight_packed") and padded == info.shape != stored.shape:
            yield finding("older packing", name, f"shape {stored.shape}", f"shape {info.shape}")
        elif info.shape != stored.shape and not (stored.shape == (1,) and info.shape == ()):
            yield finding("shape", name, stored.shape, info.shape)
        elif stored.dtype is None and not info.dtype.is_floating_point:
            yield finding("dtype", name, "a float", info.dtype)
        elif stored.dtype not in (None, info.dtype):
            yield finding("dtype", name, stored.dtype, info.dtype)


def examine_names(
    layout: Layout | None, wanted: Mapping[str, Wanted], broken: Collection[str], model: Model
) -> Iterator[Finding]:
    """Tensors that the model wants beside the quantized weights, and those that nobody wants.

    broken: linears of which a part is missing, as has been said.
    """
    if model.module is None:
        return
    leaves = layout.leaves if layout is not None else frozenset[str]()
    linears = {*wanted, *broken}
    stands_for = {
        name for name in model.source.names()
        for module, _, leaf in [name.rpartition(".")]
        if module in linears and leaf in leaves
    }  # fmt: skip
    yield from _unwanted_leaves(wanted, stands_for)
    by_name = {n: s for s, n in model.in_model.items() if s not in stands_for}
    weights = names_in_model(model.module, [f"{m}.weight" for m in linears])
    yield from _parameters(model, by_name, set(weights.values()))
    used = {by_name[n] for n in model.module.state_dict() if n in by_name}
    used |= {by_name[n] for n, _ in model.module.named_parameters() if n in by_name}
    used |= {*stands_for, *scale_names(model.source.names())}
    for name in model.source.names():
        if name in used or is_ignored(model.module, name):
            continue
        if name.endswith(".bias") and name.removesuffix(".bias") in linears:
            continue  # AutoGPTQ gives every linear one; readers leave it aside
        kind = type(model.module).__name__
        yield finding("extra tensor", name, f"a tensor of {kind}", "a tensor of no module")


def _parameters(model: Model, by_name: Mapping[str, str], quantized: set[str]) -> Iterator[Finding]:
    """The model's parameters that are stored as they are; one of those that it ties is enough."""
    tied: dict[int, list[str]] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
        if name in by_name:
            stored = by_name[name]
            yield from _plain(stored, tuple(parameter.shape), model.source.info[stored])
    for names in tied.values():
        if not any(n in by_name or n in quantized for n in names):
            shape = tuple(model.module.get_parameter(names[0]).shape)
            yield finding("missing tensor", names[0], f"shape {shape}", "no such tensor")


def _unwanted_leaves(wanted: Mapping[str, Wanted], stands_for: Iterable[str]) -> Iterator[Finding]:
    """Parts of a quantized linear that its scheme has no use for, such as a second weight."""
    for name in sorted(stands_for):
        module, _, leaf = name.rpartition(".")
        linear = wanted.get(module)
        if linear is not None and name not in linear.tensors and leaf not in TOLERATED:
            yield finding("extra tensor", name, ", ".join(sorted(linear.tensors)), "one more")


def _plain(name: str, shape: tuple[int, ...], info: TensorInfo) -> Iterator[Finding]:
    if info.shape != shape:
        yield finding("shape", name, shape, info.shape)
    if info.dtype not in FLOATS:
        yield finding("dtype", name, "a float", info.dtype)


def plain_linears(model: Model, linears: Collection[str]) -> list[str]:
    """Stored names of the model's linears whose weight is a float."""
    if model.module is None:
        return []
    stored = {n: s for s, n in model.in_model.items()}
    return [
        stored[f"{path}.weight"].removesuffix(".weight")
        for path, m in model.module.named_modules()
        if isinstance(m, torch.nn.Linear) and f"{path}.weight" in stored
        and stored[f"{path}.weight"].removesuffix(".weight") not in linears
    ]  # fmt: skip


def _described(shape: tuple[int, ...], dtype: torch.dtype | None) -> str:
    return f"shape {shape} of {str(dtype or 'a float').removeprefix('torch.')}"
