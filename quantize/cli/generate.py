"""`quantize generate`: text from an original model or a quantized checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernels.errors import UserError, did_you_mean
from .common import model_path, print_json, say
from .common_options import (
    AsJson,
    BatchInvariant,
    CudaGraphs,
    Device,
    Dtype,
    HeadBits,
    LinearKernel,
    ServedModel,
    Speculate,
)

if TYPE_CHECKING:
    from ...runtime import LLM, RequestOutput, StructuredOutputsParams

GUESSERS = ("ngram", "lookahead")


def generate(
    model: ServedModel,
    prompt: Annotated[str, typer.Argument(help="The text to continue, or to answer.")],
    max_tokens: Annotated[int, typer.Option(help="At most so many new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy: the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from this share of the probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string (repeat).")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")
    ] = False,
    min_p: Annotated[
        float, typer.Option(help="Draw from tokens with this share of the likeliest one's.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: what stood in prompt or output comes less often.")
    ] = 1.0,
    schema: Annotated[
        Path | None, typer.Option(help="File of a JSON schema that the text must follow.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the text must match.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat", help="Use the chat template; by default where it has one."
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kv: Annotated[
        str,
        typer.Option(
            help="Format of the KV cache: int8, int4, k4v2, fp8_dynamic, ... (docs/methods.md),"
            " model: none, auto: as the checkpoint says."
        ),
    ] = "auto",
    speculate: Speculate = None,
    batch_invariant: BatchInvariant = False,
    linear_kernel: LinearKernel = None,
    head_bits: HeadBits = None,
    cuda_graphs: CudaGraphs = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Kernels and speed, on standard error.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text; it is written as it comes.

    Example: quantize generate ./smollm2-w4 "What is the capital of France?" --max-tokens 64
    """
    from ...runtime import LLM, SamplingParams

    params = SamplingParams(
        max_tokens, temperature, top_p, top_k, stop, seed, ignore_eos, min_p=min_p,
        repetition_penalty=repetition_penalty, structured_outputs=_structured(schema, regex),
    )  # fmt: skip
    guesser = guesser_of(speculate)
    llm = LLM(
        model_path(model), device, dtype, kv_cache_dtype=kv, speculate=guesser,
        batch_invariant=batch_invariant, linear_kernel=linear_kernel, head_bits=head_bits,
        cuda_graphs=cuda_graphs,
    )  # fmt: skip
    for warning in llm.warnings:
        say(warning)
    if verbose:
        say(_describe(llm))
    if chat is None:
        chat = bool(getattr(llm.tokenizer, "chat_template", None))
    asked: Any = [{"role": "user", "content": prompt}] if chat else prompt
    result: RequestOutput | None = None
    for piece in llm.stream(asked, params):
        if not isinstance(piece, str):
            result = piece
        elif not as_json:
            typer.echo(piece, nl=False)
    assert result is not None
    if as_json:
        print_json(_as_object(llm, result))
    else:
        typer.echo()
    if verbose:
        say(_speed(result))
        say_speculation(llm)


def guesser_of(speculate: str | None) -> str | None:
    """A method that guesses, or the folder of a model that does. UserError where it is neither."""
    if speculate is None or speculate in GUESSERS:
        return speculate
    try:
        return str(model_path(speculate).absolute())
    except UserError as e:
        raise UserError(
            f"--speculate takes {', '.join(GUESSERS)} or a smaller model, got '{speculate}'"
            f"{did_you_mean(speculate, GUESSERS)}: {e}"
        ) from e


def say_speculation(llm: LLM) -> None:
    """How guesses went, where there were any."""
    if told := llm.metrics().speculation:
        say(
            f"{told.method}: {told.accepted} of {told.proposed} proposed tokens accepted, "
            f"{told.tokens_per_step:.2f} tokens a verifying step; {told.note}"
        )


def _structured(schema: Path | None, regex: str | None) -> StructuredOutputsParams | None:
    """What the text must be."""
    from ...runtime import StructuredOutputsParams

    if schema is None and regex is None:
        return None
    try:
        text = None if schema is None else schema.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{schema} is no text in UTF-8, as a JSON schema must be: {e}") from e
    return StructuredOutputsParams(json=text, regex=regex)


def _as_object(llm: LLM, result: RequestOutput) -> dict[str, Any]:
    """What --json prints."""
    return {
        **asdict(result.outputs[0]),
        "prompt": result.prompt,
        "prompt_token_ids": result.prompt_token_ids,
        "metrics": asdict(result.metrics),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "device": str(llm.device),
    }


def _describe(llm: LLM) -> str:
    """Device, dtype, and a line for each kind of packed linear: its kernel and why not another."""
    lines = [f"{type(llm.model).__name__} on {llm.device} in {str(llm.dtype)[6:]}"]
    why = f" (the paged one {llm.engine_declined})" if llm.engine_declined else ""
    lines.append(f"  {llm.engine} engine{why}, KV cache: {llm.kv_cache}")
    if llm.device.type == "cuda":
        lines.append(f"  decode: {llm.decode_graphs}")
    kinds: dict[str, list[int]] = {}
    for report in llm.linear_report():
        p = report.problem
        kind = f"{p.kind}{p.num_bits}, group {p.group_size}, {p.in_features} -> {p.out_features}"
        kind += "" if p.symmetric else ", asymmetric"
        kind += "" if p.activation is None else f", inputs {p.activation}"
        kind += f": {report.kernel}" + (f", {report.note}" if report.note else "")
        reasons = "; ".join(f"{name} {reason}" for name, reason in report.declined.items())
        kinds.setdefault(f"{kind} ({reasons})" if reasons else kind, []).append(report.nbytes)
    for kind, sizes in kinds.items():
        lines.append(f"  {len(sizes)} linears of {kind}, {sum(sizes) / 1e6:.2f} MB")
    return "\n".join(lines)


def _speed(result: RequestOutput) -> str:
    m = result.metrics
    parts = [f"prefill: {m.prefill_tokens} tokens in {m.prefill_seconds:.2f} s"]
    if m.decode_tokens:
        rate = m.decode_tokens / m.decode_seconds
        parts.append(f"decode: {m.decode_tokens} in {m.decode_seconds:.2f} s ({rate:.1f}/s)")
    return ", ".join([*parts, f"ended by {result.outputs[0].finish_reason}"])
