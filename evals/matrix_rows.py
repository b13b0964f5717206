"""The rows of the accuracy matrix: which recipe each is, and what it is held against.

A row's key is FAMILY/METHOD, a peer's TOOL/FAMILY/METHOD; rows of one family store the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..kernels.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Bar:
    """What a row's number has to stay under: `limit` times a reference.

    of: "peers" (the lowest KL divergence of the family's peers), "nats" (one nat, so the limit is
    the divergence itself), "original perplexity" (of the unquantized model; compares perplexities),
    or the key of another row (its KL divergence).
    """

    limit: float
    of: str = "peers"


@dataclass(frozen=True)
class MatrixRow:
    """One of lowbit's rows: a recipe's passes, or a format of the KV cache beside plain weights.

    budget: the recipe's bit budget, in its form there. options: of `quantize run`, beside the
    recipe.
    """

    family: str
    method: str
    passes: tuple[dict[str, Any], ...] = ()
    kv: str | None = None
    budget: dict[str, Any] | None = None
    options: tuple[str, ...] = ()
    bar: Bar | None = None

    @property
    def key(self) -> str:
        return f"{self.family}/{self.method}"


@dataclass(frozen=True)
class PeerRow:
    """One of evals/peers.py. recorded: mean KL divergence that it reached before, by the name of
    the model's folder, in the protocol of docs/accuracy.md with all 128 rows and 10 windows."""

    tool: str
    family: str
    method: str
    recorded: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.tool}/{self.family}/{self.method}"


def _quantizer(method: str, scheme: str, size: int | None, **settings: Any) -> dict[str, Any]:
    return {
        "method": method,
        "scheme": scheme,
        **({} if size is None else {"group_size": size}),
        **({method: settings} if settings else {}),
    }


def _row(
    scheme: str,
    method: str,
    size: int | None = None,
    *,
    transforms: tuple[str, ...] = (),
    bar: Bar | None = None,
    name: str | None = None,
    **settings: Any,
) -> MatrixRow:
    """Transforms, then a quantizer with its settings; `name` where the method does not say all."""
    passes = (*({"method": t} for t in transforms), _quantizer(method, scheme, size, **settings))
    shown = name or "+".join([*transforms, method])
    return MatrixRow(_family(scheme, size), shown, passes, bar=bar)


def _preset(scheme: str, size: int | None, preset: str, bar: Bar | None = None) -> MatrixRow:
    options = ["--scheme", scheme, "--preset", preset]
    options += [] if size is None else ["--group-size", str(size)]
    return MatrixRow(_family(scheme, size), preset, options=tuple(options), bar=bar)


def _family(scheme: str, size: int | None) -> str:
    return scheme if size is None else f"{scheme}-g{size}"


def _four_bits(scheme: str, bar: Bar, best: Bar) -> list[MatrixRow]:
    return [
        _row(scheme, "rtn", 64),
        _row(scheme, "gptq", 64, bar=bar),
        _row(scheme, "gptq", 64, transforms=("awq",), bar=bar),
        _row(scheme, "gptq", 64, transforms=("rotate",), bar=bar),
        _row(scheme, "signround", 64, bar=bar),
        _row(scheme, "hqq", 64),
        _preset(scheme, 64, "best", bar=best),
    ]


def _cached(kv: str, bar: Bar | None = None) -> MatrixRow:
    return MatrixRow("KV", kv, kv=kv, bar=bar)


