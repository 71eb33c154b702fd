"""Readers of what the ranks of an FSDP run saved: a file of each rank by ``torch.save``, or folders of DCP.

accelerate writes files of ranks without ``torch.distributed.checkpoint`` (``pytorch_model_fsdp_0_rank3.bin``,
``optimizer_0_rank3.bin``), verl and SkyRL always (``model_world_size_8_rank_3.pt``, ``optim_...``).
Each distributed tensor records its mesh and its placements, so the region that a file holds is known. All ranks must
have the same keys, equal values and equal copies of what they replicate; a file must be of the rank that its name says.
With DCP, accelerate and its Trainer save a folder for the model and one for the optimizer, which are one state here.
Opened by ``formats.readers``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ...errors import BadInput, Damaged, FileMissing
from ...quantities import counted
from ..dcp.dcp_reader import METADATA, DcpFolder
from ..entry_keys import Path as Way
from ..source import Source
from ..state_dict_progress import SMALL_BYTES, STEPS
from ..torch_archive.archives import Archive, Plain
from ..torch_archive.distributed_tensors import LocalTensor, Meshes
from .safetensors_files import unread_in
from .torch_save import TorchSave, is_tensor, leaves_of, local_of
from .trainer_folder import STATE, trainer_state

MODEL, OPTIMIZER, EXTRA_STATE = "model", "optimizer", "extra_state"
_NUMBER = r"(0|[1-9]\d{0,6})"
_ACCELERATE = re.compile(rf"(pytorch_model_fsdp|optimizer)_{_NUMBER}_rank{_NUMBER}\.bin")
_VERL = re.compile(rf"(model|optim|extra_state)_world_size_([1-9]\d{{0,6}})_rank_{_NUMBER}\.pt")
_KINDS = {"pytorch_model_fsdp": MODEL, "optim": OPTIMIZER}
SCHEDULERS = ("scheduler.bin", "scheduler.pt")
"""Files of accelerate and of its Trainer beside those of the ranks, written once."""
SHARED = ("lr_scheduler",)
"""States that verl keeps beside tensors and that all ranks have alike, as they have steps."""
FSDP_CONFIG, CONFIG_BYTES = "fsdp_config.json", 1 << 16
"""The file in which verl says which version of FSDP wrote the folder, and a limit for its size."""
Files = dict[str, dict[int, Path]]
"""Paths by kind and rank."""


def is_rank_files(path: Path) -> bool:
    """Return whether ``path`` is a folder with such files."""
    return path.is_dir() and any(map(_parsed, path.iterdir()))


def _parsed(path: Path) -> tuple[str, int, int, int] | None:
    """Return kind, number and rank of a file, and the number of ranks (0: not in its name); None for other files."""
    if found := _ACCELERATE.fullmatch(path.name):
        kind, number, rank = found.groups()
        return _KINDS.get(kind, kind), int(number), int(rank), 0
    if found := _VERL.fullmatch(path.name):
        kind, world, rank = found.groups()
        return _KINDS.get(kind, kind), 0, int(rank), int(world)
    return None


class RankFiles(TorchSave):
    """The folder ``path``. The model is at the key ``model``, optimizers at ``optimizer``."""

    FORMAT = "rank files"

    def _flattened(self, path: Path) -> tuple[dict[str, Way], dict[str, Any]]:
        """Return the path to each entry by key, and the values that are no tensors, of all ranks together.

        Raises ``FileMissing`` if a rank's file is missing, ``Damaged`` if files are not of one save, ``BadInput`` if
        the folder has several models.
        """
        files, library, world = _files_of(path)
        if OPTIMIZER in files:
            self.unread = ()
            if _wrote_first_fsdp(path):  # whose optimizer has flat parts of several parameters
                self.unread = tuple(file.name for file in files.pop(OPTIMIZER).values())
        self.writer = f"{library}, files of {counted(world, 'rank')}"
        ways: dict[str, Way] = {}
        values: dict[str, Any] = {}
        for kind in sorted(files.keys() - {EXTRA_STATE}):
            for rank in range(world):
                self._add_file(kind, rank, world, files[kind][rank], ways, values)
        self._refuse_another_world(path, world)
        if not self._held:
            raise BadInput(f"{path} holds no tensors, so it is no state of a model")
        beside = schedule_of(path) | _extra_states(files.get(EXTRA_STATE, {}))
        ways |= {".".join(way): way for way in beside}
        values |= {".".join(way): value for way, value in beside.items()}
        return ways, values

    def _add_file(
        self, kind: str, rank: int, world: int, path: Path, ways: dict[str, Way], values: dict[str, Any]
    ) -> None:
        """Add the entries of one file, and compare them with those of the first rank."""
        archive, seen = _archive_of(path), set[str]()
        plain, meshes = Plain(archive, SMALL_BYTES), Meshes()
        for way, value in leaves_of(archive.content, (kind,)):
            key = ".".join(map(str, way))
            if key in seen or (rank and key not in ways):
                raise Damaged(
                    f"{path} has {key} twice, or alone among its ranks: all have the same names",
                    path=str(path),
                )
            seen.add(key)
            ways.setdefault(key, way)
            if is_tensor(value):
                self._add_tensor(key, rank, world, archive, local_of(value, key, meshes))
                continue
            made = plain(value, key)
            if values.setdefault(key, made) != made:
                raise Damaged(
                    f"{path}: {key} is {made!r}, and {values[key]!r} with the first rank: the files are of different"
                    " steps or runs",
                    path=str(path),
                )
        if lost := [key for key, way in ways.items() if way[0] == kind and key not in seen]:
            raise Damaged(f"{path} has no {lost[0]}, which the first rank has", path=str(path))

    def _add_tensor(self, key: str, rank: int, world: int, archive: Archive, local: LocalTensor) -> None:
        """Add what one rank has of the tensor ``key``. Raises ``Damaged`` if it is another's, or another tensor."""
        held = self._held.setdefault(key, [])
        path = str(archive.path)
        if local.rank not in (None, rank):
            raise Damaged(
                f"{path} was written by rank {local.rank} (its {key} says so), and its name is that of rank {rank}",
                path=path,
            )
        if local.last >= world:
            raise FileMissing(
                f"{path} was written by one of {local.last + 1} ranks, and there are files of {world}",
                path=path,
            )
        first = _form(held[0][1]) if held else _form(local) if rank == 0 else "no tensor"
        if _form(local) != first:
            raise Damaged(f"{path}: {key} is {_form(local)}, and {first} with the first rank", path=path)
        held.append((archive, local))

    def _refuse_another_world(self, path: Path, world: int) -> None:
        """Raise ``Damaged`` if the distributed tensors know of other ranks than the ``world`` that there are."""
        if lost := [key for key, held in self._held.items() if len(held) != world]:
            raise Damaged(
                f"{path}: {lost[0]} is a tensor with some ranks, and not with others", path=str(path)
            )
        meshes = {id(local.ranks): local.ranks for held in self._held.values() for _, local in held}
        known = frozenset().union(*meshes.values())
        if known and known != set(range(world)):
            raise Damaged(
                f"{path} has files of {counted(world, 'rank')}, and {len(known)} wrote them: files of another save are"
                " among them",
                path=str(path),
            )


