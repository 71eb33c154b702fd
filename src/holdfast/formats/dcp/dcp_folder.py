"""Reader of folders of ``torch.distributed.checkpoint``: ``.metadata``, a pickle, and ``*.distcp`` files, in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...quantities import counted
from ...state.tensor_entries import TensorEntry
from ..entry_keys import PROGRESS, name_all
from ..foreign_progress import state_dict_of
from ..small_tensors import add_or_tell
from ..source import SourceTensor
from ..state_dict_progress import progress_of
from .dcp_entries import Entries
from .dcp_metadata import METADATA, Claims
from .dcp_values import Values


def is_dcp(path: Path) -> bool:
    """Return whether ``path`` is such a folder, complete or not."""
    return (path / METADATA).is_file() or any(path.glob("__*_*.distcp"))


class DcpFolder(Entries):
    """The folder ``path``; ``progress["roots"]`` tells which keys were read as the model's and the optimizer's."""

    def __init__(self, path: Path) -> None:
        """Read ``.metadata``.

        Raises ``Damaged`` if it claims what the files lack, or does not cover a tensor exactly once.
        """
        super().__init__(str(path), "dcp")
        claims = Claims(path)
        ranks = {file.name.split("_")[2] for file in path.glob("__*_*.distcp")}
        theirs = f"torch.distributed.checkpoint, files of {counted(len(ranks), 'rank')}"
        self.writer = "holdfast" if PROGRESS in claims.values else theirs
        values = Values()
        rest = {key: values.read(key, entry) for key, entry in claims.values.items()}
        with state_dict_of(str(path)):
            self._take(claims, rest)

    def _take(self, claims: Claims, rest: dict[str, Any]) -> None:
        """Build tensor entries and progress; ``rest`` holds the entries that are no tensors."""
        kinds = {key: shards.kind for key, shards in claims.tensors.items()}
        named = name_all(kinds, claims.paths, rest, self.path)
        for key, shards in claims.tensors.items():
            name, slot = named.tensors[key]
            stored = SourceTensor(TensorEntry(name, slot, *shards.kind), self.add_shards(key, shards))
            add_or_tell(self, key, stored, rest)
        self.progress = progress_of(
            {key: rest[key] for key in claims.paths if key in rest}, claims.paths, named, self.path
        )
