"""What a rotation does to each tensor of a model: its role, from names, shapes and a probed norm.

Known is the structure of Llama and its many relatives (Qwen2 and 3, Mistral, Phi-3, Gemma 1,
DeepSeek's latent attention, mixtures of experts): an embedding; in each layer a norm before the
attention and one before the MLP, whose outputs are added to the residual stream as they are; a norm
and the head. A tensor whose role is not known is a refusal: left in the old basis, it would ruin
the model without a word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..calib.model import LayeredModel
from ..calib.shards import TensorSource
from ..kernels.errors import UserError
from ..kernels.names import names_in_model
from .passes.rotate import HeadRows
from .passes.settings import RotateSettings

MLP = r"(?:mlp|block_sparse_moe)"
EXPERT = rf"{MLP}(?:\.(?:shared_experts?|experts\.\d+))?"
ATTENTION_READER = r"self_attn\.(?:[qkv]_proj|qkv_proj|q_a_proj|kv_a_proj_with_mqa)"
MLP_READER = rf"{EXPERT}\.(?:gate_proj|up_proj|gate_up_proj|w1|w3)"
ROUTER = rf"{MLP}\.(?:gate|router|shared_expert_gate)"
ATTENTION_READS = rf"{ATTENTION_READER}\.weight"
MLP_READS = rf"(?:{MLP_READER}|{ROUTER})\.weight|{MLP}\.experts\.gate_up_proj"
WRITES = (
    rf"(?:self_attn\.o_proj|{EXPERT}\.(?:down_proj|w2))\.(?:weight|bias)|{MLP}\.experts\.down_proj"
)
NORM = r"(?:input|post_attention)_layernorm"
STAYS = (
    rf"(?:{ATTENTION_READER}|{MLP_READER}|{ROUTER})\.bias|{MLP}\.(?:gate\.)?e_score_correction_bias"
    r"|self_attn\.(?:(?:q|k)_norm|(?:q|kv)_a_layernorm|(?:q|kv)_b_proj)\.\w+|.*inv_freq"
)
BRANCH_NORM = r"post_(?:feedforward|self_attn|mlp|attn)_(?:layer)?norm\.\w+"
PROBE_TOLERANCE = 1e-3  # of a norm's output; its eps moves that by less than 1e-4


@dataclass(frozen=True)
class Role:
    """What is done to one tensor.

    layer: number of its decoder layer, -1 outside. made_from: the stored tensor that it starts as,
    where that has another name. neutral: it is a norm's gain, which has moved into the readers, and
    becomes this constant. reads: its last dimension is the residual stream; gain: the norm that
    feeds it. values: its rows that are value heads. mixes_values: its last dimension is the heads'
    outputs, of that size each. writes: its last dimension but one (a bias has only one) is the
    residual stream.
    """

    layer: int = -1
    made_from: str | None = None
    neutral: float | None = None
    reads: bool = False
    gain: str | None = None
    values: HeadRows | None = None
    mixes_values: int | None = None
    writes: bool = False


class Roles(NamedTuple):
    """roles: stored name -> role, for every tensor that changes. gain_offset: what is added to a
    norm's weight to give its gain (Gemma: 1)."""

    roles: dict[str, Role]
    gain_offset: float = 0.0


def find_roles(model: LayeredModel, source: TensorSource, settings: RotateSettings) -> Roles:
    """The roles of the tensors of `source`, the folder of `model`, under R1 and R2 together.

    Raises UserError, with the reason, for a model that they cannot be fused into.
    """
    residual = residual_roles(model, source) if settings.r1 else Roles({})
    roles = dict(residual.roles)
    for name, role in (value_roles(model, source) if settings.r2 else {}).items():
        other = roles.get(name, Role())
        roles[name] = replace(role, reads=other.reads, gain=other.gain, writes=other.writes)
    return Roles(roles, residual.gain_offset)


def residual_roles(model: LayeredModel, source: TensorSource) -> Roles:
    """The tensors that read or write the residual stream, and the norms between.

    Raises UserError, with the reason, for a model that R1 cannot be fused into.
    """
    _refuse_layer_norm(model.model)
    stored = {p: s for s, p in names_in_model(model.model, source.names()).items()}
    layers = next(iter(model.layers)).rpartition(".")[0]
    embedding = _name_of(model.model, model.model.get_input_embeddings()) + ".weight"
    head = _name_of(model.model, model.model.get_output_embeddings()) + ".weight"
    norm = f"{layers.rpartition('.')[0]}.norm".lstrip(".")
    for needed in (embedding, f"{norm}.weight"):
        if needed not in stored:
            raise _no_role(model, needed, "is missing")
    offset = _gain_offset(model.model, norm)
    gain, tied = stored[f"{norm}.weight"], model.head is None
    roles = {
        stored[embedding]: Role(reads=True),
        gain: Role(neutral=1 - offset),
        stored.get(head, head): Role(
            reads=True, gain=gain, made_from=stored[embedding] if tied else None
        ),
    }
    for parameter, name in stored.items():
        inner = re.fullmatch(rf"{re.escape(layers)}\.(\d+)\.(.+)", parameter)
        if inner is not None:
            role = _role_in_layer(model, stored, f"{layers}.{inner[1]}", inner[2])
        elif name in roles or parameter == head.removesuffix("weight") + "bias":
            continue
        elif re.fullmatch(STAYS, parameter):
            role = None
        else:
            raise _no_role(model, name, "has no known role")
        if role is not None:
            _check_width(model, source, name, role)
            roles[name] = role
    return Roles(roles, offset)


