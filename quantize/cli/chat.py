"""`quantize chat`: a conversation with an original model or a quantized checkpoint."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernels.errors import UserError
from .common import model_path, say, terminal
from .common_options import Device, Dtype, ServedModel, Speculate
from .generate import guesser_of, say_speculation

if TYPE_CHECKING:
    from rich.console import Console

    from ...runtime import LLM, RequestMetrics, SamplingParams

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(
    model: ServedModel,
    system: Annotated[str | None, typer.Option(help="What the model is told at first.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Of an answer, at most.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 is greedy: the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Draw from this share of the probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many likeliest tokens; 0: all.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Draw from tokens with this share of the likeliest one's.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kv: Annotated[
        str,
        typer.Option(help="Format of the KV cache: int8, int4, ..., model: none, auto."),
    ] = "auto",
    speculate: Speculate = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="What each answer took, on standard error.")
    ] = False,
) -> None:
    """Talk with a model, whose chat template is used. In it, /reset begins anew, /exit leaves.

    Example: quantize chat ./smollm2-w4 --system "Answer in one sentence."
    """
    from ...runtime import LLM, SamplingParams

    params = SamplingParams(max_tokens, temperature, top_p, top_k, seed=seed, min_p=min_p)
    guesser = guesser_of(speculate)
    llm = LLM(
        model_path(model), device, dtype, kv_cache_dtype=kv, max_num_seqs=1, speculate=guesser
    )
    for warning in llm.warnings:
        say(warning)
    if not getattr(llm.tokenizer, "chat_template", None):
        raise UserError(f"{model} has no chat template: take `quantize generate`")
    say(HELP)
    talk(Conversation(llm, params, system), terminal(), verbose)


@dataclass
class Conversation:
    """messages: what was said so far, the system's part first."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, question: str) -> Iterator[str | RequestMetrics]:
        """Pieces of the answer as they come, then what it took. Both sides stay in `messages`, an
        answer that is left as far as it came; a question that cannot be asked does not."""
        asked = [*self.messages, {"role": "user", "content": question}]
        said, begun = "", False
        try:
            for piece in self.llm.stream(asked, self.params):
                begun = True
                if not isinstance(piece, str):
                    yield piece.metrics
                    break
                said += piece
                yield piece
        except UserError:
            begun = False
            raise
        finally:
            if begun:
                self.messages = [*asked, {"role": "assistant", "content": said}]


def talk(conversation: Conversation, console: Console, verbose: bool) -> None:
    """Read questions and write answers until the input ends."""
    with contextlib.suppress(ImportError):
        __import__("readline")  # lines can be edited, and come back with the arrow keys
    prompt = "[bold]> [/bold]" if sys.stdin.isatty() and console.is_terminal else ""
    while True:
        try:
            line = console.input(prompt).strip()
        except EOFError:
            if prompt:
                console.print()
            return
        except KeyboardInterrupt:
            console.print()
            say(HELP)
            continue
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
            say("forgotten")
        elif line.startswith("/"):
            say(f"there is no {line.split()[0]}: {HELP}")
        elif line:
            _answer(conversation, line, console, verbose)


def _answer(conversation: Conversation, line: str, console: Console, verbose: bool) -> None:
    metrics: Any = None
    answer = conversation.answer(line)
    try:
        with _Interrupt() as interrupt:
            for piece in answer:
                if isinstance(piece, str):
                    console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
                else:
                    metrics = piece
                if interrupt.asked:
                    break
    except UserError as e:
        say(f"{e} (/reset forgets what was said)")
        return
    finally:
        answer.close()  # type: ignore[attr-defined]
    console.print()
    if interrupt.asked:
        say("stopped")
    if verbose and metrics is not None:
        say(_told(metrics))
        say_speculation(conversation.llm)


def _told(metrics: RequestMetrics) -> str:
    first = f"first token after {metrics.ttft:.2f} s" if metrics.ttft is not None else "no token"
    rate = f", {1 / metrics.tpot:.1f} tokens/s" if metrics.tpot else ""
    return (
        f"{metrics.prefill_tokens} tokens asked, {metrics.cached_tokens} of them known, "
        f"{metrics.output_tokens} answered, {first}{rate}"
    )


class _Interrupt:
    """While it is open Ctrl-C only sets `asked`, so that no step of the engine is torn apart; the
    second one ends the program."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> _Interrupt:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
