"""Reader of state dicts of ``torch.save``: of a model, or of a model, its optimizer and more.

The state dict is one file, or several files with an index, as in older Hugging Face folders. Roles of keys are found as
in folders of DCP (``entry_keys``). Where an optimizer knows its parameters by number, the names are those stored beside
the numbers. Without them, the model's order is used, if the shapes allow one assignment only; each group is assumed to
keep that order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import BadInput, Damaged
from ...state.layout.fragments import Fragments, joined
from ...state.tensor_entries import TensorEntry
from ..entry_keys import Path as Way
from ..entry_keys import ShapeAndType, TensorRoles, name_all, state_of
from ..source import ReadFiles, SourceTensor
from ..state_dict_progress import SMALL_BYTES, add_or_tell, check_progress, progress_of, state_dict_of
from ..torch_archive.archives import Archive, Plain, check_inside, piece_of
from ..torch_archive.distributed_tensors import LocalTensor, Meshes, local_tensor
from ..torch_archive.pickles import Tensor, is_distributed, quantised_parts
from .safetensors_files import files_of, unread_in

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MOST_NUMBERED = 1 << 32
"""A limit that no number of parameters reaches."""
_ZIP = b"PK\x03\x04"
QUANTISED = "__bnb_optimizer_quant_state__"
"""The key under which bitsandbytes puts the tensors of a parameter in a state dict, which are not nested in use."""
Held = tuple[Archive, LocalTensor]
"""A tensor of an archive, or what the archive has of one."""


def is_saved(path: Path) -> bool:
    """Return whether ``path`` is such a file, or a folder of them.

    The suffix alone suffices, for files of torch before 1.6.
    """
    if path.is_dir():
        return (path / INDEX).is_file() or (path / SINGLE).is_file()
    with open(path, "rb") as file:
        return path.suffix in SUFFIXES or file.read(4) == _ZIP


class TorchSave(ReadFiles):
    """The file ``path``, or those of the folder; ``progress["roots"]`` tells the keys of model and optimizer."""

    FORMAT = "torch.save"

    def __init__(self, path: Path) -> None:
        """Read the files.

        Raises ``BadInput`` without a state dict, ``Damaged`` if it is damaged or names unknown classes.
        """
        super().__init__(str(path), self.FORMAT)
        self.writer = self.FORMAT
        self.unread = unread_in(path)
        self._held: dict[str, list[Held]] = {}
        with state_dict_of(str(path)):
            self._take(*self._flattened(path))

    def _flattened(self, path: Path) -> tuple[dict[str, Way], dict[str, Any]]:
        """Return the path to each entry by key, in the writer's order, and the values that are no tensors.

        The values are JSON.
        """
        ways: dict[str, Way] = {}
        values: dict[str, Any] = {}
        left_out: list[str] = []
        files, expected = files_of(path, SINGLE, INDEX)
        for archive in map(Archive, files):
            plain = Plain(archive, SMALL_BYTES)
            for way, value in leaves_of(_state_dict_of(archive), ()):
                key = ".".join(map(str, way))
                if key in ways:
                    raise Damaged(f"{archive.path} has {key} twice, under one name", path=str(archive.path))
                ways[key] = way
                if is_tensor(value):
                    self._held[key] = [(archive, _whole(archive, value, key))]
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
        kinds = {
            key: ShapeAndType(held[0][1].shape, held[0][1].tensor.storage.dtype)
            for key, held in self._held.items()
        }
        tied = self._tied(name_all(kinds, ways, values, self.path))
        named = name_all(
            {key: kind for key, kind in kinds.items() if key not in tied}, ways, values, self.path
        )
        rest = dict(values)
        for key, (name, slot) in named.tensors.items():
            stored = self._stored(TensorEntry(name, slot, *kinds[key]), self._held[key])
            add_or_tell(self, key, stored, rest)
        self.unnested = {
            slot for key, way in ways.items() if (slot := _unnested(key, way, named)) is not None
        }
        self.aliases = {named.name_in_model(alias): named.tensors[key][0] for alias, key in tied.items()}
        ordered = {key: rest[key] for key in ways if key in rest}
        self.progress = progress_of(ordered, ways, named, self.path)
        check_progress({name: value for name, value in self.progress.items() if name != "extra"})

    def _tied(self, named: TensorRoles) -> dict[str, str]:
        """Return the tied tensors of the model: by key, the key of the first tensor with the same memory."""
        first: dict[str, str] = {}  # keys are texts: a file's writer could choose colliding hashes of numbers
        tied = {}
        for key, held in self._held.items():
            of_model = key in named.tensors and named.tensors[key][1] in ("param", "buffer")
            where = " ".join(f"{archive.path} {local.tensor}" for archive, local in held)
            if of_model and (known := first.setdefault(where, key)) != key:
                tied[key] = known
        return tied

    def _stored(self, atom: TensorEntry, held: list[Held]) -> SourceTensor:
        """Return the tensor that ``held`` make up. What several hold alike becomes a copy.

        Raises ``Damaged`` if more ranks hold one region than another.
        """
        regions: defaultdict[str, list[Fragments]] = defaultdict(list)
        rank = len(atom.shape)
        for archive, local in held:
            number = archive.part_in(self, local.tensor.storage)
            check_inside(atom.key, local.tensor, self.parts[number])
            if local.held.elements:
                pieces = Fragments.of([piece_of(local.tensor, number)], rank)
                regions[str(local.held)].append(pieces.moved(local.held.start))
        counts = {len(copies) for copies in regions.values()}
        if len(counts) > 1:
            raise Damaged(
                f"{self.path}: some regions of {atom.key} are held by {min(counts)} ranks, and others by {max(counts)}:"
                " a file is missing, or of another save",
                path=self.path,
                atoms=(atom.key,),
            )
        first, *others = [joined(each, rank) for each in zip(*regions.values(), strict=True)] or [
            joined((), rank)
        ]
        return SourceTensor(atom, first, tuple(others))


def is_tensor(value: Any) -> bool:
    """Return whether ``value`` of a pickle is a tensor, distributed or not."""
    return isinstance(value, Tensor) or is_distributed(value)


def local_of(value: Any, key: str, meshes: Meshes) -> LocalTensor:
    """Return what a file has of the tensor ``key``, distributed or not.

    Raises ``ValueError`` or ``BadInput`` as ``local_tensor``.
    """
    return LocalTensor.whole(value) if isinstance(value, Tensor) else local_tensor(value, key, meshes)


def _whole(archive: Archive, value: Any, key: str) -> LocalTensor:
    """Return the tensor ``key``, of which the file must have everything. Raises ``BadInput`` for one rank's part."""
    local = local_of(value, key, {})
    if not local.is_whole:
        raise BadInput(
            f"{archive.path} holds a part of {key} {list(local.shape)}, as one of {local.last + 1} ranks wrote it. Name"
            " the folder with the files of all ranks, called as accelerate or verl call them, or save full tensors."
        )
    return local


