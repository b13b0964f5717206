"""`quantize tune`: time this GPU's tiles for a checkpoint's linears, and keep the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...kernels.errors import UserError
from .common import print_json, terminal
from .common_options import AsJson

if TYPE_CHECKING:
    from ...evals.tune import Trial

SECONDS_A_TRIAL = 2.0  # of compiling and timing one choice, for the estimate


def tune(
    checkpoint: Annotated[Path, typer.Argument(help="A quantized checkpoint.")],
    dtype: Annotated[str, typer.Option(help="Of activations: bfloat16 or float16.")] = "bfloat16",
    as_json: AsJson = False,
) -> None:
    """Time kernel tiles on this GPU for a checkpoint's linears, and keep the fastest.

    Choices go into one file for each kind of GPU below the user's cache (~/.cache/lowbit/tuned);
    generate, eval and serve take them from there. Without it the shipped tiles run.

    Example: quantize tune ./llama-8b-w4
    """
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "tune times kernels on a CUDA or ROCm GPU, and torch sees none here; without tuning "
            "the shipped tiles run"
        )
    if dtype not in ("bfloat16", "float16"):
        raise UserError(f"--dtype must be bfloat16 or float16, not '{dtype}'")
    from ...kernels.tuned import device_name, tuned_file, write_tuned

    device = torch.device("cuda", torch.cuda.current_device())
    trials = _trials(checkpoint, getattr(torch, dtype), device)
    name = device_name(device)
    path = tuned_file(name)
    write_tuned(path, name, [trial.tuned for trial in trials])
    if as_json:
        print_json({"file": str(path), "device": name, "trials": [_plain(t) for t in trials]})
        return
    terminal().print(_table(name, trials))
    terminal().print(f"kept in {path}")


def _trials(checkpoint: Path, dtype: Any, device: Any) -> list[Trial]:
    from tqdm import tqdm

    from ...evals.gpu_timer import copies_needed, seconds
    from ...evals.tune import candidates_to_time, checkpoint_problems
    from ...evals.tune import tune as tuned
    from ..checkpoint.load import Checkpoint

    problems = checkpoint_problems(Checkpoint(checkpoint), dtype, device)
    if not problems:
        raise UserError(
            f"{checkpoint} has no linears that a kernel with tiles runs here; `quantize doctor "
            "--ops` says what runs them"
        )
    total = candidates_to_time(problems, device)
    terminal(stderr=True).print(
        f"{len(problems)} kinds of linears, {total} trials: about "
        f"{max(1, round(total * SECONDS_A_TRIAL / 60))} min"
    )
    with tqdm(total=total, unit="trial") as bar:
        return list(tuned(problems, device, seconds, copies_needed, bar.update))


def _plain(trial: Trial) -> dict[str, Any]:
    config = trial.tuned.config
    return {
        **trial.tuned._asdict(),
        "config": None if config is None else config._asdict(),
        "tried": trial.tried,
        "passed_over": trial.passed_over,
    }


def _table(device: str, trials: list[Trial]) -> Any:
    from rich.table import Table

    table = Table("linear", "tokens up to", "shipped, us", "tuned, us", "faster", "tiles",
                  title=device)  # fmt: skip
    for trial in trials:
        found = trial.tuned
        tiles = "dense" if found.config is None else " ".join(map(str, found.config))
        table.add_row(
            found.key, str(found.rows), f"{1e6 * found.shipped_seconds:.1f}",
            f"{1e6 * found.seconds:.1f}", f"{found.shipped_seconds / found.seconds:.2f}x", tiles,
        )  # fmt: skip
    return table
