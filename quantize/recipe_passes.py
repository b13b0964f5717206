"""The passes that a recipe lists: transforms, weight quantizers, the cache's quantizer.

A pass says what (scheme), where (targets, ignore) and how (the settings named like its method).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from ..kernels.errors import UserError
from .config_reading import build, mapping, plain
from .passes.settings import (
    AWQSettings,
    GPTQSettings,
    HQQSettings,
    KVCacheSettings,
    RotateSettings,
    RTNSettings,
    SignRoundSettings,
    SmoothQuantSettings,
    one_of,
)
from .spec import Channel, Group, LayerScheme, scheme_from_name

TRANSFORMS = ("rotate", "smoothquant", "awq")
QUANTIZERS = ("gptq", "rtn", "hqq", "signround")
DATA_FREE = ("rtn", "hqq")


@dataclass(frozen=True)
class Transform:
    """A change of the weights that leaves the model's outputs as they are and makes it easier to
    quantize. `rotate` takes the whole model; the others the linears that `targets` and `ignore`
    name (as in WeightPass)."""

    method: Literal["rotate", "smoothquant", "awq"] = "awq"
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()
    rotate: RotateSettings = field(default_factory=RotateSettings)
    smoothquant: SmoothQuantSettings = field(default_factory=SmoothQuantSettings)
    awq: AWQSettings = field(default_factory=AWQSettings)

    def __post_init__(self) -> None:
        one_of("method", self.method, TRANSFORMS)

    @property
    def needs(self) -> frozenset[str]:
        """The statistics that the method wants."""
        return {
            "rotate": frozenset[str](),
            "awq": frozenset({"hessian", "channel_range"}),
            "smoothquant": frozenset({"channel_range", "token_sample"}),
        }[self.method]


@dataclass(frozen=True)
class WeightPass:
    """One weight quantizer and the linears that it takes.

    group_size: None chooses the largest of 128, 64, 32, 16 that divides every target (-1: channel).
    targets, ignore: module names, "re:" patterns or class names; "Linear" means every linear of the
    decoder layers (lm_head has to be named).
    """

    method: Literal["gptq", "rtn", "hqq", "signround"] = "gptq"
    scheme: str = "W4A16"
    group_size: int | None = None
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()
    gptq: GPTQSettings = field(default_factory=GPTQSettings)
    rtn: RTNSettings = field(default_factory=RTNSettings)
    hqq: HQQSettings = field(default_factory=HQQSettings)
    signround: SignRoundSettings = field(default_factory=SignRoundSettings)

    def __post_init__(self) -> None:
        one_of("method", self.method, QUANTIZERS)
        scheme = scheme_from_name(self.scheme, self.group_size)
        if not self.targets:
            raise UserError("a pass without targets does nothing; name at least one")
        if self.gptq.refine_rounds and not isinstance(scheme.weights.granularity, Channel | Group):
            raise UserError(
                f"refine_rounds is for scales of channels or groups, which {self.scheme} has not"
            )
        if self.method in ("hqq", "signround") and scheme.weights.type != "int":
            raise UserError(
                f"{self.method} is for integer formats, not {self.scheme}; use rtn or gptq"
            )

    @property
    def layer_scheme(self) -> LayerScheme:
        """The scheme by name; its group size is the preset's where `group_size` is None."""
        return scheme_from_name(self.scheme, self.group_size)

    @property
    def needs(self) -> frozenset[str]:
        """The statistics that the method wants."""
        wanted = frozenset() if self.method in DATA_FREE else frozenset({"hessian"})
        activations = self.layer_scheme.input_activations
        scaled = activations is not None and (
            not activations.dynamic or activations.scale_dtype == "e4m3"
        )
        if self.method == "gptq" and self.gptq.input_correction:
            wanted |= {"input_shift"}
        return wanted | ({"channel_range"} if scaled else frozenset())


@dataclass(frozen=True)
class KVCachePass:
    """How keys and values are stored when the model runs. Static scales are calibrated."""

    method: Literal["kv_cache"] = "kv_cache"
    kv_cache: KVCacheSettings = field(default_factory=KVCacheSettings)

    def __post_init__(self) -> None:
        one_of("method", self.method, ("kv_cache",))

    @property
    def needs(self) -> frozenset[str]:
        """What has to be observed; the cache's range is not a statistic of a linear's input."""
        return frozenset({"kv_range"}) if self.kv_cache.spec.is_static else frozenset()


Pass = Transform | WeightPass | KVCachePass
STAGES: tuple[type[Any], ...] = (Transform, WeightPass, KVCachePass)


def pass_to_dict(a_pass: Pass) -> dict[str, Any]:
    """Plain values in the form that `pass_from_dict` reads, with the settings of its method."""
    data = plain(asdict(a_pass))
    return {k: v for k, v in data.items() if not isinstance(v, dict) or k == a_pass.method}


def pass_from_dict(data: Any, where: str) -> Pass:
    """The pass whose `method` the mapping names (gptq where it names none)."""
    data = dict(mapping(data, where))
    method = data.get("method", WeightPass().method)
    if method == "kv_cache":
        cls: type[Any] = KVCachePass
    else:
        one_of("method", str(method), (*TRANSFORMS, *QUANTIZERS, "kv_cache"))
        cls = Transform if method in TRANSFORMS else WeightPass
    defaults = cls(method=method)
    nested = {f.name for f in fields(cls) if f.name in (*TRANSFORMS, *QUANTIZERS, "kv_cache")}
    for name in nested & data.keys():
        if name != method:
            raise UserError(f"{where}: settings of '{name}' in a pass of method '{method}'")
        data[name] = build(type(getattr(defaults, name)), data[name], f"{where}.{name}")
    return build(cls, data, where, defaults)
