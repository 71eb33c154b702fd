"""The files of DeepSpeed checkpoints, found by name, and what ZeRO checkpoints and universal folders have in common.

In file names, ``mp_rank`` counts the ranks of tensor and pipeline parallelism, ``zero_pp_rank`` those of data
parallelism. Missing and foreign files are refused. torch writes a file's original name into it, which reveals a file
that took another's place.

The model states file holds facts about the model, its buffers, and parameters that are not trained; the rest of a
parameter comes from other files and is added by ``add_parameter``. Files of two checkpoints are refused. Unknown
entries of the client state are carried as ``extra``; those that are too large are listed as left out. Called by the
readers of both formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ...errors import BadInput, Damaged, FileMissing
from ...quantities import MiB, counted
from ...state.layout.fragments import Fragments, dense, flat
from ...state.layout.regions import Region
from ...state.layout.sharding import zero_range
from ...state.tensor_entries import TensorEntry
from ..entry_keys import unwrapped
from ..source import ReadFiles, SourceTensor, WithNumbers
from ..torch_archive.archives import Archive, Plain, piece_of
from ..torch_archive.pickles import Tensor
from .local_tensors import LocalParameter, PlacedParameter, Shape, shapes_of

LARGEST_EXTRA = 1 * MiB
"""The largest tensor of the client state, in bytes, that is kept. Larger ones are dropped and listed."""
_OWN = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "global_steps", "mp_world_size", "universal_checkpoint_info",
})  # fmt: skip
"""Keys of the model states that are read as something other than ``extra``."""
SAME = ("global_steps", "skipped_steps", "dp_world_size", "mp_world_size", "ds_version")


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
            slot,
            tensor.storage.dtype,
            [piece_of(tensor, self.archive.part_in(contents, tensor.storage))],
            self.archive.path,
        )
        return local


def progress_of(
    model: ModelStates, optimizer: Mapping[str, Any], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the progress from the model states and the optimizer's other values; ``extra`` holds unknown ones."""
    content, plain = model.content, Plain(model.archive, LARGEST_EXTRA)
    config = content.get("ds_config") if isinstance(content.get("ds_config"), dict) else {}
    progress: dict[str, Any] = {"step": int(content.get("global_steps") or 0)}
    if isinstance(kind := (config.get("optimizer") or {}).get("type"), str):
        progress["optimizer"] = kind
    progress["groups"] = [
        plain({key: value for key, value in group.items() if key != "params"}, f"param_groups[{i}]")
        for i, group in enumerate(groups)
    ]
    if content.get("lr_scheduler") is not None:
        progress["scheduler"] = plain(content["lr_scheduler"], "lr_scheduler")
    extra = {
        key: plain(value, key) for key, value in content.items() if key not in _OWN and value is not None
    }
    extra |= {key: plain(value, key) for key, value in optimizer.items()}
    extra |= {key: plain(value, key) for key, value in model.module.items() if not isinstance(value, Tensor)}
    progress["extra"] = extra | ({"not_carried": plain.left_out} if plain.left_out else {})
    return progress


def add_parameter(contents: WithNumbers, name: str, whole: PlacedParameter) -> None:
    """Add the tensor entries of a parameter to ``contents``."""
    for slot, laid in whole.slots.items():
        pieces, *copies = laid.copies
        contents.add(
            SourceTensor(
                TensorEntry(name, slot, whole.shape, laid.dtype), pieces, tuple(copies), laid.averaged
            )
        )
    for slot, value in whole.values.items():
        if value.dtype:
            atom, piece = (
                TensorEntry(name, slot, (), value.dtype),
                dense(Region((), ()), value.part, value.offset),
            )
        elif slot == "step":
            atom, piece = (
                TensorEntry(name, slot, (), "F32"),
                dense(Region((), ()), contents.add_number(value.number)),
            )
        else:
            contents.progress.setdefault("values", {}).setdefault(name, {})[slot] = value.number
            continue
        contents.add(SourceTensor(atom, Fragments.of([piece], 0)))


class Names(Mapping[str, str]):
    """Names without those of wrappers, by original name. Raises ``BadInput`` where two names become equal."""

    def __init__(self, names: Iterable[str]) -> None:
        found = {name: unwrapped(name) for name in sorted(names)}
        while found and all(name.startswith("module.") for name in found.values()):
            found = {name: plain.removeprefix("module.") for name, plain in found.items()}
        self._plain = found
        kept: dict[str, str] = {}
        for name, plain in found.items():
            if kept.setdefault(plain, name) != name:
                raise BadInput(f"{kept[plain]} and {name} are both {plain} without the names of wrappers")

    def __getitem__(self, name: str) -> str:
        return self._plain[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)


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


def writer_of(model: ModelStates, ranks: int | None = None) -> str:
    """Return the DeepSpeed version that claims to have written the checkpoint and the number of ranks, for messages."""
    version = str(model.content.get("ds_version") or "of an unknown version")[:40]
    return f"DeepSpeed {version}" + (f", {counted(ranks, 'rank')}" if ranks else "")


