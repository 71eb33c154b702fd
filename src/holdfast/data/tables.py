"""The rows of tables: Parquet files, and the Arrow files of folders that ``datasets.save_to_disk`` writes.

They are read batch by batch, so memory does not grow with a file. pyarrow is imported when the first one is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import BadInput
from ..libraries import library
from ..quantities import first_line, shown

ROWS = 256
"""The rows that are read at once."""
KEYS = ("text", "prompt", "completion", "messages", "tools")
"""The keys of a record that are read: those of a JSON object, or the columns of a table."""
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""The files beside the tables of a saved dataset; ``SPLITS`` names several of them."""


def rows_of(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a table, numbered from 1, as values by column.

    Raises ``BadInput`` if pyarrow cannot be imported, or the file is not whole.
    """
    way_out = "pip install 'holdfast[tables]', or write it as JSON lines first"
    pyarrow, parquet = (library(name, str(path), way_out) for name in ("pyarrow", "pyarrow.parquet"))
    number = 0
    try:
        with path.open("rb") as file:
            if path.suffix.lower() == ".parquet":
                table = parquet.ParquetFile(file)
                names = table.schema_arrow.names
                batches = table.iter_batches(ROWS, columns=_columns(names))
            else:
                batches = pyarrow.ipc.open_stream(file)
                names = batches.schema.names
            _refuse_without_columns(path, names)
            for batch in batches:
                read = batch.select(_columns(names))
                for start in range(0, len(read), ROWS):
                    for row in read.slice(start, ROWS).to_pylist():
                        number += 1
                        yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(
            f"{path} is no whole table after row {number}: {first_line(error)}. Write it again or leave it out."
        ) from error


def tables_of(folder: Path) -> list[Path] | None:
    """Return the tables of a dataset that was saved in ``folder``, in their order; None if it is no such folder.

    Raises ``BadInput`` for a folder of several splits, because one of them may be for tests.
    """
    if (folder / SPLITS).is_file():
        names = sorted(path.name for path in folder.iterdir() if (path / STATE).is_file())
        raise BadInput(
            f"{folder} has the splits {shown(names)}: name one, such as data.text={folder / (names or ['train'])[0]},"
            " and give another as data.validation"
        )
    if not ((folder / STATE).is_file() and (folder / INFO).is_file()):
        return None
    try:
        told = json.loads((folder / STATE).read_text(encoding="utf-8"))
        names = [str(each["filename"]) for each in told["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder / STATE} does not name the tables of a saved dataset: {error}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BadInput(f"{folder} lacks {shown(missing)}, which its {STATE} names. Save the dataset again.")
    return [folder / name for name in names]


def _columns(names: list[str]) -> list[str]:
    return [name for name in KEYS if name in names]


def _refuse_without_columns(path: Path, names: list[str]) -> None:
    if not _columns(names):
        raise BadInput(
            f'{path} has neither a column "messages" nor "text" nor "prompt" and "completion"; it has {shown(names)}'
        )
