"""Sets of files with an index from keys to files, as Hugging Face's libraries write them."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import Damaged, FileMissing

INDEX_BYTES = 100_000_000
"""An upper limit for the size of an index."""


def files_of(path: Path, single: str, index: str) -> tuple[list[Path], set[str]]:
    """Return the files of ``path`` and the keys that its index lists (none where no index applies).

    A file stands for itself. In a folder, ``single`` wins over ``index``, as in transformers, which leaves the index of
    an earlier save in place.

    Raises ``Damaged`` for an index that is none, ``FileMissing`` for a file that it names.
    """
    if path.is_file():
        return [path], set()
    if (path / single).is_file() or not (path / index).is_file():
        return [path / single], set()
    if (size := (path / index).stat().st_size) > INDEX_BYTES:
        raise Damaged(f"{path / index} is no index of files: it has {size} bytes", path=str(path / index))
    try:
        named = json.loads((path / index).read_text())["weight_map"]
        names = sorted(set(named.values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a file of it is not in the folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path / index} is no index of files: {error}", path=str(path / index)) from error
    for file in (path / name for name in names):
        if not file.is_file():
            raise FileMissing(f"{file} is missing, which the index names", path=str(file))
    return [path / name for name in names], set(named)
