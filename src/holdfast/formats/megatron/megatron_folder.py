"""The files of a Megatron distributed checkpoint beside those of its tensors.

``metadata.json`` is written last and names the format. ``common.pt`` holds what all ranks have in common.
``integrity.json``, which is optional in Megatron, holds the SHA-256 of every file; it reveals a file of another save,
which checksums inside the files cannot.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from pathlib import Path
from typing import Any

from ...errors import BadInput, ChunkCorrupt, Damaged, FileMissing
from ...quantities import MiB
from ..dcp.dcp_metadata import METADATA

TRACKER, CONFIG, COMMON, SUMS = (
    "latest_checkpointed_iteration.txt",
    "metadata.json",
    "common.pt",
    "integrity.json",
)
_ITERATION = re.compile(r"iter_\d{7,}")
"""The name that Megatron gives the folder of an iteration."""
LARGEST = 64 * MiB
"""A limit for the size of these JSON files."""


def is_megatron(path: Path) -> bool:
    """Return whether ``path`` is the folder of an iteration, or has a file that names the newest one.

    An incomplete folder counts as well.
    """
    if (path / TRACKER).is_file():
        return True
    if (path / COMMON).is_file():
        return (path / METADATA).is_file() or any(path.glob("*.distcp"))
    if _ITERATION.fullmatch(path.name) and (path / METADATA).is_file():
        return True
    try:
        return "sharded_backend" in _table(path / CONFIG)
    except Damaged:
        return False


def folder_of(path: Path) -> Path:
    """Return the folder of the iteration in the format ``torch_dist``: ``path``, or the newest of ``path``.

    Raises ``BadInput`` for another format, ``FileMissing`` and ``Damaged`` for an incomplete checkpoint.
    """
    folder = newest_of(path)
    if not (folder / CONFIG).is_file():
        if any(folder.glob("mp_rank_*")):
            raise BadInput(
                f"{folder} is of Megatron's format `torch`, a file of each rank, which records no layout. Save it with"
                " --ckpt-format torch_dist, or say what its files are in a rules.toml."
            )
        raise FileMissing(
            f"{folder / CONFIG} is missing, which Megatron writes last: the save was not finished, or is of another"
            " format than torch_dist",
            path=str(folder / CONFIG),
        )
    config = _table(folder / CONFIG)
    backend = config.get("sharded_backend"), config.get("sharded_backend_version", 1)
    if backend != ("torch_dist", 1):
        raise BadInput(
            f"{folder} is of the format {backend[0]!r}, version {backend[1]}; torch_dist, version 1, is the one that is"
            " read. Load it with Megatron and save it with --ckpt-format torch_dist."
        )
    if not (folder / COMMON).is_file():
        raise FileMissing(f"{folder / COMMON} is missing", path=str(folder / COMMON))
    return folder


def newest_of(path: Path) -> Path:
    """Return the folder of the newest iteration that ``path`` names; ``path`` itself if it names none.

    Raises ``Damaged`` if the name is none, ``FileMissing`` if the folder is missing.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        return path
    text = tracker.read_bytes()[:100].decode(errors="replace").strip()
    if text != "release" and not text.isdecimal():
        raise Damaged(f"{tracker} says {text!r}, which is no iteration", path=str(tracker))
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise FileMissing(f"{tracker} names {folder.name}, which is no folder beside it", path=str(tracker))
    return folder


def _table(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ``Damaged`` if there is none."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        table = json.loads(path.read_bytes())
        if not isinstance(table, dict):
            raise ValueError(f"it holds a {type(table).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} does not read as JSON of Megatron: {error}", path=str(path)) from None
    return table


class IntegrityFile:
    """The checksums of ``integrity.json`` for the files of ``folder``; none without that file."""

    def __init__(self, folder: Path) -> None:
        """Read the checksums. Raises ``FileMissing`` if a listed file is missing."""
        self._where = folder / SUMS
        self._sums: dict[str, str] = {}
        self._verified: set[str] = set()
        self._lock = threading.Lock()
        if not self._where.is_file():
            return
        table = _table(self._where)
        files = table.get("files")
        if table.get("algorithm", "sha256") != "sha256" or not isinstance(files, dict):
            raise Damaged(f"{self._where} has no sums of SHA-256", path=str(self._where))
        for name, text in files.items():
            path = folder / name
            if Path(name).name != name:
                raise Damaged(
                    f"{self._where} names {name!r}, which is not in the folder", path=str(self._where)
                )
            if not path.is_file():
                raise FileMissing(f"{path} is missing, which {SUMS} names", path=str(path))
            self._sums[str(path)] = str(text)

    def check(self, path: str) -> None:
        """Verify a file, reading it once. Raises ``ChunkCorrupt`` if its checksum differs."""
        with self._lock:
            if not self._sums or path in self._verified:
                return
            if path not in self._sums:
                raise Damaged(f"{path} is not named by {SUMS}: it is of another checkpoint", path=path)
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != self._sums[path]:
                raise ChunkCorrupt(
                    f"{path} fails its SHA-256: {SUMS} says {self._sums[path][:16]}..., read {found[:16]}.... The file"
                    " is damaged, or of another checkpoint; take another copy of it.",
                    path=path,
                )
            self._verified.add(path)
