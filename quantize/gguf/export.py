"""Write a GGUF file from a Hugging Face folder or a quantized checkpoint of any layout.

The header needs every tensor's type and size, which follow from the config; then the tensors are
read, turned into blocks and written one at a time, so memory is that of the largest tensor. A
quantized layer whose codes fit the block type is repacked without rounding again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ...kernels.errors import UserError
from ..checkpoint.load import Checkpoint
from . import hparams, vocab
from .architectures import architecture_of_class
from .blocks import CODECS
from .blocks.plain import F32
from .encoding import Entry, encode
from .file_types import FILE_TYPES, base_type
from .hf_vocab import read_vocab
from .hparams import Hyperparameters
from .imatrix import Imatrix, imatrix_keys
from .metadata import general_keys
from .mix import Choice
from .names import targets
from .repack import can_repack
from .type_plan import TypeWish, plan_types, wish, without_importance
from .type_total import TypeTotal
from .writer import PartedWriter, Planned, cut, part_paths, writing

IGNORED = (  # buffers, and scales of activations and caches: llama.cpp has its own for these
    ".inv_freq", ".input_scale", ".input_global_scale", ".input_zero_point", ".q_scale",
    ".k_scale", ".v_scale", ".attn.bias", ".attn.masked_bias",
)  # fmt: skip


class ExportReport(NamedTuple):
    """What was written: `path` alone or, in several `parts`, from there on.

    `totals`: block type -> TypeTotal. `repacked`: quantized layers carried over without a second
    rounding; `rounded_again`: those that were not. `fallbacks`: GGUF name -> why its type is not
    the file's. `bits_per_weight` counts scales, not the file's header. `warnings`: what is odd
    about the checkpoint and was understood all the same. `solved`: as of Encoded.
    """

    path: Path
    parts: int
    file_type: str
    pre: str
    nbytes: int
    weights: int
    bits_per_weight: float
    totals: dict[str, TypeTotal]
    repacked: list[str]
    rounded_again: list[str]
    fallbacks: dict[str, str]
    warnings: list[str]
    solved: dict[str, float]


class Encoded(NamedTuple):
    """What an Encoder says of its work. `solved`: GGUF name -> relative output error on calibration
    data of the matrices that were not simply rounded; `warnings`: sentences."""

    solved: dict[str, float]
    warnings: list[str]


Write = Callable[[Entry, Tensor, bool | None], None]
Encoder = Callable[[Sequence[Entry], Write], Encoded]


def export_gguf(
    model: str | Path,
    out: Path,
    file_type: str,
    *,
    pure: bool = False,
    tensor_types: Sequence[str] = (),
    imatrix: Imatrix | None = None,
    pre: str | None = None,
    overwrite: bool = False,
    split_max_size: int | None = None,
    progress: bool = True,
    encoder: Encoder | None = None,
) -> ExportReport:
    """Write `out` from the model folder `model` in `file_type` (a key of FILE_TYPES).

    `pure`, `tensor_types` ("PATTERN=TYPE") and `imatrix` decide the tensors' block types and how
    errors are weighed (type_plan.py). `pre` overrules llama.cpp's name for the pre-tokenizer. With
    `split_max_size` the file is cut into parts that hold at most so many bytes of tensors
    (writer.py). `encoder` makes the blocks of all tensors and hands them over in their order; left
    out, each is rounded by itself. Raises UserError when the architecture, a tensor or the
    tokenizer has no counterpart in llama.cpp, when weights are not finite, and when `out` exists
    without `overwrite`.
    """
    wanted = wish(file_type, pure, tensor_types, imatrix)
    checkpoint = Checkpoint(Path(model))
    h = read_hyperparameters(checkpoint)
    tokenizer = read_vocab(checkpoint.folder, checkpoint.config, pre)
    entries = plan(checkpoint, h, wanted)
    extra = h.rope_tensors()
    planned = [Planned(name, tuple(x.shape), F32) for name, x in extra.items()]
    planned += [e.planned for e in entries]
    keys = {
        **general_keys(checkpoint.folder, planned),
        **hparams.to_keys(h),
        "general.file_type": FILE_TYPES[wanted.file_type],
        "general.quantization_version": 2,
        **({} if imatrix is None else imatrix_keys(imatrix)),
        **vocab.to_keys(tokenizer),
    }
    name = h.architecture.name
    with writing(Path(out), name, keys, planned, overwrite, split_max_size) as writer:
        for x in extra.values():
            writer.write(x.numpy())
        made = encoder or one_by_one(checkpoint)
        written = _write_entries(entries, checkpoint, writer, made, wanted.file_type, progress)
    files = part_paths(Path(out), len(cut(planned, split_max_size)))
    weights = sum(e.planned.weights for e in entries)
    return ExportReport(
        path=files[0],
        parts=len(files),
        file_type=wanted.file_type,
        pre=tokenizer.pre,
        nbytes=sum(f.stat().st_size for f in files),
        weights=weights,
        bits_per_weight=8 * sum(p.nbytes for p in planned) / weights,
        totals=_totals(planned),
        repacked=written.repacked,
        rounded_again=written.rounded_again,
        fallbacks=_fallbacks(entries),
        warnings=[
            *checkpoint.warnings, *h.warnings, *lacking(entries, imatrix),
            *written.encoded.warnings,
        ],
        solved=written.encoded.solved,
    )  # fmt: skip


class _Written(NamedTuple):
    """What an encoder said, and the quantized layers that it carried over or rounded again."""

    encoded: Encoded
    repacked: list[str]
    rounded_again: list[str]


def _write_entries(
    entries: Sequence[Entry],
    checkpoint: Checkpoint,
    writer: PartedWriter,
    encoder: Encoder,
    label: str,
    progress: bool,
) -> _Written:
    """Write what `encoder` makes of the entries, one after the other."""
    repacked: list[str] = []
    rounded_again: list[str] = []
    total = sum(e.planned.nbytes for e in entries)
    with tqdm(total=total, unit="B", unit_scale=True, desc=label, disable=not progress) as bar:

        def write(entry: Entry, blocks: Tensor, exact: bool | None) -> None:
            checkpoint.shards.close()
            writer.write(blocks.numpy())
            if exact is not None:
                (repacked if exact else rounded_again).extend(entry.modules)
            bar.update(entry.planned.nbytes)

        return _Written(encoder(entries, write), repacked, rounded_again)


def one_by_one(checkpoint: Checkpoint) -> Encoder:
    """Every tensor rounded by itself."""

    def run(entries: Sequence[Entry], write: Write) -> Encoded:
        for entry in entries:
            write(entry, *encode(checkpoint, entry))
        return Encoded({}, [])

    return run


def read_hyperparameters(checkpoint: Checkpoint) -> Hyperparameters:
    """The model's, transformers' defaults filled in where config.json leaves them out."""
    architecture_of_class((checkpoint.config.get("architectures") or ["none"])[0])
    return hparams.from_config(checkpoint.transformers_config().to_dict())


def plan(checkpoint: Checkpoint, h: Hyperparameters, wanted: TypeWish) -> list[Entry]:
    """Every tensor of the file in order; UserError for missing or unknown tensors."""
    if "num_experts" in h.values:  # they may be stored in 3-D tensors
        checkpoint.model_on_meta(checkpoint.transformers_config(), torch.float32)
    shards, entries, used = checkpoint.shards, [], set()
    stored = StoredNames(checkpoint, h)
    found = [
        t for t in targets(h) if t.part == "weight" or f"{stored(t.modules[0])}.bias" in shards
    ]
    choices = plan_types([t for t in found if not t.float32], h, wanted)
    base = CODECS[base_type(wanted.file_type)]
    for target in found:
        modules = tuple(stored(module) for module in target.modules)
        schemes = [checkpoint.schemes[m].weights for m in modules if m in checkpoint.schemes]
        if target.part == "weight":
            used.update(modules)
        for m in modules:
            if m not in checkpoint.schemes and f"{m}.{target.part}" not in shards:
                raise UserError(f"{checkpoint.folder} holds no tensor '{m}.{target.part}'")
        choice = Choice(F32) if target.float32 else choices[target.name]
        quantized = target.part == "weight" and len(schemes) == len(modules)
        if quantized and all(can_repack(s, target.shape[-1], base) for s in schemes):
            choice = Choice(base)
        importance = None
        if wanted.imatrix is not None and choice.codec.uses_importance:
            importance = wanted.imatrix.weights(target.name, target.shape)
        planned = Planned(target.name, target.shape, choice.codec)
        entries.append(Entry(planned, target, modules, importance, choice.wanted))
    codes = {n for module in checkpoint.schemes for n in checkpoint.stored_names(module)}
    for tensor in shards.names():
        module, _, part = tensor.rpartition(".")
        placed = module in used and (part in ("weight", "bias") or tensor in codes)
        tied_copy = h.tied and module == "lm_head"
        if not (placed or tied_copy or tensor.endswith(IGNORED)):
            raise UserError(
                f"tensor '{tensor}' has no place in llama.cpp's {h.architecture.name} architecture"
            )
    return entries


class StoredNames:
    """What the checkpoint calls a module: some are stored without the base model's prefix."""

    def __init__(self, checkpoint: Checkpoint, h: Hyperparameters) -> None:
        self._prefix = h.architecture.layers.partition(".")[0] + "."
        embedding = next(iter(h.architecture.outer))
        bare = f"{embedding.removeprefix(self._prefix)}.weight"
        self._bare = f"{embedding}.weight" not in checkpoint.shards and bare in checkpoint.shards

    def __call__(self, module: str) -> str:
        return module.removeprefix(self._prefix) if self._bare else module


def lacking(entries: list[Entry], imatrix: Imatrix | None) -> list[str]:
    """A sentence where the importance matrix lacks some of the matrices."""
    missing = [] if imatrix is None else without_importance([e.target for e in entries], imatrix)
    if not missing:
        return []
    return [f"the importance matrix lacks {len(missing)} matrices, first {missing[0]}"]


def _totals(planned: list[Planned]) -> dict[str, TypeTotal]:
    totals: dict[str, TypeTotal] = {}
    for p in planned:
        old = totals.get(p.codec.name, TypeTotal(0, 0, 0))
        totals[p.codec.name] = TypeTotal(
            old.tensors + 1, old.weights + p.weights, old.nbytes + p.nbytes
        )
    return totals


def _fallbacks(entries: list[Entry]) -> dict[str, str]:
    """The matrices whose columns do not fill the blocks wanted for them."""
    return {
        e.planned.name: f"{e.planned.shape[-1]} columns are no multiple of "
        f"{CODECS[e.unfit].block}, which {e.unfit} needs: stored as {e.planned.codec.name}"
        for e in entries
        if e.unfit is not None
    }
