"""Safetensors, read: one file, or a folder of them with an index, as Hugging Face's libraries have it.

A file that ``huggingface.py`` wrote says in its metadata what of a training state its keys are, and has checksums there
of its tensors and of the header; in others every tensor is a parameter, and nothing tells whether a bit has changed.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import xxhash

from ...errors import Damaged
from ...state.atoms import Atom
from ...state.boxes import Box
from ...state.pieces import Pieces, dense
from ...store.layout import Entry, Layout
from ...units import MiB
from ..files import Files
from ..source import Part, Stored, Sums
from ..told import told, told_progress
from .indexed import files_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
KEYS, PROGRESS, XXH3 = "holdfast.keys", "holdfast.progress", "holdfast.xxh3"
_UNREAD = re.compile(
    r"(optimizer|scheduler|scaler|sampler|dl_state_dict)(_\d+)?\.(pt|bin)|optimizer_\d+|trainer_state\.json"
    r"|rng_state(_\d+)?\.pth|(random_states|custom_checkpoint)_\d+\.pkl|(pytorch_)?model_\d+\.(safetensors|bin)"
)
DIGITS = 16
"""Of a checksum."""
HEADER_BYTES = 100 * MiB
"""More than any header has (the limit of the safetensors library)."""


def is_safetensors(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".safetensors"
    return (path / INDEX).is_file() or (path / SINGLE).is_file()


class SafetensorsFiles(Files):
    """The file ``path``, or the folder with its index."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), "safetensors")
        self.unread = unread_in(path)
        files, expected = files_of(path, SINGLE, INDEX)
        for file in files:
            self._add_file(file)
        if missing := sorted(expected - self._where):
            raise Damaged(f"{path}: its index names {missing[0]}, which is in no file", path=str(path))
        self.aliases = self.progress.pop("aliases", {})
        names = {stored.atom.name for stored in self.atoms.values()}
        if strangers := sorted(set(self.aliases.values()) - names):
            raise Damaged(
                f"{path}: {PROGRESS} ties something to {strangers[0]}, which it has not", path=str(path)
            )

    @property
    def _where(self) -> set[str]:
        return {
            stored.atom.name if stored.atom.slot == "param" else key for key, stored in self.atoms.items()
        }

    def _add_file(self, path: Path) -> None:
        tensors, metadata = parts_of(path)
        slots = told(metadata.get(KEYS), KEYS, str(path))
        self.progress |= told_progress(metadata.get(PROGRESS), PROGRESS, str(path))
        self.writer = self.writer or ("holdfast" if XXH3 in metadata else _library_of(path.parent))
        for entry, where in tensors:
            name, slot = _name_of(slots, entry.key, path)
            part = self.add_part(where)
            atom = Atom(name, slot, entry.shape, entry.dtype)
            self.add(Stored(atom, Pieces.of([dense(Box.whole(entry.shape), part)], len(entry.shape))))


def unread_in(path: Path) -> tuple[str, ...]:
    """What is in a folder beside its weights that a training of transformers or accelerate would go on with."""
    return (
        tuple(sorted(each.name for each in path.iterdir() if _UNREAD.fullmatch(each.name)))
        if path.is_dir()
        else ()
    )


def _name_of(slots: dict[str, Any], key: str, path: Path) -> tuple[str, str]:
    """The name and the slot of the tensor ``key``."""
    found = slots.get(key, [key, "param"])
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(part, str) for part in found):
        raise Damaged(
            f"{path}: {KEYS} says that {key} is {found!r}, which is no name and slot", path=str(path)
        )
    return found[0], found[1]


def header_of(path: Path) -> tuple[Layout, dict[str, str]]:
    """Where the tensors of a safetensors file lie, and its metadata. Raises ``Damaged`` if it is none, or not whole."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
        if length > min(HEADER_BYTES, size - 8):
            raise Damaged(
                f"{path} is no safetensors file: of {size} bytes, {length} would be header", path=str(path)
            )
        header = file.read(length)
    try:
        table = json.loads(header)
        metadata = table.get("__metadata__") or {}
        metadata = {str(key): str(value) for key, value in metadata.items()}
        layout = Layout.parse(struct.pack("<Q", length) + header)
    except (ValueError, AttributeError, RecursionError, Damaged) as error:
        why = error.__cause__ if isinstance(error, Damaged) else error
        raise Damaged(f"{path} does not read as a safetensors file: {why}", path=str(path)) from error
    if layout.file_bytes != size:
        raise Damaged(
            f"{path} has {size} bytes, its header says {layout.file_bytes}: it was cut short", path=str(path)
        )
    if XXH3 in metadata and not _agrees(table, told(metadata[XXH3], XXH3, str(path))):
        raise Damaged(
            f"{path}: the header fails its checksum. Take another copy of it. If the file was changed on purpose, or"
            " made with the metadata of another, save it without the holdfast.xxh3 in its metadata.",
            path=str(path),
        )
    return layout, metadata


def _agrees(table: dict[str, Any], said: dict[str, Any]) -> bool:
    """Whether a header is what its checksum is of."""
    try:
        return said.get("header") == digest_of(table, said.get("tensors"))
    except RecursionError:  # no writer nests it
        return False


def digest_of(table: dict[str, Any], tensors: Any) -> str:
    """The xxh3 of what a header says, with the checksums of its ``tensors`` and without its own."""
    metadata = {key: value for key, value in table["__metadata__"].items() if key != XXH3}
    text = json.dumps([{**table, "__metadata__": metadata}, tensors], sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


def parts_of(path: Path) -> tuple[list[tuple[Entry, Part]], dict[str, str]]:
    """The tensors of a safetensors file with their checksums, if it has any, and its metadata."""
    layout, metadata = header_of(path)
    said = told(metadata.get(XXH3), XXH3, str(path)).get("tensors")
    found = []
    for entry in layout.entries:
        sums = None if XXH3 not in metadata else _sums_of(entry, said, path)
        found.append((entry, Part(str(path), entry.offset, entry.nbytes, entry.dtype, sums=sums)))
    return found, metadata


def _sums_of(entry: Entry, said: Any, path: Path) -> Sums:
    """The checksums of a tensor in what a file ``said`` of all."""
    try:
        stretch, text = said[entry.key]
        if type(stretch) is not int or stretch < 1 or len(text) != DIGITS * -(-entry.nbytes // stretch):
            raise ValueError(f"{stretch} and {len(text)} digits")
        return Sums(entry.key, stretch, tuple(text[at : at + DIGITS] for at in range(0, len(text), DIGITS)))
    except (TypeError, ValueError, KeyError) as error:
        raise Damaged(f"{path}: {XXH3} has no checksums of {entry.key}", path=str(path)) from error


def _library_of(folder: Path) -> str:
    """What wrote a folder of Hugging Face, if its configuration says it."""
    try:
        version = json.loads((folder / "config.json").read_text())["transformers_version"]
        return f"transformers {version}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
