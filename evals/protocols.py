"""The windows that are measured: as asked for, or by the name of a protocol, by whose windows
others publish their numbers.

    hf-2048         GPTQ's and most papers' tables: windows of 2048 tokens that do not overlap, all
                    of the text but a partial window at its end
    hf-stride       transformers' perplexity recipe (huggingface.co/docs/transformers/perplexity):
                    windows of the model's positions, 1024 at most, half of each new; the last one
                    is as long as the rest of the text
    llama.cpp-512   llama-perplexity as it runs by default: windows of 512 tokens, the second half
                    scored, a BOS token in place of each one's first where the model wants one

The text begins with what the tokenizer puts before a text, as in all three originals; a tokenizer
that puts something behind it is refused. The recipe of transformers weighs a window by its scored
tokens less one, here each token counts once: that moves a mean by less than 1e-4 of it, unless the
text is but a few windows long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..kernels.errors import UserError, did_you_mean
from .windows import Bos, Windowing

DEFAULT_CTX = 2048
RECIPE_CTX = 1024  # of transformers' recipe: the positions of the model in it


class Tokenizing(NamedTuple):
    """What a tokenizer puts before a text: token ids; `bos`: its BOS token, None without one."""

    prefix: tuple[int, ...]
    bos: int | None

    @property
    def begins_with_bos(self) -> bool:
        return self.bos is not None and self.prefix[:1] == (self.bos,)


def tokenizing(tokenizer: Any) -> Tokenizing:
    """What `tokenizer` does; UserError where it puts something behind a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = len(whole) - len(plain)
    if whole[start:] != plain:
        raise UserError(
            "the tokenizer puts special tokens behind a text, for which named protocols and tasks "
            "have no rule; measure without them, by --ctx, --stride and --bos"
        )
    return Tokenizing(tuple(whole[:start]), tokenizer.bos_token_id)


def named_windowing(
    name: str, positions: int | None, tokens: Tokenizing, windows: int | None = None
) -> Windowing:
    """The windows of the protocol `name` for models of at most `positions` positions.

    windows: at most so many, None for the whole text, which published numbers take. UserError for
    an unknown name and for models that take fewer positions than it needs.
    """
    if name not in PROTOCOLS:
        raise UserError(
            f"unknown protocol '{name}'{did_you_mean(name, PROTOCOLS)} (known: "
            f"{', '.join(PROTOCOLS)})"
        )
    made = PROTOCOLS[name](positions, tokens, windows)
    if positions is not None and made.ctx > positions:
        raise UserError(
            f"{name} needs {made.ctx} positions, but a model takes {positions}; leave --protocol "
            f"out and give --ctx {positions}"
        )
    return made


def windowing_for(
    name: str, folders: list[Path], tokenizer: Any, windows: int | None = None
) -> Windowing:
    """The same for the models in `folders`, whose texts `tokenizer` cuts."""
    lowest = min(_limits(folders).values(), default=None)
    return named_windowing(name, lowest, tokenizing(tokenizer), windows)


def chosen_windowing(
    protocol: str | None,
    folders: list[Path],
    tokenizer: Any,
    windows: int | None,
    given: Mapping[str, Any],
) -> Windowing:
    """The windows of the protocol, or those that `given` (arguments of `plan_windowing`) says, for
    the models in `folders`, whose texts `tokenizer` cuts.

    windows: at most so many, None for the whole text. UserError where one is given beside a
    protocol, which says them all.
    """
    check_alone(protocol, given)
    if protocol is None:
        return plan_windowing(folders, windows=windows, **given)
    return windowing_for(protocol, folders, tokenizer, windows)


def check_alone(protocol: str | None, given: Iterable[str]) -> None:
    """UserError where an option that a protocol says is given beside one."""
    for name in given if protocol is not None else ():
        raise UserError(f"--protocol {protocol} says what --{name} would; give one of the two")


def plan_windowing(
    folders: list[Path],
    ctx: int | None = None,
    stride: int | None = None,
    bos: str = "none",
    windows: int | None = 10,
    skip: int = 0,
) -> Windowing:
    """The windowing asked for, within the positions that every model takes.

    `ctx` None: 2048, or the models' limit where that is lower. `stride` None: ctx. Raises UserError
    for a ctx beyond the limit.
    """
    limits = _limits(folders)
    if ctx is None:
        ctx = min(DEFAULT_CTX, *limits.values()) if limits else DEFAULT_CTX
    for folder, limit in limits.items():
        if ctx > limit:
            raise UserError(f"ctx {ctx} exceeds the {limit} positions of {folder}; lower --ctx")
    return Windowing(ctx, ctx if stride is None else stride, cast("Bos", bos), windows, skip)


def _limits(folders: list[Path]) -> dict[Path, int]:
    """The positions that each model takes, of those that have a limit."""
    from .scorer import context_limit

    return {folder: limit for folder in folders if (limit := context_limit(folder)) is not None}


def _hf_2048(_: int | None, __: Tokenizing, windows: int | None) -> Windowing:
    return Windowing(2048, 2048, windows=windows, special=True)


def _hf_stride(positions: int | None, _: Tokenizing, windows: int | None) -> Windowing:
    ctx = min(RECIPE_CTX, positions or RECIPE_CTX)
    return Windowing(ctx, ctx // 2, windows=windows, tail=True, special=True)


def llama_perplexity(tokens: Tokenizing, windows: int | None, ctx: int = 512) -> Windowing:
    """llama-perplexity's windows of `ctx` tokens, which must be even."""
    bos = "each" if tokens.begins_with_bos else "none"
    return Windowing(ctx, ctx, bos, windows, skip=ctx // 2, predictive=True, special=True)


def _llama_cpp(_: int | None, tokens: Tokenizing, windows: int | None) -> Windowing:
    return llama_perplexity(tokens, windows)


PROTOCOLS: dict[str, Callable[[int | None, Tokenizing, int | None], Windowing]] = {
    "hf-2048": _hf_2048,
    "hf-stride": _hf_stride,
    "llama.cpp-512": _llama_cpp,
}
