"""Readers of what Megatron saves into folders of ``torch.distributed.checkpoint``: ``torch_dist`` and ``fsdp_dtensor``.

``torch_dist``, by Megatron's core: tensors are in the global coordinates of the model; the shards of tensor, pipeline
and expert parallel ranks are chunks. ``param`` is the fp32 master where there is one; the 16-bit parameter made from it
is checked and not used.

``fsdp_dtensor``, by Megatron-FSDP: names begin with the wrappers (``module.module.``). A gated first layer of an MLP is
two tensors, ``_w`` before ``_v``. The hyper-parameters of a group, with its step, are stored for each parameter
(``param_to_group_meta``). The layout is that of Megatron's published code; the tests write it themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ...errors import BadInput, Damaged, FileMissing, HoldfastError
from ...quantities import counted
from ...state.encoding import encode
from ...state.layout.fragments import Fragment, Fragments, dense, flat, joined
from ...state.layout.regions import Region
from ...state.tensor_entries import TensorEntry
from ..dcp.dcp_reader import METADATA, Chunk, Claims, DcpEntry, DcpFolder, Entries, Shards, Values
from ..entry_keys import EXTRA, ShapeAndType, slot_of
from ..source import Source, SourceTensor
from .megatron_contents import (
    COMMON,
    CONFIG,
    CommonState,
    Groups,
    IntegrityFile,
    check_objects,
    folder_of,
    is_flat,
    named,
    newest_of,
    numbers_of,
    unstacked,
)
from .optimizer_buffers import Buffers, ModelTensor

States = dict[str, dict[str, ModelTensor]]
"""Optimizer state by name and slot."""


def open_megatron(path: Path) -> Source:
    """Open the checkpoint at ``path``: the folder of an iteration, or its parent, which names the newest one.

    Raises ``Damaged`` if it is incomplete or damaged, ``BadInput`` for unsupported checkpoints.
    """
    newest = newest_of(path)
    of_fsdp = is_fsdp_dtensor(newest)
    folder = newest if of_fsdp else folder_of(newest)
    try:
        return FsdpDtensor(folder) if of_fsdp else TorchDist(folder)
    except HoldfastError:
        raise
    except (AttributeError, TypeError, LookupError, ValueError, OverflowError, RecursionError) as error:
        raise Damaged(
            f"{folder} has what no checkpoint of Megatron has: {type(error).__name__}: {error}",
            path=str(folder),
        ) from error


class TorchDist(Entries):
    """The folder ``path`` of an iteration."""

    def __init__(self, path: Path) -> None:
        """Read the checkpoint. Raises ``Damaged`` if it is incomplete or damaged."""
        super().__init__(str(path), "megatron")
        self._sums, self._buffers = IntegrityFile(path), Buffers()
        for name in (CONFIG, METADATA, COMMON):
            self._sums.check(str(path / name))
        common, claims = CommonState(path / COMMON), Claims(path)
        self.numbers = numbers_of(common.arguments)
        ranks = common.arguments.get("world_size")
        self.writer = "Megatron" + (f", {counted(ranks, 'rank')}" if isinstance(ranks, int) else "")
        check_objects(list(claims.values), str(path / METADATA))
        objects = self._objects(claims)
        weights, states = self._tensors_of(claims)
        self.progress = common.progress(objects)
        if self._buffers.held:
            states |= self._from_buffers(weights, common.arguments)
        self._add_all(weights, states)
        held = [value for key, value in objects.items() if is_flat(key)]
        self._say_of_groups(Groups([common.content.get("optimizer"), *held]), list(states))

    def read(self, part: int, offset: int, into: memoryview) -> None:
        self._check_file(part)
        super().read(part, offset, into)

    def check(self, part: int) -> None:
        self._check_file(part)
        super().check(part)

    def _check_file(self, part: int) -> None:
        if path := self.parts[part].path:
            self._sums.check(path)

    def _objects(self, claims: Claims) -> dict[str, Any]:
        """Return the objects of ranks that are no tensors, by key; gathered optimizer state goes to the buffers."""
        values, found = Values(), dict[str, Any]()
        for key, entry in claims.values.items():
            self._sums.check(str(entry.path))
            if self._gathered(key, entry):
                continue
            value = values.read(key, entry)
            found[key] = value[0] if isinstance(value, list) and len(value) == 1 else value
            self._buffers.add_sizes(key, found[key])
        return found

    def _gathered(self, key: str, entry: DcpEntry) -> bool:
        if not is_flat(key) or "param_state" not in key:
            return False
        return self._buffers.add_object(key, entry.archive(), self)

    def _tensors_of(self, claims: Claims) -> tuple[dict[str, ModelTensor], States]:
        """Return the tensors of the model by name, and those of its optimizer."""
        found: dict[tuple[str, str | None], ModelTensor] = {}
        for key, shards in claims.tensors.items():
            whole = ModelTensor(shards.kind, self.add_shards(key, shards))
            if (shape := claims.original_shapes.get(key)) is not None:
                whole = ModelTensor(ShapeAndType(shape, whole.kind.dtype), _unflattened(key, whole, shape))
            if is_flat(key):
                self._buffers.add_tensor(key, whole)
                continue
            name, slot = named(key)
            self.check_cover(SourceTensor(TensorEntry(name, slot or "param", *whole.kind), whole.pieces))
            for single, place in unstacked(name, whole.kind.shape):
                if (single, slot) in found:
                    raise Damaged(
                        f"{self.path} has {single} ({slot or 'of the model'}) twice", path=self.path
                    )
                found[single, slot] = _sliced(whole, place)
        _join_halves(found)
        states: States = {}
        for (name, slot), whole in found.items():
            if slot is not None:
                states.setdefault(name, {})[slot] = whole
        return {name: whole for (name, slot), whole in found.items() if slot is None}, states

    def _from_buffers(self, weights: Mapping[str, ModelTensor], arguments: Mapping[str, Any]) -> States:
        """Return the optimizer state in the buffers.

        If their content is unknown, the buffers are kept as extra tensors and the progress says why.
        """
        try:
            return self._buffers.states(self, weights, arguments)
        except BadInput as error:
            for name, whole in self._buffers.held.items():
                self.add(SourceTensor(TensorEntry(name, EXTRA, *whole.kind), whole.pieces))
            self.progress["extra"]["optimizer_is_not_known"] = str(error)
            return {}

    def _add_all(self, weights: Mapping[str, ModelTensor], states: States) -> None:
        for name, slots in states.items():
            for slot, whole in slots.items():
                self.add(SourceTensor(TensorEntry(name, slot, *whole.kind), whole.pieces, whole.copies))
        for name, whole in weights.items():
            slot = "param" if name in states else slot_of(name, whole.kind)
            if "param" not in states.get(name, {}):
                self.add(SourceTensor(TensorEntry(name, slot, *whole.kind), whole.pieces))

    def _say_of_groups(self, groups: Groups, trained: list[str]) -> None:
        """Add hyper-parameters and step counts; Megatron counts steps by parameter group, this library by parameter.

        Raises ``Damaged`` if groups differ in their step.
        """
        if len(groups.steps) > 1:
            raise Damaged(
                f"{self.path}: its parameter groups are {' and '.join(map(str, sorted(groups.steps)))} steps old, and"
                " which parameters are in which is not stored",
                path=self.path,
            )
        for step in groups.steps:
            for name in trained:
                if f"{name}/step" not in self.atoms:
                    scalar = Fragments.of([dense(Region((), ()), self.add_number(step))], 0)
                    self.add(SourceTensor(TensorEntry(name, "step", (), "F32"), scalar))
        if groups.groups and trained:
            self.progress["groups"] = [encode(groups.common(), "param_groups")]
            self.progress["group_parameters"] = [trained]


def _unflattened(key: str, whole: ModelTensor, shape: tuple[int, ...]) -> Fragments:
    """Return the fragments of a tensor of ``shape`` that was divided into a grid whose cells were flattened.

    Its stored axes count the cells; the last axis counts the elements of a cell.
    """
    stored = whole.kind.shape
    fits = len(stored) == len(shape) + 1 and all(
        n and size % n == 0 for n, size in zip(stored, shape, strict=False)
    )
    cell = tuple(size // n for n, size in zip(stored, shape, strict=False)) if fits else ()
    if not fits or prod(cell) != stored[-1]:
        raise Damaged(f"{key} {list(shape)} is stored as {list(stored)}, which is no grid of flattened cells")
    found: list[Fragment] = []
    for piece in whole.pieces:
        if any(n != 1 for n in piece.box.shape[:-1]):
            raise Damaged(f"a chunk of {key} goes over several cells of its grid: {piece.box.to_json()}")
        corner = tuple(at * n for at, n in zip(piece.box.start, cell, strict=False))
        start, stop = piece.box.start[-1], piece.box.stop[-1]
        inside = flat(cell, start, stop, piece.part, piece.offset)
        found += [each._replace(box=each.box.moved(corner)) for each in inside]
    return Fragments.of(found, len(shape))


def _sliced(whole: ModelTensor, place: tuple[int, ...]) -> ModelTensor:
    """Return the slice of ``whole`` at ``place`` along the first axes."""
    pieces = whole.pieces
    for index in place:
        pieces = pieces.sliced(index)
    return ModelTensor(ShapeAndType(whole.kind.shape[len(place) :], whole.kind.dtype), pieces)


def _join_halves(found: dict[tuple[str, str | None], ModelTensor]) -> None:
    """Join gate and up projections (``weight_w`` and ``weight_v``), which some checkpoints store apart."""
    for name, slot in list(found):
        plain, other = name.removesuffix("_w"), (name.removesuffix("_w") + "_v", slot)
        if plain == name or other not in found:
            continue
        first, second = found.pop((name, slot)), found.pop(other)
        if first.kind != second.kind:
            raise Damaged(f"{name} and {other[0]} are the halves of one, and {first.kind} and {second.kind}")
        length, *rest = first.kind.shape
        pieces = [first.pieces, second.pieces.moved([length, *(0 for _ in rest)])]
        kind = ShapeAndType((2 * length, *rest), first.kind.dtype)
        found[plain, slot] = ModelTensor(kind, joined(pieces, len(kind.shape)))


_META, _GROUPS = "param_to_group_meta", "param_groups"
_HALF = re.compile(r"(?P<name>.*\.linear_fc1\.(?:weight|bias)\d*)_(?P<half>[wv])(?P<rest>(?:\..*)?)")


def is_fsdp_dtensor(folder: Path) -> bool:
    """Return whether the folder of an iteration has a DCP checkpoint alone, as Megatron-FSDP writes it."""
    return (folder / METADATA).is_file() and not any((folder / name).exists() for name in (CONFIG, COMMON))


class FsdpDtensor(DcpFolder):
    """The folder of an iteration."""

    def _take(self, claims: Claims, rest: dict[str, Any]) -> None:
        if not any(key.startswith("model.") for key in claims.tensors):
            raise FileMissing(
                f"{self.path} has no model as Megatron-FSDP saves it; as torch_dist it lacks {CONFIG} and {COMMON}:"
                " the save was not finished",
                path=str(Path(self.path) / CONFIG),
            )
        self.writer = f"Megatron (fsdp_dtensor), {self.writer}"
        paths = {key: tuple(map(_plain, way)) for key, way in claims.paths.items()}
        names = {key: ".".join(map(str, way)) for key, way in paths.items()}
        values = {_whole(names[key]): value for key, value in rest.items()}
        if odd := [key for key, value in rest.items() if values[_whole(names[key])] != value]:
            raise Damaged(f"{self.path}: {odd[0]} is not that of the other half", path=self.path)
        claims.tensors = self._joined({names[key]: shards for key, shards in claims.tensors.items()})
        claims.paths = {
            _whole(names[key]): tuple(_whole(each) if isinstance(each, str) else each for each in way)
            for key, way in paths.items()
        }
        super()._take(claims, values)
        self._add_steps()

    def _joined(self, tensors: dict[str, Shards]) -> dict[str, Shards]:
        """Return ``tensors`` with both halves of a gated layer as one. Raises ``Damaged`` if one is missing."""
        found: dict[str, Shards] = {}
        for key, shards in tensors.items():
            half = _HALF.fullmatch(key)
            if half is None:
                found[key] = shards
                continue
            pair = [tensors.get(f"{half['name']}_{which}{half['rest']}") for which in "wv"]
            first, second = pair
            if first is None or second is None or first.kind != second.kind:
                raise Damaged(
                    f"{self.path}: {key} lacks its other half, or has another shape", path=self.path
                )
            if not first.kind.shape:
                found.setdefault(_whole(key), first)
                continue
            rows, *others = first.kind.shape
            by = (rows, *[0] * len(others))
            moved = (Chunk(chunk.box.moved(by), chunk.entry) for chunk in second.chunks)
            kind = ShapeAndType((2 * rows, *others), first.kind.dtype)
            found[_whole(key)] = Shards(kind, (*first.chunks, *moved))
        return found

    def _add_steps(self) -> None:
        """Add the step of each group as that of its parameters, as torch's optimizers keep it."""
        progress = self.progress
        for group, names in zip(
            progress.get("groups", []), progress.get("group_parameters", []), strict=False
        ):
            for name in names if type(group.get("step")) is int else ():
                if f"{name}/exp_avg" in self.atoms and f"{name}/step" not in self.atoms:
                    scalar = Fragments.of([dense(Region((), ()), self.add_number(group["step"]))], 0)
                    self.add(SourceTensor(TensorEntry(name, "step", (), "F32"), scalar))


def _plain(name: Any) -> Any:
    """Return a name on the path to an entry without the wrappers in front, and that of the groups as torch has it."""
    if name == _META:
        return _GROUPS
    while isinstance(name, str) and name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _whole(key: str) -> str:
    """Return ``key`` of a half as that of the whole; any other unchanged."""
    half = _HALF.fullmatch(key)
    return key if half is None else f"{half['name']}{half['rest']}"
