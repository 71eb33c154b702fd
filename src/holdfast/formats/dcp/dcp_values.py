"""Reader of the values other than tensors in DCP entries and ``torch.save`` files, as JSON."""

from __future__ import annotations

from typing import Any

from ...errors import Damaged
from ...quantities import KiB
from ..torch_archive.archives import Archive
from ..torch_archive.pickled_json import Plain
from .dcp_metadata import DcpEntry

REMEMBERED = 64 * KiB
"""The largest entry without tensors, in bytes, whose content is cached, as equal ones recur."""


class Values:
    """Reader of entries that are no tensors, as JSON."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def read(self, key: str, entry: DcpEntry) -> Any:
        """Return the value of ``entry``. Raises ``Damaged``, which names ``key``."""
        with open(entry.path, "rb") as file:
            file.seek(entry.offset)
            data = file.read(entry.nbytes) if entry.nbytes <= REMEMBERED else b""
        if data and data in self._known:
            return self._known[data]
        try:
            archive = Archive(entry.path, entry.offset, entry.nbytes)
            value = Plain(archive)(archive.content)
        except Damaged as error:
            raise Damaged(
                f"{key}, in {entry.path} from {entry.offset} on: {error}", path=str(entry.path), atoms=(key,)
            ) from error
        if data:
            self._known[data] = value
        return value