def others_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer stores beside its tensors."""
    known = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
    return {key: state[key] for key in known if key in state}


def _frozen(contents: ReadFiles, models: list[ModelStates], key: str, shape: Shape) -> LocalParameter:
    """Return a frozen parameter of ZeRO-3, which is divided as trained ones are."""
    local = LocalParameter(shape, -1)
    for rank, model in enumerate(models):
        fragment = (model.content.get("frozen_param_fragments") or {}).get(key)
        low, high = zero_range(prod(shape), rank, len(models))
        if not isinstance(fragment, Tensor) or fragment.strides != (1,) or fragment.shape[0] < high - low:
            raise Damaged(
                f"{model.archive.path} has no fragment of {high - low} elements of the frozen parameter {key}",
                path=str(model.archive.path),
            )
        pieces = flat(shape, low, high, model.archive.part_in(contents, fragment.storage), fragment.offset)
        local.add("param", fragment.storage.dtype, pieces, model.archive.path)
    return local


_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
_LATEST = ("latest", "latest_universal")

Ranks = dict[tuple[int, int], Path]
"""Files by model-parallel rank and data-parallel rank."""


@dataclass
class Folder:
    """The files of a checkpoint.

    ``partitioned`` is true for ZeRO-3: each data-parallel rank has a file of model states.
    """

    path: Path
    partitioned: bool = False
    models: Ranks = field(default_factory=dict)
    optimizers: Ranks = field(default_factory=dict)


def is_deepspeed(path: Path) -> bool:
    """Return whether ``path`` is the folder of a tag, or has a file that names one."""
    if not path.is_dir():
        return False
    folders = [path, *(_named_by(path / name) for name in _LATEST)]
    return any(f is not None and (is_universal(f) or any(map(_MODEL.fullmatch, _names(f)))) for f in folders)


def is_universal(folder: Path) -> bool:
    return (folder / "zero" / "optimizer_state.pt").is_file()


def tag_folder(path: Path) -> Path:
    """Return the folder of the tag: ``path``, or the folder that ``path`` names as the newest."""
    for name in _LATEST:
        if (path / name).is_file():
            folder = _named_by(path / name)
            if folder is None:
                tag = (path / name).read_text(errors="replace")[:200].strip()
                raise FileMissing(
                    f"{path / name} names {tag!r}, which is no folder beside it", path=str(path / name)
                )
            return folder
    return path


def files_of(path: Path) -> Folder:
    """Return the files of the tag folder ``path``. Raises ``FileMissing`` if there are no model states."""
    folder, whole = Folder(path), []
    for name in sorted(_names(path)):
        if match := _OPTIMIZER.fullmatch(name):
            _put(folder.optimizers, (int(match[2]), int(match[1])), path / name)
        elif match := _MODEL.fullmatch(name):
            _put(folder.models, (int(match[2]), int(match[1] or 0)), path / name)
            whole.append(match[1] is None)
    if not folder.models:
        raise FileMissing(f"{path} has no file *_model_states.pt", path=str(path))
    if any(whole) and not all(whole):
        raise Damaged(
            f"{path} has model states of ZeRO-1 or 2 (mp_rank_*) and of ZeRO-3 (zero_pp_rank_*): two checkpoints in"
            " one folder. Move the files of one of them elsewhere.",
            path=str(path),
        )
    folder.partitioned = not any(whole)
    return folder


def opened(path: Path) -> Archive:
    """Open a file.

    Raises ``Damaged`` if torch did not write it, or if it was another file of a checkpoint when written.
    """
    archive = Archive(path)
    name = f"{archive.name}.pt"
    if name != path.name and (_OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name)):
        raise Damaged(
            f"{path} was {name} when it was saved: a file in the place of another. Give the files their names back.",
            path=str(path),
        )
    return archive


def check_ranks(files: Ranks, ranks: int, world: int, what: str, folder: Path) -> None:
    """Raise unless there is a file for each of ``ranks`` model-parallel and ``world`` data-parallel ranks.

    Raises ``FileMissing`` for a missing file, ``Damaged`` for one too many.
    """
    for mp in range(ranks):
        for dp in range(world):
            if (mp, dp) not in files:
                raise FileMissing(
                    f"{folder}: {what} of data-parallel rank {dp} (of {world}) and mp_rank_{mp:02d} (of {ranks}) is"
                    f" missing: zero_pp_rank_{dp}_mp_rank_{mp:02d}_*. Copy it from the node that wrote it.",
                    path=str(folder),
                )
    for (mp, dp), path in files.items():
        if mp >= ranks or dp >= world:
            raise Damaged(
                f"{path} is of data-parallel rank {dp} and mp_rank_{mp:02d}, and the model states say that"
                f" {world} x {ranks} ranks saved: it is of another checkpoint. Move it elsewhere.",
                path=str(path),
            )


def need(content: Any, key: str, path: Path) -> Any:
    """Return ``content[key]`` of the file ``path``. Raises ``Damaged`` if it is missing."""
    if not isinstance(content, dict) or key not in content:
        raise Damaged(
            f"{path} has no {key!r}: it is no file of a DeepSpeed checkpoint that is known", path=str(path)
        )
    return content[key]


def _put(files: Ranks, rank: tuple[int, int], path: Path) -> None:
    if other := files.get(rank):
        raise Damaged(
            f"{path} and {other.name} are of one rank: two checkpoints in one folder. Move one of them elsewhere.",
            path=str(path),
        )
    files[rank] = path


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.is_file()] if folder.is_dir() else []


def _named_by(path: Path) -> Path | None:
    """Return the folder beside ``path`` that the text of the file ``path`` names; None if there is none."""
    if not path.is_file():
        return None
    if path.stat().st_size > 4096:
        raise BadInput(f"{path} is no name of a tag: it has {path.stat().st_size} bytes")
    tag = path.read_text(encoding="utf-8", errors="replace").strip()
    inside = tag and not Path(tag).is_absolute() and ".." not in Path(tag).parts
    return path.parent / tag if inside and (path.parent / tag).is_dir() else None
