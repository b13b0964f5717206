"""What may be asked of the sampler, with vLLM's names. Bad values are refused when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...kernels.errors import UserError, counted

UINT64 = 1 << 64
MAX_BIAS = 100.0
GREEDY = 0.0


class ParamError(UserError):
    """A value that `param`, a field of SamplingParams, cannot have."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the text must be, exactly one of: json (a JSON schema as a dict or as text), regex,
    choice (one of these strings), grammar (EBNF as xgrammar reads it), json_object (any JSON
    object)."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            raise ParamError(
                "structured_outputs",
                "structured outputs take exactly one of json, regex, choice, grammar and "
                f"json_object, got {', '.join(given) or 'none'}",
            )
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise ParamError(
                    "structured_outputs", f"{name} must be a string, got {getattr(self, name)!r}"
                )
        if not isinstance(self.json, str | dict | None):
            raise ParamError(
                "structured_outputs",
                f"json must be a schema, as a dict or as text, got {self.json!r}",
            )
        choice = self.choice
        if choice is not None and (
            isinstance(choice, str) or not choice or not all(isinstance(c, str) for c in choice)
        ):
            raise ParamError(
                "structured_outputs", f"choice must be strings, one or more, got {choice!r}"
            )


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens and when to stop.

    max_tokens: at most so many new tokens. temperature: 0 is greedy. top_p: keep the smallest set
    of likeliest tokens with at least this mass (1: all). top_k: keep so many likeliest tokens (0 or
    -1: all). stop: strings that end the text and are cut off it. seed: the draws depend on it, the
    continuation's number and the position alone, not on what else runs; None: a fresh one for each
    request. ignore_eos: go on to max_tokens whatever the model says. n: continuations. min_p: keep
    tokens with at least this share of the likeliest one's probability. presence_penalty,
    frequency_penalty: taken off the logits of tokens of the output, once and for each time they
    stand in it; repetition_penalty: logits of tokens of prompt and output are divided by it where
    they are positive, multiplied where not. min_tokens: no end before so many. stop_token_ids: ids
    that end the output. include_stop_str_in_output: keep in the text what has ended it. logit_bias:
    added to the logits of these ids. logprobs, prompt_logprobs: of the token and so many likeliest
    ones (-1: all), before all of the above.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: str | Sequence[str] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    n: int = 1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_ends()
        if self.n > 1 and self.temperature == GREEDY:
            raise ParamError(
                "n",
                f"n is {self.n} and temperature 0: all continuations would be the same; ask for "
                "one, or for a temperature above 0",
            )
        for token, bias in (self.logit_bias or {}).items():
            if not _is_int(token) or not _is_number(bias) or not abs(bias) <= MAX_BIAS:
                raise ParamError(
                    "logit_bias",
                    f"logit_bias must give token ids numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, "
                    f"got {token!r}: {bias!r}",
                )
        given = self.structured_outputs
        if given is None:
            return
        if not isinstance(given, StructuredOutputsParams):
            raise ParamError(
                "structured_outputs",
                f"structured_outputs must be StructuredOutputsParams, got {given!r}",
            )
        if self.ignore_eos or self.min_tokens:
            raise ParamError(
                "ignore_eos" if self.ignore_eos else "min_tokens",
                "structured outputs end where their grammar ends: ignore_eos and min_tokens cannot "
                "hold them on",
            )

    def _check_numbers(self) -> None:
        _require_int("max_tokens", self.max_tokens, 1)
        _require_int("n", self.n, 1)
        _require_int("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ParamError(
                "min_tokens",
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}",
            )
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ParamError(
                "temperature",
                f"temperature must be a finite number from 0 (greedy) on, got {self.temperature!r}",
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ParamError("top_p", f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise ParamError("min_p", f"min_p must be from 0 to 1, got {self.min_p!r}")
        if not _is_int(self.top_k) or self.top_k < -1:
            raise ParamError(
                "top_k", f"top_k must be at least 1, or 0 or -1 for all, got {self.top_k!r}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not -2 <= value <= 2:
                raise ParamError(name, f"{name} must be from -2 to 2, got {value!r}")
        value = self.repetition_penalty
        if not _is_number(value) or not 0 < value < math.inf:
            raise ParamError(
                "repetition_penalty",
                f"repetition_penalty must be a finite number above 0, got {value!r}",
            )
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < UINT64):
            raise ParamError("seed", f"seed must be from 0 to 2^64 - 1, got {self.seed!r}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < -1):
                raise ParamError(name, f"{name} must be at least 0, or -1 for all, got {value!r}")

    def _check_ends(self) -> None:
        if any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise ParamError("stop", f"stop must be strings that are not empty, got {self.stop!r}")
        ids = self.stop_token_ids or ()
        if isinstance(ids, str) or not all(_is_int(i) and i >= 0 for i in ids):
            raise ParamError(
                "stop_token_ids", f"stop_token_ids must be token ids, got {self.stop_token_ids!r}"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        return self.reads_prompt or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def reads_prompt(self) -> bool:
        """Tokens of the prompt are penalized, too."""
        return self.repetition_penalty != 1


@dataclass(frozen=True)
class BeamSearchParams:
    """beam_width: the beams kept, and the sequences that come back. max_tokens: of each.
    ignore_eos: none ends before it. length_penalty: sums of logprobs are divided by the output's
    length to this power, so more than 0 favours longer ones."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        _require_int("beam_width", self.beam_width, 1)
        _require_int("max_tokens", self.max_tokens, 1)
        if not _is_number(self.length_penalty) or not math.isfinite(self.length_penalty):
            raise UserError(f"length_penalty must be a finite number, got {self.length_penalty!r}")


def check_vocabulary(params: SamplingParams, vocabulary: int) -> None:
    """ParamError where `params` names token ids that a vocabulary of that size has not."""
    for name in ("logit_bias", "stop_token_ids"):
        outside = [i for i in getattr(params, name) or () if not 0 <= i < vocabulary]
        if outside:
            raise ParamError(
                name,
                f"{name} names token id {outside[0]}, which is out of the vocabulary of "
                f"{counted(vocabulary, 'token')}",
            )


def _require_int(name: str, value: Any, least: int) -> None:
    if not _is_int(value) or value < least:
        raise ParamError(name, f"{name} must be a whole number, at least {least}, got {value!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
