"""Options of `quantize serve` for answers that are given again to texts that are near."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...kernels.errors import UserError

if TYPE_CHECKING:
    from ...runtime.server.settings import ServerSettings

_PANEL = "Semantic cache"

SemanticCache = Annotated[
    float | None,
    typer.Option(
        help="Give an answer again to prompts whose vectors have this cosine with its own, as"
        " 0.97; docs/server.md says how often that is wrong.",
        rich_help_panel=_PANEL,
    ),
]
SemanticCacheModel = Annotated[
    str | None,
    typer.Option(
        help="A sentence-transformers model for the vectors; the served model's own if not said.",
        rich_help_panel=_PANEL,
    ),
]
SemanticCacheEntries = Annotated[
    int, typer.Option(help="Answers kept at most.", rich_help_panel=_PANEL)
]
SemanticCacheMemory = Annotated[
    str, typer.Option(help="Their texts and vectors at most.", rich_help_panel=_PANEL)
]
SemanticCacheTtl = Annotated[
    float, typer.Option(help="Seconds after which an answer is made anew.", rich_help_panel=_PANEL)
]


def check_cache(settings: ServerSettings, replicas: int | None) -> None:
    """UserError for what cannot be cached, said before the server listens."""
    if settings.semantic_cache is None:
        return
    if replicas is not None and settings.api_keys:
        raise UserError(
            "--semantic-cache keeps each API key's answers apart, and replicas are not told whose "
            "key asks: leave --replicas, --semantic-cache or the keys out"
        )
    if settings.semantic_cache_model is not None:
        from ...runtime.server.text_vectors import sentence_transformers

        sentence_transformers()
