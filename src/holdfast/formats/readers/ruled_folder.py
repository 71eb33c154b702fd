"""Reader of folders whose files do not record their layout, described by a file of rules.

``rules.toml`` lies in the folder. Its ``[[files]]`` tell by file name where on the mesh the writing rank was; its rules
tell what the tensors are. Rules may use the numbers of a ``config.json`` beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import BadInput
from ...state.rules.assembly import assemble
from ...state.rules.rule_language import Rules, numbers_of
from ...state.rules.rule_matching import StoredTensor
from ..fragment_reads import ReadFiles
from ..rules_source import add_to
from ..torch_archive.archives import Archive, Plain, check_inside
from ..torch_archive.distributed_tensors import is_distributed
from ..torch_archive.pickles import PickledObject, Tensor
from .safetensors_files import parts_of

RULES, CONFIG = "rules.toml", "config.json"
SAFETENSORS = ".safetensors"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", SAFETENSORS)
"""Suffixes of files that may hold tensors; the rules must mention each such file."""


def is_ruled(path: Path) -> bool:
    return (path / RULES).is_file()


class RuledFolder(ReadFiles):
    """The folder ``path``. Names are those in the files; names of nested dictionaries are joined by dots."""

    def __init__(self, path: Path) -> None:
        """Apply the rules. Raises ``RuleError`` if they do not fit the files, ``Damaged`` if files are damaged."""
        super().__init__(str(path), "rules")
        config = path / CONFIG
        try:
            values = numbers_of(config.read_text()) if config.is_file() else {}
            text = (path / RULES).read_text()
        except ValueError as error:
            raise BadInput(f"{path}: its {RULES} or {CONFIG} cannot be read: {error}") from None
        rules = Rules.parse(text, str(path / RULES), values)
        self._rest: dict[str, dict[str, Any]] = {}
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        places = [rules.place_of_file(file.relative_to(path).as_posix()) for file in files]
        rows = [row for file, at in zip(files, places, strict=True) for row in self._rows(file, at)]
        if self._rest:
            self.progress["extra"] = {"files": self._rest}
        add_to(self, assemble(rules, rows))

    def _rows(self, path: Path, at: Mapping[str, tuple[int, int]]) -> Iterator[StoredTensor]:
        if path.suffix == SAFETENSORS:
            tensors, header = parts_of(path)
            self.passed_over |= header.passed_over
            for entry, part in tensors:
                yield StoredTensor(self.add_part(part), entry.key, entry.shape, entry.dtype, at=at)
            return
        archive, rest = Archive(path), dict[str, Any]()
        plain = Plain(archive)
        for name, value in _leaves(archive.content, ""):
            if isinstance(value, Tensor):
                part = archive.part_in(self, value.storage)
                check_inside(name, value, self.parts[part])
                yield StoredTensor(
                    part,
                    name,
                    value.shape,
                    value.storage.dtype,
                    at=at,
                    offset=value.offset,
                    strides=value.strides,
                )
            else:
                rest[name] = plain(value, name)
        if rest:
            self._rest[path.relative_to(self.path).as_posix()] = rest


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and other values of a pickle, each with its path from the top."""
    if is_distributed(value):
        raise BadInput(
            f"{name} is a distributed tensor, which says itself how it is divided, and rules would say it a second"
            f" time. Remove {RULES}: the files of accelerate and verl are read without."
        )
    items: Mapping[Any, Any] | None = None
    if isinstance(value, Mapping):
        items = value
    elif isinstance(value, PickledObject):
        items = value.fields | value.items | dict(enumerate(value.args))
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = dict(enumerate(value))
    if items is None:
        yield name, value
        return
    for key, inner in items.items():
        yield from _leaves(inner, f"{name}.{key}" if name else str(key))
