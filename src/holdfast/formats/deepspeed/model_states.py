"""Model states of a checkpoint: facts about the model, its buffers, and parameters that are not trained."""

from __future__ import annotations

from math import prod
from typing import Any

from ...errors import Damaged
from ...state.layout.fragments import flat
from ...state.layout.zero_shares import cut
from ..fragment_reads import ReadFiles
from ..torch_archive.archives import Archive, piece_of
from ..torch_archive.pickles import Tensor
from .deepspeed_folder import need
from .local_tensors import LocalParameter, Shape, shapes_of


class ModelStates:
    """The model states file of one rank; its tensors are in ``module``."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.content: dict[str, Any] = archive.content
        need(self.content, "global_steps", archive.path)
        self.module: dict[str, Any] = self.content.get("module") or {}
        """The module's state dict; empty for a pipeline, whose layers have files of their own."""
        self.buffers = set(self.content.get("buffer_names") or ())
        self.aliases: dict[str, str] = dict(self.content.get("shared_params") or {})
        self._parts: dict[str, int] = {}

    def holds(self, key: str) -> bool:
        """Return whether the module holds the whole parameter; ZeRO-3 leaves it empty."""
        tensor = self.module.get(key)
        return isinstance(tensor, Tensor) and prod(tensor.shape) > 0

    @property
    def names(self) -> set[str]:
        """All names of tensors in the model, aliases included."""
        return {*self.module, *self.aliases, *(self.content.get("frozen_param_shapes") or ())}

    def local(self, contents: ReadFiles, key: str, slot: str) -> LocalParameter:
        """Return the tensor ``key`` of the module."""
        tensor = self.module[key]
        local = LocalParameter(tensor.shape, -1)
        local.add(
            slot, tensor.storage.dtype, [piece_of(tensor, self.part(contents, tensor))], self.archive.path
        )
        return local

    def part(self, contents: ReadFiles, tensor: Tensor) -> int:
        key = tensor.storage.key
        if key not in self._parts:
            self._parts[key] = contents.add_part(self.archive.part(tensor.storage))
        return self._parts[key]


def beside(
    contents: ReadFiles, models: list[ModelStates], trained: set[str], partitioned: bool
) -> dict[str, LocalParameter]:
    """Return buffers and parameters that are not ``trained``.

    With ``partitioned`` (ZeRO-3), such a parameter is divided over the files of the data-parallel ranks.
    """
    first, found = models[0], dict[str, LocalParameter]()
    frozen = shapes_of([first.content.get("frozen_param_shapes") or {}], first.archive.path)[0]
    for key, tensor in first.module.items():
        if not isinstance(tensor, Tensor) or key in trained or key in first.aliases:
            continue
        if key in first.buffers or not partitioned:
            found[key] = first.local(contents, key, "buffer" if key in first.buffers else "param")
        elif key not in frozen:
            raise Damaged(
                f"{first.archive.path}: the model has {key}, of which it says neither that it is trained nor that it"
                " is frozen",
                path=str(first.archive.path),
            )
    return found | {key: _frozen(contents, models, key, frozen[key]) for key in frozen if partitioned}


def _frozen(contents: ReadFiles, models: list[ModelStates], key: str, shape: Shape) -> LocalParameter:
    """Return a frozen parameter of ZeRO-3, which is divided as trained ones are."""
    local = LocalParameter(shape, -1)
    for rank, model in enumerate(models):
        fragment = (model.content.get("frozen_param_fragments") or {}).get(key)
        low, high = cut(prod(shape), rank, len(models))
        if not isinstance(fragment, Tensor) or fragment.strides != (1,) or fragment.shape[0] < high - low:
            raise Damaged(
                f"{model.archive.path} has no fragment of {high - low} elements of the frozen parameter {key}",
                path=str(model.archive.path),
            )
        pieces = flat(shape, low, high, model.part(contents, fragment), fragment.offset)
        local.add("param", fragment.storage.dtype, pieces, model.archive.path)
    return local


SAME = ("global_steps", "skipped_steps", "dp_world_size", "mp_world_size", "ds_version")


def check_models(models: list[ModelStates], beside: tuple[str, ...] = ()) -> None:
    """Raise ``Damaged`` unless all model states agree in the keys of ``SAME`` and of ``beside``."""
    for key in (*SAME, *beside):
        for model in models[1:]:
            if model.content.get(key) != models[0].content.get(key):
                raise Damaged(
                    f"{model.archive.path}: {key} is not what it is in {models[0].archive.path.name}: the files are of"
                    " two checkpoints. Take all of them from one.",
                    path=str(model.archive.path),
                )
