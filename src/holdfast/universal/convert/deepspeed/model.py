"""The model states: what a checkpoint says of the model, its buffers, and the parameters that are not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import Damaged
from ....state.atoms import Atom
from ....state.pieces import Piece, Pieces, flat
from ...archives import Archive, piece_of
from ...pickles import Tensor
from ...source import Files, Stored
from . import zero3
from .local import Shape, elements, shapes_of


class ModelStates:
    """The file of a rank's model states: its tensors are in ``module``."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.content: dict[str, Any] = archive.content
        module = self.content.get("module")
        if not isinstance(module, dict):
            raise Damaged(f"{archive.path} has no module", path=str(archive.path))
        self.module: dict[str, Any] = module
        self.buffers = set(self.content.get("buffer_names") or ())
        self.aliases: dict[str, str] = dict(self.content.get("shared_params") or {})
        self._parts: dict[str, int] = {}

    def holds(self, key: str) -> bool:
        """Whether the module has all of the parameter: ZeRO-3 leaves it empty."""
        tensor = self.module.get(key)
        return isinstance(tensor, Tensor) and elements(tensor.shape) > 0

    @property
    def names(self) -> set[str]:
        """Of all that is in the model, under each of its names."""
        return {*self.module, *self.aliases, *(self.content.get("frozen_param_shapes") or ())}

    def add(self, contents: Files, key: str, name: str, slot: str) -> None:
        """The tensor ``key`` of the module, as the atom ``name``."""
        tensor = self.module[key]
        part = self.part(contents, tensor)
        atom = Atom(name, slot, tensor.shape, tensor.storage.dtype)
        contents.add(Stored(atom, Pieces.of([piece_of(tensor, part)], len(tensor.shape))))

    def part(self, contents: Files, tensor: Tensor) -> int:
        key = tensor.storage.key
        if key not in self._parts:
            self._parts[key] = contents.add_part(self.archive.part(tensor.storage))
        return self._parts[key]


def add_model(
    contents: Files, models: list[ModelStates], trained: set[str], names: Mapping[str, str], partitioned: bool
) -> None:
    """Buffers, and parameters that are not ``trained``, of which ZeRO-3 has given each rank's file (``partitioned``) a
    part. ``names`` are those of the atoms."""
    first = models[0]
    frozen = shapes_of([first.content.get("frozen_param_shapes") or {}], first.archive.path)[0]
    for key, tensor in first.module.items():
        if not isinstance(tensor, Tensor) or key in trained or key in first.aliases:
            continue
        if key in first.buffers:
            first.add(contents, key, names[key], "buffer")
        elif not partitioned:
            first.add(contents, key, names[key], "param")
        elif key not in frozen:
            raise Damaged(
                f"{first.archive.path}: the model has {key}, of which it says neither that it is trained nor that it"
                " is frozen",
                path=str(first.archive.path),
            )
    for name, shape in frozen.items() if partitioned else ():
        _add_frozen(contents, models, name, names[name], shape)


def _add_frozen(contents: Files, models: list[ModelStates], key: str, name: str, shape: Shape) -> None:
    """A frozen parameter of ZeRO-3, cut as those that are trained."""
    pieces: list[Piece] = []
    dtype = ""
    for rank, model in enumerate(models):
        fragment = (model.content.get("frozen_param_fragments") or {}).get(key)
        low, high = zero3.cut(elements(shape), rank, len(models))
        if not isinstance(fragment, Tensor) or fragment.strides != (1,) or fragment.shape[0] < high - low:
            raise Damaged(
                f"{model.archive.path} has no fragment of {high - low} elements of the frozen parameter {key}",
                path=str(model.archive.path),
            )
        dtype = fragment.storage.dtype
        pieces += flat(shape, low, high, model.part(contents, fragment), fragment.offset)
    contents.add(Stored(Atom(name, "param", shape, dtype), Pieces.of(pieces, len(shape))))


def check_models(models: list[ModelStates]) -> None:
    for key in (
        "global_steps",
        "skipped_steps",
        "dp_world_size",
        "param_shapes",
        "frozen_param_shapes",
        "ds_version",
    ):
        for model in models[1:]:
            if model.content.get(key) != models[0].content.get(key):
                raise Damaged(
                    f"{model.archive.path}: {key} is not what it is in {models[0].archive.path.name}: the files are of"
                    " two checkpoints. Take all of them from one.",
                    path=str(model.archive.path),
                )
