"""Text from the Hugging Face Hub, when it answers.

One short probe decides before anything else is asked of the Hub: its client retries for tens of
seconds where there is no network. In offline mode (HF_HUB_OFFLINE=1) only its cache is read.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..kernels.errors import UserError

REMEDY = "use pydoc (ships with Python) or a text file of your own"
ROWS_CHARS = 20_000_000  # a data set is read up to here
COLUMNS = ("text", "messages")
DATASET_ID = re.compile(
    r"(?P<path>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(:(?P<split>\w+)(:(?P<column>\w+))?)?"
)
DATA_FILES = {".jsonl", ".json", ".csv", ".parquet", ".arrow"}  # that make a folder a data set
T = TypeVar("T")


class Rows(NamedTuple):
    """Rows of a data set, as stored in one column of one split."""

    rows: list[Any]
    name: str
    description: str


def hub_reachable(timeout: float = 3.0) -> bool:
    """Whether the Hugging Face Hub answers within `timeout` seconds; False in offline mode."""
    from huggingface_hub import constants, is_offline_mode
    from huggingface_hub.utils import get_session

    if is_offline_mode():
        return False
    session = get_session()
    http = importlib.import_module(type(session).__module__.partition(".")[0])  # httpx, httpx2
    try:
        return session.head(constants.ENDPOINT, timeout=timeout).status_code < 500
    except http.TransportError:
        return False


def names_dataset(source: str) -> bool:
    """Whether `source` has the form of a data set's name and is no file and no folder without data:
    a folder of plain text is none, whose files would be read line by line."""
    match = DATASET_ID.fullmatch(source)
    if match is None or source.endswith((".txt", ".jsonl")) or Path(source).is_file():
        return False
    folder = Path(match["path"])
    return not folder.is_dir() or any(f.suffix in DATA_FILES for f in folder.rglob("*"))


def dataset_rows(source: str, splits: tuple[str, ...]) -> Rows:
    """Rows of the data set `source`, OWNER/NAME[/CONFIG][:SPLIT[:COLUMN]], a folder or on the Hub.

    Where `source` names none, the split is the first of `splits` that there is and the column one
    of COLUMNS. Streamed: at most ROWS_CHARS characters are read.
    """
    match = DATASET_ID.fullmatch(source)
    assert match is not None, source
    path, config = match["path"], match["config"]
    split = match["split"] or _first_split(source, path, config, splits)
    rows = iter(load_split(path, config, split, streaming=True))
    first = next(rows, None)
    if first is None:
        raise UserError(f"{source} has no rows; {REMEDY}")
    column = match["column"] or next((c for c in COLUMNS if c in first), COLUMNS[0])
    if column not in first:
        raise UserError(
            f"{source} has no column '{column}' (columns: {', '.join(first)}); name one as "
            f"{path}:{split}:COLUMN"
        )
    kept = list(_take(first[column], (row[column] for row in rows)))
    where = "/".join(filter(None, (path, config)))
    description = f"{where}, split {split}, column {column}, first {len(kept)} rows"
    return Rows(kept, f"{where} {split}", description)


def load_split(path: str, config: str | None, split: str, *, streaming: bool = False) -> Any:
    """A split of a data set, by the package `datasets`; UserError when it cannot be had."""
    return _call(path, lambda d: d.load_dataset(path, config, split=split, streaming=streaming))


def _take(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    chars = len(str(first))
    for row in rest:
        if chars >= ROWS_CHARS:
            return
        chars += len(str(row))
        yield row


def _first_split(source: str, path: str, config: str | None, wanted: tuple[str, ...]) -> str:
    available = _call(path, lambda d: d.get_dataset_split_names(path, config))
    for name in wanted:
        if name in available:
            return name
    raise UserError(
        f"{source} has no split {' or '.join(wanted)}; it has {', '.join(available)}: name one as "
        f"{path}:SPLIT"
    )


def _call(path: str, call: Callable[[Any], T]) -> T:
    """`call(datasets)`, its errors turned into UserError."""
    from huggingface_hub import constants, is_offline_mode

    if not (Path(path).is_dir() or is_offline_mode() or hub_reachable()):
        raise UserError(f"the Hub ({constants.ENDPOINT}) does not answer for '{path}'; {REMEDY}")
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return call(datasets)
    except (OSError, ValueError, DatasetsError) as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0].rstrip(".")
        raise UserError(f"data set '{path}' cannot be read ({reason}); {REMEDY}") from e
