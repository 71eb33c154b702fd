"""Reader of what Megatron-FSDP saves (``--ckpt-format fsdp_dtensor``): a folder of DCP, under names of its own.

Names begin with the wrappers (``module.module.``). A gated first layer of an MLP is two tensors, ``_w`` before ``_v``.
The hyper-parameters of a group, with its step, are stored for each parameter (``param_to_group_meta``). The layout is
that of Megatron's published code; the tests write it themselves. Called by ``open_megatron``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ...errors import Damaged, FileMissing
from ...state.layout.fragments import Fragments, dense
from ...state.layout.regions import Region
from ...state.tensor_entries import TensorEntry
from ..dcp.dcp_metadata import METADATA, Chunk, Claims, Shards
from ..dcp.dcp_reader import DcpFolder
from ..entry_keys import ShapeAndType
from ..source import SourceTensor
from .megatron_folder import COMMON, CONFIG

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
