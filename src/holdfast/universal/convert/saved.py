"""State dicts of ``torch.save``: of a model, or of a model and its optimizer and whatever else, in one file; or that of
a model in several with an index, as older folders of Hugging Face have it.

What is what is found as in folders of DCP (``keys``). Of an optimizer that knows its parameters by number the names are
those that it keeps beside them, or else those of the model in its order, which each group is taken to be in, if the
shapes of both allow that in one way alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import BadInput, Damaged
from ...state.atoms import Atom
from ...state.pieces import Pieces
from ..archives import Archive, check_inside, piece_of
from ..files import Files
from ..keys import Kind, Named, name_all, state_of
from ..keys import Path as Way
from ..pickles import Tensor
from ..plain import Plain
from ..small import SMALL_BYTES, add_or_tell
from ..source import Stored
from ..told import check_progress, state_dict_of
from ..values import progress_of
from .indexed import files_of
from .safetensors import unread_in

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MOST_NUMBERED = 1 << 32
"""More than an optimizer has parameters."""
_ZIP = b"PK\x03\x04"


def is_saved(path: Path) -> bool:
    """Whether ``path`` is such a file, or a folder of them; a file by its name also where torch before 1.6 wrote it."""
    if path.is_dir():
        return (path / INDEX).is_file() or (path / SINGLE).is_file()
    with open(path, "rb") as file:
        return path.suffix in SUFFIXES or file.read(4) == _ZIP


class Saved(Files):
    """The file ``path``, or those of the folder. ``progress["roots"]`` says which keys were taken for the model's and
    the optimizer's."""

    def __init__(self, path: Path) -> None:
        """Raises ``BadInput`` if there is no state dict, ``Damaged`` if it is not whole, or names what is not known."""
        super().__init__(str(path), "torch.save")
        self.writer = "torch.save"
        self.unread = unread_in(path)
        self._held: dict[str, tuple[Archive, Tensor]] = {}
        self._numbers: dict[tuple[str, str, str], int] = {}
        with state_dict_of(str(path)):
            self._take(*self._flattened(path))

    def _flattened(self, path: Path) -> tuple[dict[str, Way], dict[str, Any]]:
        """The names on the way to each entry by key, in the writer's order, and all that is no tensor, as JSON."""
        ways: dict[str, Way] = {}
        values: dict[str, Any] = {}
        left_out: list[str] = []
        files, expected = files_of(path, SINGLE, INDEX)
        for archive in map(Archive, files):
            plain = Plain(archive, SMALL_BYTES)
            for way, value in _leaves(_state_dict_of(archive), ()):
                key = ".".join(map(str, way))
                if key in ways:
                    raise Damaged(f"{archive.path} has {key} twice, under one name", path=str(archive.path))
                ways[key] = way
                if isinstance(value, Tensor):
                    self._held[key] = archive, value
                else:
                    values[key] = plain(value, key)
            left_out += plain.left_out
        if not self._held:
            raise BadInput(f"{path} holds no tensors, so it is no state of a model")
        if missing := sorted(expected - self._held.keys()):
            raise Damaged(f"{path}: its index names {missing[0]}, which is in no file", path=str(path))
        if left_out:
            ways["not_carried"] = ("not_carried",)
            values["not_carried"] = left_out
        return ways, values

    def _take(self, ways: dict[str, Way], values: dict[str, Any]) -> None:
        kinds = {key: Kind(tensor.shape, tensor.storage.dtype) for key, (_, tensor) in self._held.items()}
        tied = self._tied(name_all(kinds, ways, values, self.path))
        named = name_all(
            {key: kind for key, kind in kinds.items() if key not in tied}, ways, values, self.path
        )
        rest = dict(values)
        for key, (name, slot) in named.tensors.items():
            stored = self._stored(Atom(name, slot, *kinds[key]), *self._held[key])
            add_or_tell(self, key, stored, rest)
        self.unnested = {
            slot for key, way in ways.items() if (slot := _unnested(key, way, named)) is not None
        }
        self.aliases = {named.name_in_model(alias): named.tensors[key][0] for alias, key in tied.items()}
        ordered = {key: rest[key] for key in ways if key in rest}
        self.progress = progress_of(ordered, ways, named, self.path)
        check_progress({name: value for name, value in self.progress.items() if name != "extra"})

    def _tied(self, named: Named) -> dict[str, str]:
        """By key of a tensor of the model, that of the one before it which is the same memory."""
        first: dict[str, str] = {}  # by texts: hashes of numbers can be chosen by who wrote the file
        tied = {}
        for key, (archive, tensor) in self._held.items():
            of_model = key in named.tensors and named.tensors[key][1] in ("param", "buffer")
            if of_model and (known := first.setdefault(f"{archive.path} {tensor}", key)) != key:
                tied[key] = known
        return tied

    def _stored(self, atom: Atom, archive: Archive, tensor: Tensor) -> Stored:
        place = str(archive.path), tensor.storage.key, tensor.storage.dtype
        if place not in self._numbers:
            self._numbers[place] = self.add_part(archive.part(tensor.storage))
        number = self._numbers[place]
        check_inside(atom.key, tensor, self.parts[number])
        return Stored(atom, Pieces.of([piece_of(tensor, number)], len(atom.shape)))