def _form(local: LocalTensor) -> str:
    return f"{list(local.shape)} of {local.tensor.storage.dtype}"


def _archive_of(path: Path) -> Archive:
    """Open the file of one rank. Raises ``BadInput`` if it is no dictionary."""
    archive = Archive(path)
    if not isinstance(archive.content, dict):
        raise BadInput(f"{path} holds a {type(archive.content).__name__.lower()} and no state dict")
    return archive


def _files_of(path: Path) -> tuple[Files, str, int]:
    """Return the files of each kind by rank, the library that wrote them, and the number of ranks.

    Raises ``FileMissing`` if one is missing, ``BadInput`` for files of several libraries, worlds or models.
    """
    parsed = [(file, found) for file in sorted(path.iterdir()) if (found := _parsed(file))]
    worlds = sorted({world for _, (_, _, _, world) in parsed})
    if len(worlds) > 1:
        raise BadInput(
            f"{path} has rank files of several saves, of {' and '.join(map(str, worlds))} ranks (0: of accelerate)."
            " Leave those of one there."
        )
    if any(kind == MODEL and number for _, (kind, number, _, _) in parsed):
        raise BadInput(f"{path} has the files of several models. Leave those of one there.")
    files: Files = {}
    for file, (kind, number, rank, _) in parsed:
        files.setdefault(f"{kind}_{number}" if number else kind, {})[rank] = file
    world = worlds[0] or 1 + max(max(ranks) for ranks in files.values())
    if MODEL not in files:
        raise FileMissing(f"{path} has rank files, and none of a model", path=str(path))
    for ranks in files.values():
        lost = next((rank for rank in range(world) if rank not in ranks), None)
        if lost is not None:
            first = next(iter(ranks.values()))
            raise FileMissing(
                f"{path} lacks the file of rank {lost} like {first.name}: there are {len(ranks)} of {world}",
                path=str(path),
            )
        if (last := max(ranks)) >= world:
            raise BadInput(f"{ranks[last]} is of rank {last}, and its name says that there are {world}")
    return files, "verl" if worlds[0] else "accelerate", world