def _role_in_layer(
    model: LayeredModel, stored: dict[str, str], layer: str, inner: str
) -> Role | None:
    """The role of the tensor `inner` of `layer` under R1; None: it stays as it is."""
    number = int(layer.rpartition(".")[2])

    def reader(norm: str) -> Role:
        if f"{layer}.{norm}.weight" not in stored:
            raise _no_role(model, f"{layer}.{norm}.weight", "is missing")
        return Role(number, reads=True, gain=stored[f"{layer}.{norm}.weight"])

    if re.fullmatch(ATTENTION_READS, inner):
        return reader("input_layernorm")
    if re.fullmatch(MLP_READS, inner):
        return reader("post_attention_layernorm")
    if re.fullmatch(WRITES, inner):
        return Role(number, writes=True)
    if re.fullmatch(rf"{NORM}\.weight", inner):
        return Role(number, neutral=1 - _gain_offset(model.model, f"{layer}.{inner[:-7]}"))
    if re.fullmatch(STAYS, inner):
        return None
    if re.fullmatch(BRANCH_NORM, inner):
        raise UserError(
            f"{_kind(model)} normalizes what a branch adds to the residual stream "
            f"('{layer}.{inner}'), with a gain for each of the original channels: R1 cannot be "
            "fused into it; rotate with r1 off (R2 alone)"
        )
    raise _no_role(model, f"{layer}.{inner}", "has no known role")


def value_roles(model: LayeredModel, source: TensorSource) -> dict[str, Role]:
    """Stored name -> role under R2: what makes the values of attention and what reads them.

    Raises UserError when a layer's attention does not consist of known projections.
    """
    stored = {p: s for s, p in names_in_model(model.model, source.names()).items()}
    roles = {}
    for number, layer in enumerate(model.layers):
        attention = f"{layer}.self_attn"
        maker, rows = _value_rows(model, stored, attention)
        roles[stored[f"{attention}.o_proj.weight"]] = Role(number, mixes_values=rows.dim)
        for leaf in ("weight", "bias"):
            if f"{maker}.{leaf}" in stored:
                roles[stored[f"{maker}.{leaf}"]] = Role(number, values=rows)
    return roles


def _value_rows(
    model: LayeredModel, stored: dict[str, str], attention: str
) -> tuple[str, HeadRows]:
    """The linear that makes the values, and which of its rows they are."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layouts = {
        "v_proj": lambda: HeadRows(kv_heads, dim, dim),
        "qkv_proj": lambda: HeadRows(kv_heads, dim, dim, (heads + kv_heads) * dim),
        "kv_b_proj": lambda: HeadRows(
            heads, config.v_head_dim, config.qk_nope_head_dim + config.v_head_dim,
            config.qk_nope_head_dim,
        ),
    }  # fmt: skip
    for name, layout in layouts.items():
        both = (f"{attention}.{name}.weight", f"{attention}.o_proj.weight")
        if all(n in stored for n in both):
            return f"{attention}.{name}", layout()
    raise UserError(
        f"'{attention}' of {_kind(model)} has no {', '.join(layouts)} that feeds an o_proj: R2 "
        "cannot be fused into it; rotate with r2 off (R1 alone)"
    )


def _refuse_layer_norm(model: Any) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            raise UserError(
                f"{type(model).__name__} normalizes with LayerNorm ('{name}'), whose mean over the "
                "channels depends on their basis: R1 needs RMSNorm; leave the rotation out"
            )


def _gain_offset(model: Any, name: str) -> float:
    """0 where the norm `name` computes x / rms(x) * weight, 1 where it is * (1 + weight).

    Found by running it; UserError where it computes something else.
    """
    norm = model.get_submodule(name)
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(norm.weight.shape, generator=generator) + 0.5
    x = torch.randn(4, *norm.weight.shape, generator=generator) + 1  # a mean that is not zero
    y = torch.func.functional_call(norm, {"weight": weight}, (x,))
    unit = x * x.square().mean(-1, keepdim=True).rsqrt()
    for offset in (0.0, 1.0):
        if _close(y, unit * (weight + offset)):
            return offset
    raise UserError(
        f"'{name}' of {type(model).__name__} is a {type(norm).__name__} that is no RMSNorm with a "
        "gain: R1 cannot be fused into it; leave the rotation out"
    )


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) < PROBE_TOLERANCE * float(b.abs().max())


def _check_width(model: LayeredModel, source: TensorSource, name: str, role: Role) -> None:
    """UserError where the dimension that should be the residual stream's has another size."""
    shape, hidden = source.info[name].shape, model.config.get_text_config().hidden_size
    if (role.reads and shape[-1] != hidden) or (role.writes and shape[-2:][0] != hidden):
        raise _no_role(model, name, f"has shape {list(shape)}, not the layout expected")


def _name_of(model: Any, module: nn.Module) -> str:
    return next(name for name, m in model.named_modules() if m is module)


def _no_role(model: LayeredModel, name: str, why: str) -> UserError:
    return UserError(
        f"'{name}' of {_kind(model)} {why}: the residual stream can be rotated (R1) only where "
        "every tensor that reads or writes it is known; leave the rotation out"
    )


def _kind(model: LayeredModel) -> str:
    return type(model.model).__name__
