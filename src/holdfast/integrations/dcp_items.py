"""Items of a plan of ``torch.distributed.checkpoint`` as a run stores them: names, regions, values."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from ..errors import BadInput
from ..formats.entry_keys import KEY, ShapeAndType
from ..state.dtypes import TO_NAME
from ..state.encoding import encode
from ..state.layout.regions import Region
from ..state.plain_tensors import odd_kind
from ..state.tensor_entries import TensorEntry, fragment
from .shared.collective_commit import unit_of


class RunPlace:
    """The place of a reader or writer: the directory of a run."""

    def __init__(self, root: str | os.PathLike, step: int | None) -> None:
        self.root, self.step = os.fspath(root), step
        self.call_id = uuid4().hex
        """Identifies the saves, or the loads, since the last ``reset``."""

    @property
    def checkpoint_id(self) -> str:
        return self.root

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        self.root = os.fspath(checkpoint_id) if checkpoint_id else self.root
        self.call_id = uuid4().hex
        self._let_go()

    def _let_go(self) -> None:
        """Release what the last call had open."""
        raise NotImplementedError


@dataclass(frozen=True)
class SaveFacts:
    """The facts about a save that the first rank sends to each rank."""

    step: int
    timeline: dict[str, Any]
    rank: int
    names: dict[str, tuple[str, str]]
    """The name and the slot of each tensor that the rank writes, by key."""

    @property
    def unit(self) -> str:
        return unit_of(self.step, self.timeline["id"], self.rank)


class Resolved(dict[str, torch.Tensor]):
    """Tensors by their names in the file, requested from the planner when they are needed."""

    def __init__(self, items: dict[str, WriteItem], planner: SavePlanner) -> None:
        self._items, self._planner = items, planner

    def __missing__(self, key: str) -> torch.Tensor:
        item = self._items[key]
        tensor = self._planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        kind = "on meta, without values" if tensor.is_meta else odd_kind(tensor)
        if kind is not None:
            raise BadInput(
                f"{item.index.fqn} is {kind}, and commits hold plain tensors. Save what it is made of, or leave it out."
            )
        if (tuple(tensor.shape), TO_NAME.get(tensor.dtype)) != (box_of(item).shape, kind_of(item).dtype):
            raise BadInput(
                f"{item.index.fqn} is {list(tensor.shape)} of {tensor.dtype} by now, and was planned to be"
                f" {list(box_of(item).shape)} of {kind_of(item).dtype}: it was changed while it was saved"
            )
        return tensor.detach().resolve_conj().resolve_neg()


def value_of(planner: SavePlanner, item: WriteItem) -> Any:
    """Return a value that is no tensor, as JSON. Raises ``BadInput``, which names it."""
    key = item.index.fqn
    look_up = getattr(planner, "lookup_object", None)
    if look_up is not None:
        return encode(look_up(item.index), key)
    data: Any = planner.resolve_data(item)
    data.seek(0)
    try:
        value = torch.load(data, weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadInput(
            f"{key} is no data that torch.load(weights_only=True) takes, as which this planner gives it: {error}"
        ) from error
    return encode(value, key)


def index_of(save: SaveFacts, items: list[WriteItem], tensors: dict[str, WriteItem]) -> dict[str, Any]:
    atoms: dict[str, Any] = {}
    for item in items:
        if item.tensor_data is None:
            continue
        name, slot = save.names[item.index.fqn]
        atom = TensorEntry(name, slot, *kind_of(item))
        atoms[atom.key] = atom.to_json() | {KEY: item.index.fqn, "fragments": []}
    for key, item in tensors.items():
        name, slot = save.names[item.index.fqn]
        atoms[f"{name}/{slot}"]["fragments"].append(fragment(save.unit, key, box_of(item)))
    return {"version": 1, "units": [save.unit], "atoms": atoms}


def kind_of(item: WriteItem) -> ShapeAndType:
    assert item.tensor_data is not None
    dtype, layout = item.tensor_data.properties.dtype, item.tensor_data.properties.layout
    if layout != torch.strided:
        raise BadInput(
            f"{item.index.fqn} is {layout}, and commits hold dense tensors. Save it with .to_dense(), or leave it out."
        )
    if dtype not in TO_NAME:
        raise BadInput(
            f"{item.index.fqn} is of {dtype}, which commits do not hold. Convert it, or leave it out."
        )
    return ShapeAndType(tuple(item.tensor_data.size), TO_NAME[dtype])


def box_of(item: WriteItem) -> Region:
    """Return the region of ``item`` in its tensor."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Region(tuple(chunk.offsets), tuple(a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True)))


def name_of(save: SaveFacts, item: WriteItem) -> str:
    """Return the name of ``item`` in the file: that of its tensor entry, and where the region begins."""
    name, slot = save.names[item.index.fqn]
    start = ",".join(map(str, box_of(item).start))
    return f"{name}/{slot}@{start}"


def nbytes_of(item: WriteItem) -> int:
    return (
        0 if item.tensor_data is None else box_of(item).elements * item.tensor_data.properties.dtype.itemsize
    )
