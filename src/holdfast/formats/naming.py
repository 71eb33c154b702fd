"""The translation between the tensors of a folder and those of its model, in both directions.

Folders and models name some tensors differently, and a mixture of experts is stored one expert at a time where its
model holds all of a layer in one tensor. The translation itself is transformers' own (its weight conversions). It is
applied here to one group of tensors at a time, as they are read: nothing is converted before it is requested.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..errors import Damaged
from ..state.layout.fragments import Fragments, dense
from ..state.layout.regions import Region
from ..state.plain_tensors import FROM_NAME, TO_NAME, host_bytes
from ..state.tensor_entries import TensorEntry
from .load import read_bytes
from .restore import read_tensors
from .source import DerivedSource, Source, SourceTensor, StoredArray, places_of

_FUSED_SCALES = re.compile(r".+(?<!\.weight)_scale_inv")
"""The names of the scales of weights in fp8 that are converted, as those of experts are."""
KEPT_GROUPS = 2
"""The number of groups whose converted tensors stay in memory.

Tensors of one group are requested one after the other.
"""


@dataclass
class Group:
    """Tensors that are converted together.

    ``first`` is one of their names afterwards. Without a converter, the group is one tensor under another name.
    """

    first: str
    converter: Any = None
    members: list[tuple[str, str]] = field(default_factory=list)
    """The pattern that each tensor matched, and its name, in the order of the conversion."""

    def identity(self) -> list[Any]:
        """Return a JSON description of the conversion and its inputs."""
        steps = [
            [
                type(each).__name__,
                {k: v for k, v in sorted(vars(each).items()) if isinstance(v, int | float | str)},
            ]
            for each in getattr(self.converter, "operations", ())
        ]
        return [self.first, self.members, steps]

    def convert(self, tensors: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Return the converted tensors by name, from ``tensors`` by name."""
        if self.converter is None:
            return {self.first: tensors[self.members[0][1]]}
        converter = deepcopy(self.converter)
        for pattern, name in self.members:
            converter.add_tensor(self.first, name, pattern, tensors[name])
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def by_model(source: Source, model: nn.Module, here: Mapping[str, Any]) -> Converted:
    """Return ``source``, a folder, under the names that ``model`` has for its parameters and buffers.

    ``here`` holds these names. Tensors that the model is known to ignore are left out. Raises ``Damaged`` if the
    folder's tensors do not make those of the model.
    """
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    groups: dict[str, Group] = {}
    for name, (new, pattern, converter) in _by_folder_name(source, model, here):
        if new in here or not any(re.search(each, name) for each in ignored):
            group = groups.setdefault(new, Group(new, converter))
            group.members.append((pattern or "", name))
    return Converted(source, groups.values(), model)


def names_by_model(source: Source, model: nn.Module, here: Mapping[str, Any]) -> dict[str, str]:
    """Return the name that ``model`` has for each tensor of ``source``, a folder, by the folder's name."""
    return {name: new for name, (new, _, _) in _by_folder_name(source, model, here)}


def _by_folder_name(
    source: Source, model: nn.Module, here: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, str | None, Any]]]:
    """Yield each name of a folder with the model's, the matched pattern, and the converter."""
    renamings, converters = _apart(_known(model))
    prefix = str(getattr(model, "base_model_prefix", ""))
    for name in _names(source):
        new, pattern, converter = _renamed(name, renamings, converters)
        new = _with_prefix(new, prefix, here)
        if new not in here and (as_it_is := _with_prefix(name, prefix, here)) in here:
            new, pattern, converter = as_it_is, None, None
        yield name, (new, pattern, converter)


def as_folder(source: Source, model: nn.Module) -> Converted:
    """Return ``source``, a state of ``model``, under the names of its folder.

    The state of the optimizer and the buffers that ``model`` makes itself are left out.
    """
    forward = [each for each in _known(model, add_legacy=False) if type(each).__name__ != "PrefixChange"]
    renamings, converters = _apart([each.reverse_transform() for each in reversed(forward)])
    groups: dict[str, Group] = {}
    made_by_model = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
    for name in _names(source):
        if name in made_by_model:
            continue
        new, pattern, converter = _converted(name, converters)
        if converter is None:
            new = _under(new, renamings)
        groups.setdefault(new, Group(new, converter)).members.append((pattern or "", name))
    return Converted(source, groups.values(), model, renamings)