def _state_dict_of(archive: Archive) -> dict[Any, Any]:
    if not isinstance(archive.content, dict):
        kind = type(archive.content).__name__.lower()
        raise BadInput(
            f"{archive.path} holds a {kind} and no state dict. Save model.state_dict(), or a dictionary of that and"
            " optimizer.state_dict()."
        )
    return archive.content


class _Place(int):
    """In a list, and no key of a dictionary."""


def _unnested(key: str, way: Way, named: Named) -> str | None:
    """The slot, if the entry is an optimizer's state whose dictionaries have other keys than names, which its own name
    does not show any more."""
    _, slot = state_of(key, way, named.optimizers) or ("", "")
    inside = next((way[i:] for i in range(len(way)) if ".".join(map(str, way[i:])) == slot), ())
    names = [part for part in inside if not isinstance(part, _Place)]
    plain = all(isinstance(name, str) and "." not in name for name in names)
    return None if plain and not any(name.isdecimal() for name in names if name != inside[0]) else slot


def _leaves(value: Any, way: Way) -> Iterator[tuple[Way, Any]]:
    """Tensors, and what holds none or nothing, each with the names on the way to it."""
    if isinstance(value, dict) and value and not isinstance(value, Counter):
        for name, inner in _by_name(value).items():
            yield from _leaves(inner, (*way, name))
    elif isinstance(value, list | tuple) and any(isinstance(each, dict | Tensor) for each in value):
        for place, inner in enumerate(value):
            yield from _leaves(inner, (*way, _Place(place)))
    else:
        yield way, value


def _by_name(state: dict[Any, Any]) -> dict[Any, Any]:
    """An optimizer's state dict, where it has the names of its parameters beside their numbers, by these; any other
    dictionary as it is."""
    groups, slots = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(slots, dict):
        return state
    names: dict[Any, str] = {}
    for group in groups:
        numbers, own = (group.get("params"), group.get("param_names")) if isinstance(group, dict) else (0, 0)
        if not isinstance(numbers, list) or not isinstance(own, list) or len(numbers) != len(own):
            return state
        if not all(type(number) is int and 0 <= number < MOST_NUMBERED for number in numbers):
            return state
        names |= dict(zip(numbers, own, strict=True))
    if len(set(names.values())) != len(names) or not slots.keys() <= names.keys():
        return state
    named = [
        {k: v for k, v in g.items() if k != "param_names"} | {"params": g["param_names"]} for g in groups
    ]
    return {**state, "state": {names[n]: held for n, held in slots.items()}, "param_groups": named}