def _state_dict_of(archive: Archive) -> dict[Any, Any]:
    if not isinstance(archive.content, dict):
        kind = type(archive.content).__name__.lower()
        raise BadInput(
            f"{archive.path} holds a {kind} and no state dict. Save model.state_dict(), or a dictionary of that and"
            " optimizer.state_dict()."
        )
    return archive.content


class _Place(int):
    """A position in a list, as opposed to a key of a dictionary."""


def _unnested(key: str, way: Way, named: TensorRoles) -> str | None:
    """Return the slot of optimizer state whose dictionaries have keys that are no names; None for other entries.

    The joined name of such a slot does not tell which keys they were.
    """
    _, slot = state_of(key, way, named.optimizers) or ("", "")
    inside = next((way[i:] for i in range(len(way)) if ".".join(map(str, way[i:])) == slot), ())
    names = [part for part in inside if not isinstance(part, _Place)]
    plain = all(isinstance(name, str) and "." not in name for name in names)
    return None if plain and not any(name.isdecimal() for name in names if name != inside[0]) else slot


def leaves_of(value: Any, way: Way) -> Iterator[tuple[Way, Any]]:
    """Yield tensors, and values that contain none, each with the names on the path to it."""
    if isinstance(value, dict) and value and not isinstance(value, Counter):
        for name, inner in _by_name(value).items():
            yield from leaves_of(inner, way if name == QUANTISED else (*way, name))
    elif isinstance(value, list | tuple) and any(isinstance(each, dict) or is_tensor(each) for each in value):
        for place, inner in enumerate(value):
            yield from leaves_of(inner, (*way, _Place(place)))
    else:
        for part, inner in quantised_parts(value).items():
            yield (*way, part), inner
        yield way, value


def _by_name(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's state dict by parameter names, if it stores names; any other dictionary unchanged."""
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
