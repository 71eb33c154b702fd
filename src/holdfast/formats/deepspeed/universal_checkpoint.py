"""Reader of universal folders, as DeepSpeed's converter makes them: a folder for each parameter, a file for each slot.

For a ZeRO-3 checkpoint the converter writes flat tensors; their shapes are in the model states, which it copies. Files
that it writes for buffers, tied weights and frozen parameters (as fp32, if at all) are not read: the model states hold
those tensors.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from ...errors import BadInput, Damaged, FileMissing
from ...state.layout.fragments import Fragments, dense
from ...state.layout.regions import Region
from ...state.tensor_entries import TensorEntry
from ..fragment_reads import WithNumbers
from ..source import SourceTensor
from ..torch_archive.archives import Archive, piece_of
from ..torch_archive.pickles import Tensor
from .deepspeed_contents import (
    Folder,
    ModelStates,
    Names,
    add_parameter,
    beside,
    check_models,
    check_ranks,
    files_of,
    need,
    opened,
    others_of,
    progress_of,
    writer_of,
)
from .local_tensors import Info, Shape, shapes_of

_SLOTS = {"fp32": "param"}


class UniversalCheckpoint(WithNumbers):
    """The universal folder ``path``, that of a tag."""

    def __init__(self, path: Path) -> None:
        """Read the folder.

        Raises ``FileMissing`` and ``Damaged``, which name the file, and ``BadInput`` for unsupported folders.
        """
        super().__init__(str(path), "deepspeed universal")
        folder = files_of(path)
        models = _models(folder)
        first = models[0]
        shapes = shapes_of(need(first.content, "param_shapes", first.archive.path), first.archive.path)
        common = Archive(path / "zero" / "optimizer_state.pt")
        groups = need(common.content, "param_groups", common.path)
        trained = [name for named in shapes for name in named]
        names = Names({*trained, *first.names})
        self.writer = f"{writer_of(first)}, or holdfast for it"
        self.progress = progress_of(first, others_of(common.content), groups)
        self.progress["group_parameters"] = _members(shapes, groups, names)
        for named in shapes:
            self._add_group(path / "zero", named, names, common)
        self.aliases = {names[alias]: names[name] for alias, name in first.aliases.items()}
        info = Info(None, 1, first.archive.path)
        for key, local in beside(self, models, set(trained), folder.partitioned).items():
            add_parameter(self, names[key], info.join(key, [local]))

    def _add_group(self, root: Path, named: dict[str, Shape], names: Names, common: Archive) -> None:
        """Add parameters of one group, which must all have the same slots."""
        slots: set[str] | None = None
        for name, shape in named.items():
            if "/" in name:
                raise Damaged(f"{root.parent}: {name} cannot be the name of a folder", path=str(root.parent))
            folder = root / name
            found = (
                {file.stem for file in folder.iterdir() if file.suffix == ".pt"} if folder.is_dir() else set()
            )
            slots = found if slots is None else slots
            if "fp32" not in found or found != slots:
                missing = sorted((slots | {"fp32"}) - found) or sorted(found - slots)
                raise FileMissing(
                    f"{folder / missing[0]}.pt is missing, or is there for {name} alone of its group: the conversion"
                    " was not finished, or files were lost. Convert the checkpoint again.",
                    path=str(folder),
                )
            for slot in sorted(found):
                self._add_slot(_archive(folder / f"{slot}.pt"), names[name], _SLOTS.get(slot, slot), shape)
            if "step" not in found and (step := _common_step(common)) is not None:
                self._add_step(common, step, names[name])

    def _add_slot(self, archive: Archive, name: str, slot: str, shape: Shape) -> None:
        content = archive.content
        tensor = content.get("param") if isinstance(content, dict) else content
        if slot == "step":
            return self._add_step(archive, tensor, name)
        if not isinstance(tensor, Tensor):
            raise Damaged(f"{archive.path} has no tensor", path=str(archive.path))
        atom = TensorEntry(name, slot, shape, tensor.storage.dtype)
        if tensor.shape == (prod(shape),) and tensor.strides == (1,):
            piece = dense(Region.whole(shape), archive.part_in(self, tensor.storage), tensor.offset)
        elif tensor.shape == shape:
            piece = piece_of(tensor, archive.part_in(self, tensor.storage))
        else:
            raise Damaged(
                f"{archive.path} is {list(tensor.shape)}, and the model states say {list(shape)}",
                path=str(archive.path),
            )
        self.add(SourceTensor(atom, Fragments.of([piece], len(shape))))

    def _add_step(self, archive: Archive, step: Any, name: str) -> None:
        if isinstance(step, Tensor) and prod(step.shape) == 1:
            dtype, part, offset = step.storage.dtype, archive.part_in(self, step.storage), step.offset
        elif isinstance(step, int | float):
            dtype, part, offset = "F32", self.add_number(step), 0
        else:
            raise Damaged(f"{archive.path} has no count of steps", path=str(archive.path))
        self.add(
            SourceTensor(
                TensorEntry(name, "step", (), dtype), Fragments.of([dense(Region((), ()), part, offset)], 0)
            )
        )


def _models(folder: Folder) -> list[ModelStates]:
    """Open the model states, in the order of their ranks."""
    if any(mp for mp, _ in folder.models):
        raise BadInput(
            f"{folder.path} is of several tensor- or pipeline-parallel ranks, which are not read here yet"
        )
    first = ModelStates(opened(folder.models[min(folder.models)]))
    if not folder.partitioned:
        return [first]
    world = need(first.content, "dp_world_size", first.archive.path)
    check_ranks(folder.models, 1, world, "the file of model states", folder.path)
    models = [first, *(ModelStates(opened(folder.models[0, rank])) for rank in range(1, world))]
    check_models(models, ("param_shapes", "frozen_param_shapes"))
    return models


def _archive(path: Path) -> Archive:
    """Open the file of a slot. Raises ``Damaged`` if it was the file of another slot when written."""
    archive = Archive(path)
    if archive.name not in (path.stem, "archive"):
        raise Damaged(
            f"{path} was {archive.name}.pt when it was saved: a file in the place of another. Give the files their"
            " names back.",
            path=str(path),
        )
    return archive


def _common_step(common: Archive) -> Any:
    """Return the step count of a ZeRO-3 checkpoint, which is not written for each parameter."""
    states = (common.content.get("optimizer_state_dict") or {}).get("state") or {}
    return next((state["step"] for state in states.values() if "step" in state), None)


def _members(shapes: list[dict[str, Shape]], groups: list[dict[str, Any]], names: Names) -> list[list[str]]:
    """Return the parameter names of each optimizer group; with ZeRO-3 a group has several of ``shapes``."""
    return [
        [names[name] for number in group.get("params", ()) if number < len(shapes) for name in shapes[number]]
        for group in groups
    ]