class Converted(DerivedSource):
    """The tensors that ``groups`` of the tensors of ``source`` become.

    A tensor that only has another name is read where it lies. Of other groups, the whole group is read and converted
    when one of its tensors is requested, and kept for the next.
    """

    def __init__(self, source: Source, groups: Iterable[Group], model: Any, renamings: Any = ()) -> None:
        """Describe the resulting tensors without reading data.

        Raises ``Damaged`` if the tensors of a group do not fit together.
        """
        super().__init__(source)
        self._model, self._renamings = model, renamings
        self._by_name = {each.atom.name: each for each in source.atoms.values() if _is_weight(each)}
        self._of_part: list[tuple[Group, str]] = []
        self._groups = list(groups)
        self._made: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()
        self._lock = threading.Lock()
        for group in self._groups:
            self._add_group(group)

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors for a model that was wrapped or given adapters.

        Of two tensors that get one name, the first stays.
        """
        before, self.atoms = self.atoms, {}
        for stored in before.values():
            atom = replace(stored.atom, name=names.get(stored.atom.name, stored.atom.name))
            self.atoms.setdefault(atom.key, replace(stored, atom=atom))

    def copy(self, names: Mapping[str, Iterable[str]]) -> None:
        """Add tensors that a model holds a second time: the names of the original, by the name of its copy."""
        for name, originals in names.items():
            found = (self.atoms.get(f"{original}/param") for original in originals)
            if (stored := next(filter(None, found), None)) is not None:
                self.add(replace(stored, atom=replace(stored.atom, name=name)))

    def place(self, name: str) -> StoredArray | None:
        """Return the one array in which a parameter is stored as it is; None if it is converted or in several."""
        stored = self.atoms.get(f"{name}/param")
        if stored is None:
            return None
        group, _ = self._of_part[int(stored.pieces.part[0])]
        pieces = self._by_name[group.members[0][1]].pieces
        if group.converter is not None or len(pieces) != 1:
            return None
        array = self._source.parts[int(pieces.part[0])]
        return array if array.nbytes == stored.atom.nbytes else None

    def read(self, part: int, offset: int, into: memoryview) -> None:
        group, name = self._of_part[part]
        if group.converter is None:
            read_bytes(self._source, self._by_name[group.members[0][1]], offset, into)
            return
        with self._lock:
            tensor = self._converted(group)[name]
        into[:] = host_bytes(tensor)[offset : offset + len(into)].data

    def made_of(self, part: int) -> Iterable[SourceTensor]:
        return [self._by_name[name] for _, name in self._of_part[part][0].members]

    def identity(self) -> list[Any]:
        groups = [group.identity() for group in self._groups]
        return [self.progress, groups, places_of(self._by_name.values()), self._source.identity()]

    def _add_group(self, group: Group) -> None:
        slot = self._by_name[group.members[0][1]].atom.slot
        if group.converter is None:
            atom = self._by_name[group.members[0][1]].atom
            made = {group.first: (atom.shape, atom.dtype)}
        else:
            meta = {name: _empty(self._by_name[name].atom) for _, name in group.members}
            try:
                shapes = group.convert(meta, self._model)
            except (RuntimeError, ValueError, IndexError, KeyError) as error:
                raise Damaged(
                    f"{self.path}: the tensors that make {group.first} do not fit together: {error}",
                    path=self.path,
                ) from error
            made = {name: (tuple(each.shape), TO_NAME[each.dtype]) for name, each in shapes.items()}
        for name, (shape, dtype) in made.items():
            atom = TensorEntry(_under(name, self._renamings) if group.converter else name, slot, shape, dtype)
            part = self.add_part(StoredArray(self.path, 0, atom.nbytes, dtype))
            self._of_part.append((group, name))
            self.add(SourceTensor(atom, Fragments.of([dense(Region.whole(shape), part)], len(shape))))

    def _converted(self, group: Group) -> dict[str, torch.Tensor]:
        key = id(group)
        if key not in self._made:
            while len(self._made) >= KEPT_GROUPS:
                self._made.popitem(last=False)
            wanted = [self._by_name[name] for _, name in group.members]
            read = read_tensors(self._source, [(each, Region.whole(each.atom.shape)) for each in wanted])
            tensors = {name: tensor for (_, name), tensor in zip(group.members, read, strict=True)}
            del read
            made = group.convert(tensors, self._model)
            self._made[key] = {name: each.contiguous() for name, each in made.items()}
        return self._made[key]


def _names(source: Source) -> list[str]:
    """Return the names of parameters and buffers, with the numbers in them in numeric order.

    Experts are put together in that order.
    """
    names = [stored.atom.name for stored in source.atoms.values() if _is_weight(stored)]
    return sorted(
        names, key=lambda name: [(not p.isdigit(), int(p) if p.isdigit() else p) for p in name.split(".")]
    )


def _is_weight(stored: SourceTensor) -> bool:
    return stored.atom.slot in ("param", "buffer")


def _empty(atom: TensorEntry) -> torch.Tensor:
    return torch.empty(atom.shape, dtype=FROM_NAME[atom.dtype], device="meta")


def _known(model: Any, **options: Any) -> list[Any]:
    """Return the weight conversions that transformers knows for folders of ``model``.

    Where the model has scales beside fused weights, each conversion of weights is one of their scales too.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = get_model_conversion_mapping(model, **options)
    if not any(_FUSED_SCALES.fullmatch(name) for name, _ in model.named_parameters()):
        return known
    end, made = "_scale_inv", []
    every: list[Any] = [one for one in known if hasattr(one, "operations")]
    for each in every:
        sources, targets = each._original_source_patterns, each._original_target_patterns
        if all(source.endswith(".weight") for source in sources):
            new = [source + end for source in sources], [target + end for target in targets]
            made.append(each.copy(*new, operations=[*each.operations]))
    return known + made


def _apart(transforms: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the transforms that rename, and those that convert."""
    converts = [hasattr(each, "operations") for each in transforms]
    pairs = list(zip(transforms, converts, strict=True))
    return [each for each, yes in pairs if not yes], [each for each, yes in pairs if yes]


def _renamed(name: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None, Any]:
    return _converted(_under(name, renamings), converters)


def _under(name: str, renamings: Iterable[Any]) -> str:
    for each in renamings:
        name, _ = each.rename_source_key(name)
    return name


def _converted(name: str, converters: list[Any]) -> tuple[str, str | None, Any]:
    """Return the name after the one converter that accepts ``name``, the matched pattern, and the converter."""
    for each in converters:
        new, pattern = each.rename_source_key(name)
        if pattern is not None:
            return new, pattern, each
    return name, None, None


def _with_prefix(name: str, prefix: str, here: Mapping[str, Any]) -> str:
    """Return ``name`` with or without the prefix of the model below its head, whichever ``here`` has."""
    for each in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if each in here:
            return each
    return name