def _wrote_first_fsdp(path: Path) -> bool:
    """Return whether verl says that FSDP1 wrote the folder. Raises ``Damaged`` if what it says cannot be read."""
    file = path / FSDP_CONFIG
    if not file.is_file():
        return False
    try:
        return json.loads(file.read_bytes()[:CONFIG_BYTES]).get("FSDP_version") == 1
    except (ValueError, AttributeError, RecursionError) as error:
        raise Damaged(
            f"{file} does not read as the configuration of FSDP: {error}", path=str(file)
        ) from error


def schedule_of(path: Path) -> dict[tuple[str, ...], Any]:
    """Return the state of the schedule that accelerate writes once, as JSON by path; empty if there is none."""
    for file in (path / name for name in SCHEDULERS):
        if file.is_file():
            archive = Archive(file)
            return {("scheduler",): Plain(archive)(archive.content)}
    return {}


def _extra_states(files: dict[int, Path]) -> dict[tuple[str, ...], Any]:
    """Return what verl keeps beside tensors, as JSON by path. What differs between ranks is a list of all.

    Raises ``Damaged`` if ranks have different schedules or steps.
    """
    ranks: list[dict[str, Any]] = []
    for rank in sorted(files):
        archive = _archive_of(files[rank])
        plain = Plain(archive, SMALL_BYTES)
        ranks.append({str(name): plain(value, str(name)) for name, value in archive.content.items()})
    found: dict[tuple[str, ...], Any] = {}
    for name in dict.fromkeys(name for each in ranks for name in each):
        every = [each.get(name) for each in ranks]
        if all(value == every[0] for value in every):
            found[EXTRA_STATE, name] = every[0]
        elif name in (*SHARED, *STEPS):
            rank = next(rank for rank, value in enumerate(every) if value != every[0])
            raise Damaged(
                f"{files[rank]}: its {name} is not the first rank's, so the files are of different steps or runs",
                path=str(files[rank]),
            )
        else:
            found[EXTRA_STATE, name] = every
    return found


MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"


def is_accelerate(path: Path) -> bool:
    """Return whether ``path`` has the folder of a model that accelerate saved by ranks."""
    return (path / MODEL_FOLDER / METADATA).is_file()


def open_accelerate(path: Path) -> Source:
    """Open the model in ``path``, and the optimizer if there is one.

    Raises ``Damaged`` as ``DcpFolder``, or if the Trainer's state has no step.
    """
    if not (path / OPTIMIZER_FOLDER).is_dir():
        source = DcpFolder(path, path / MODEL_FOLDER)
        source.unread = unread_in(path)
        return source
    source = DcpFolder(path, path / MODEL_FOLDER, path / OPTIMIZER_FOLDER)
    for way, value in schedule_of(path).items():
        source.progress[".".join(way)] = value
    if (path / STATE).is_file():
        source.progress["step"] = trainer_state(path)["global_step"]
    source.writer = f"accelerate, {source.writer}"
    return source
