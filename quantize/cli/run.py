"""`quantize run`: a model and a recipe to a packed checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..kv_names import describe_kv
from ..recipe import Recipe
from ..sizes import MAX_SHARD_SIZE
from .common import model_path, print_json, say, terminal
from .common_options import AsJson, Device, SourceModel
from .recipe_options import takes_recipe

if TYPE_CHECKING:
    from ..runner import RunResult


@takes_recipe
def run(
    model: SourceModel,
    out: Annotated[Path, typer.Option("-o", "--out", help="The checkpoint folder to make.")],
    chosen: Recipe,
    device: Device = "auto",
    dump_recipe: Annotated[
        bool, typer.Option("--dump-recipe", help="Print the recipe that would run, and stop.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw an unfinished run away instead of going on.")
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest weight file: 5GB, 500MB, 2GiB, ...")
    ] = MAX_SHARD_SIZE,
    as_json: AsJson = False,
) -> None:
    """Quantize a model into a packed checkpoint that transformers and vLLM load.

    A run that was interrupted goes on when the same command is given again.

    Example: quantize run ./SmolLM2-135M-Instruct -o ./smollm2-w4 --scheme W4A16 --group-size 64
    """
    if dump_recipe:
        typer.echo(chosen.to_yaml(), nl=False)
        return
    from ..runner import quantize_model

    try:
        result = quantize_model(
            model_path(model), out, chosen, device, overwrite, restart, say, max_shard_size
        )
    except KeyboardInterrupt:
        say("the same command goes on after the last finished layer")
        raise
    _show(result, as_json, device)


def _show(result: RunResult, as_json: bool, device: str) -> None:
    from ...evals.size import size_report

    size = size_report(result.out)
    errors = result.relative_error
    worst = max(errors, key=errors.__getitem__, default=None)
    if as_json:
        from ...evals.made import run_results

        print_json({
            **run_results(result, device),
            "out": result.out, "seconds": result.seconds, "recipe": result.recipe.to_dict(),
            "dtype": result.dtype, "notes": result.notes, "size": size._asdict(),
            "resumed_layers": result.resumed_layers, "dropped_rows": result.dropped_rows,
            "relative_error": errors, "pass_seconds": result.pass_seconds,
            "budget": result.budget, "foreseen": result.foreseen and result.foreseen.to_dict(),
        })  # fmt: skip
        return
    if result.budget is not None:
        from .budget_table import choice_table, frontier_table

        console = terminal(stderr=True)
        console.print(frontier_table(result.budget))
        console.print(choice_table(result.budget))
    bits = size.quantized_bits_per_weight
    per_weight = "weights as they were" if bits is None else f"{bits:.3f} bits per quantized weight"
    say(f"wrote {result.out}: {size.file_bytes / 1e6:.1f} MB, {per_weight}, {result.seconds:.0f} s")
    if result.recipe.kv_cache is not None:
        say(f"cache: {describe_kv(result.recipe.kv_cache.kv_cache.spec)}")
    for name, layers in result.pass_seconds.items():
        spent = list(layers.values())
        say(f"{name}: {sum(spent):.1f} s, {sum(spent) / len(spent):.2f} s a layer")
    if worst is not None:
        mean = sum(errors.values()) / len(errors)
        say(f"relative output error: mean {mean:.2e}, worst {errors[worst]:.2e} ({worst})")
