"""Reader of folders that DCP's ``HuggingFaceStorageWriter`` wrote: each rank's shards in a safetensors file.

Shards store where they begin in their tensor. The size of a tensor follows only from the end of its last shard. A
folder that lacks the files of the last ranks therefore looks like one of smaller tensors: callers that know the shapes
must compare them. Consolidated folders are ordinary safetensors files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ...errors import Damaged, FileMissing
from ...state.layout.fragments import Fragment, Fragments, dense
from ...state.layout.regions import Region
from ...state.tensor_entries import TensorEntry
from ..entry_keys import ShapeAndType, name_all
from ..fragment_reads import ReadFiles
from ..readers.safetensors_files import header_of
from ..source import SourceTensor, StoredArray
from .dcp_metadata import ints

_FILE = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_INFO = "DCP_SHARDING_INFO"


def is_sharded(path: Path) -> bool:
    return path.is_dir() and any(_FILE.fullmatch(each.name) for each in path.iterdir())


class ShardedSafetensors(ReadFiles):
    """The folder ``path``, which holds parameters and buffers alone."""

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Raises ``FileMissing`` if a rank's files are missing (except the last), ``Damaged`` for bad shards.
        """
        super().__init__(str(path), "safetensors shards")
        self._pieces: dict[str, list[Fragment]] = {}
        self._dtypes: dict[str, str] = {}
        files = sorted(each for each in path.iterdir() if _FILE.fullmatch(each.name))
        _refuse_gaps(path, [each.name for each in files])
        self.writer = "HuggingFaceStorageWriter of torch"
        for file in files:
            self._add_file(file)
        kinds = {
            key: ShapeAndType(_shape_of(pieces), self._dtypes[key]) for key, pieces in self._pieces.items()
        }
        named = name_all(kinds, {key: (key,) for key in kinds}, {})
        for key, kind in kinds.items():
            atom = TensorEntry(*named.tensors[key], *kind)
            self.add(SourceTensor(atom, Fragments.of(self._pieces[key], len(kind.shape))))
        self.progress = {"roots": named.roots}

    def _add_file(self, path: Path) -> None:
        header = header_of(path)
        self.passed_over |= header.passed_over
        try:
            begins = {
                key: ints(item["saved_offsets"]) for key, item in json.loads(header.metadata[_INFO]).items()
            }
            for entry in header.entries:
                start = begins[entry.key]
                box = Region(start, tuple(a + n for a, n in zip(start, entry.shape, strict=True)))
                if self._dtypes.setdefault(entry.key, entry.dtype) != entry.dtype:
                    raise ValueError(f"{entry.key} is of {entry.dtype}, and of another type elsewhere")
                part = self.add_part(StoredArray(str(path), entry.offset, entry.nbytes, entry.dtype))
                self._pieces.setdefault(entry.key, []).append(dense(box, part))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise Damaged(
                f"{path} does not say where its shards belong ({type(error).__name__}: {error})",
                path=str(path),
            ) from error


def _shape_of(pieces: list[Fragment]) -> tuple[int, ...]:
    return tuple(max(stops) for stops in zip(*(piece.box.stop for piece in pieces), strict=True))


def _refuse_gaps(path: Path, names: list[str]) -> None:
    """Raise ``FileMissing`` if a rank before the last has no file."""
    ranks = {int(match[1]) for name in names if (match := _FILE.fullmatch(name))}
    missing = set(range(1, max(ranks) + 1)) - ranks
    if missing:
        raise FileMissing(
            f"{path} has files of the ranks {sorted(ranks)}, and none of rank {min(missing)}: its shards are missing",
            path=str(path),
        )
