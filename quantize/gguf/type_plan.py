"""The block types of a model's tensors, and whether the importance matrix has what they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...kernels.errors import UserError
from .blocks import CODECS
from .file_types import base_type, check_file_type
from .hparams import Hyperparameters
from .imatrix import Imatrix
from .mix import EMBEDDING, OUTPUT, Choice, choose_types, needs_importance, parse_override
from .mix_rules import Facts
from .names import Target


class TypeWish(NamedTuple):
    """What a file's types are to be. `file_type`: a key of FILE_TYPES. `pure`: no mix, its base
    type alone. `overrides`: (regular expression, block type), the first that a name matches
    decides. `imatrix`: what errors cost."""

    file_type: str
    pure: bool = False
    overrides: tuple[tuple[str, str], ...] = ()
    imatrix: Imatrix | None = None


def wish(
    file_type: str,
    pure: bool = False,
    tensor_types: Sequence[str] = (),
    imatrix: Imatrix | None = None,
) -> TypeWish:
    """A checked TypeWish; tensor_types: "PATTERN=TYPE". UserError for unknown types and patterns
    that are none."""
    overrides = tuple(parse_override(text) for text in tensor_types)
    return TypeWish(check_file_type(file_type), pure, overrides, imatrix)


def plan_types(found: Sequence[Target], h: Hyperparameters, wanted: TypeWish) -> dict[str, Choice]:
    """The block type of each target by name.

    UserError where a pattern matches no tensor, and where a type is garbage without an importance
    matrix that has the tensor. A file type that is refuses to do without one even where the
    model's columns fill no block of it, as llama-quantize does.
    """
    base = CODECS[base_type(wanted.file_type)]
    if wanted.imatrix is None and needs_importance("", base, wanted.file_type):
        raise UserError(
            f"a file of {wanted.file_type} needs an importance matrix, or the result would be "
            "garbage; give --imatrix FILE or --imatrix auto, or choose a type with more bits"
        )
    facts = Facts(
        h.architecture.name,
        h["num_hidden_layers"],
        h["num_attention_heads"],
        h["num_key_value_heads"],
        h.values.get("num_experts") or 0,
        wanted.imatrix is not None,
    )
    shapes = {t.name: t.shape for t in found}
    choices = choose_types(shapes, wanted.file_type, facts, wanted.pure, wanted.overrides)
    for name, choice in choices.items():
        if not needs_importance(name, choice.codec, wanted.file_type):
            continue
        if wanted.imatrix is None or name not in wanted.imatrix.entries:
            hint = "give --imatrix" if wanted.imatrix is None else "make one from this model"
            raise UserError(
                f"{choice.codec.name} for '{name}' needs an importance matrix that has it, or the "
                f"result would be garbage; {hint}, or choose a type with more bits"
            )
    if wanted.imatrix is not None and not any(n in wanted.imatrix.entries for n in shapes):
        raise UserError(
            "the importance matrix has none of the model's tensors: it was made from another "
            "architecture"
        )
    return choices


def without_importance(found: Sequence[Target], imatrix: Imatrix) -> list[str]:
    """The matrices that the importance matrix lacks, beside the embedding and the output, which
    llama-imatrix leaves out."""
    return [
        t.name
        for t in found
        if not t.float32 and t.name not in imatrix.entries and t.name not in (EMBEDDING, OUTPUT)
    ]