ROWS: tuple[MatrixRow, ...] = (
    *_four_bits("W4A16", Bar(0.60), Bar(0.45)),
    _row("W4A16", "gptq", 64, name="gptq-corrected", input_correction=1.0),
    _preset("W4A16", 64, "fast"),
    *_four_bits("W4A16_ASYM", Bar(0.60), Bar(0.60)),
    _row("W3A16", "rtn", 64),
    _preset("W3A16", 64, "fast"),
    _row("W3A16", "gptq", 64, bar=Bar(0.45)),
    _preset("W3A16", 64, "best", bar=Bar(0.35)),
    _row("W2A16", "rtn", 32),
    _row("W2A16", "gptq", 32, bar=Bar(3, "original perplexity")),
    _preset("W2A16", 32, "best", bar=Bar(3, "original perplexity")),
    _row("W8A8", "rtn"),
    _row("W8A8", "gptq"),
    _row("W8A8", "gptq", transforms=("smoothquant",), bar=Bar(0.75)),
    _preset("W8A8", None, "best", bar=Bar(0.75)),
    _row("W4A8", "rtn", 64),
    _row("W4A8", "gptq", 64),
    _row("W4A8", "gptq", 64, transforms=("smoothquant",)),
    _row("FP8", "rtn"),
    _row("FP8_DYNAMIC", "rtn", bar=Bar(1.0)),
    _row("FP8_DYNAMIC", "rtn", name="rtn-mse", scale_search="mse", bar=Bar(0.9)),
    _preset("FP8_DYNAMIC", None, "best", bar=Bar(0.9)),
    _row("FP8_BLOCK", "rtn"),
    _row("NVFP4A16", "rtn"),
    _row("NVFP4A16", "rtn", name="rtn-mse", scale_search="mse", bar=Bar(0.7)),
    _row("NVFP4A16", "gptq", bar=Bar(0.7)),
    _preset("NVFP4A16", None, "best", bar=Bar(0.7)),
    _row("MXFP4A16", "rtn"),
    _row("MXFP4A16", "rtn", name="rtn-mse", scale_search="mse"),
    _row("MXFP4A16", "gptq"),
    _row("MXFP8A16", "rtn"),
    MatrixRow(
        "budget-3.5",
        "gptq",
        passes=({"method": "gptq", "scheme": "W4A16"},),
        budget={"bits": 3.5},
    ),
    _cached("int8", Bar(0.001, "nats")),
    _cached("fp8_token"),
    _cached("int4_token"),
    _cached("int4_hadamard", Bar(0.4, "KV/int4_token")),
    _cached("int4", Bar(0.4, "KV/int4_token")),
    _cached("k4v2"),
    _cached("k2v4"),
)

PEER_ROWS: tuple[PeerRow, ...] = (
    PeerRow("llm-compressor", "W4A16-g64", "gptq", {"smollm2": 0.1768}),
    PeerRow("llm-compressor", "W4A16_ASYM-g64", "awq", {"smollm2": 0.1411}),
    PeerRow("llm-compressor", "W8A8", "smoothquant+gptq", {"smollm2": 0.0111}),
    PeerRow("llm-compressor", "FP8_DYNAMIC", "rtn", {"smollm2": 0.0238}),
    PeerRow("llm-compressor", "NVFP4A16", "rtn", {"smollm2": 0.2078}),
    PeerRow("gptqmodel", "W4A16-g64", "gptq", {"smollm2": 0.1648}),
    PeerRow("gptqmodel", "W3A16-g64", "gptq", {"smollm2": 0.8184}),
    PeerRow("auto-round", "W4A16-g64", "rtn", {"smollm2": 0.1918}),
    PeerRow("auto-round", "W4A16-g64", "signround"),
)


def chosen_rows(names: list[str]) -> list[MatrixRow]:
    """The rows of this matrix that `names` name; all for an empty list."""
    return rows_named(names, ROWS)


def rows_named(names: list[str], rows: Sequence[MatrixRow]) -> list[MatrixRow]:
    """Those of `rows` that `names` name by key or family, in their order; all for an empty list.

    UserError for a name of neither.
    """
    known = {row.key for row in rows} | {row.family for row in rows}
    for name in names:
        if name not in known:
            hint = did_you_mean(name, sorted(known), cutoff=0.4)
            raise UserError(f"the matrix has no row '{name}'{hint} (--list shows them)")
    return [row for row in rows if not names or row.key in names or row.family in names]


def peers_of(tools: list[str], families: set[str]) -> list[PeerRow]:
    """The rows of the peers `tools` that store what one of `families` does."""
    known = {row.tool for row in PEER_ROWS}
    for tool in tools:
        if tool not in known:
            raise UserError(f"no peer '{tool}' (known: {', '.join(sorted(known))})")
    return [row for row in PEER_ROWS if row.tool in tools and row.family in families]
