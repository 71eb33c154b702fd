"""Files of a DeepSpeed checkpoint, found by name; missing, foreign and swapped files are refused.

In file names, ``mp_rank`` counts the ranks of tensor and pipeline parallelism, ``zero_pp_rank`` those of data
parallelism. torch writes a file's original name into it, which reveals a file that took another's place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import BadInput, Damaged, FileMissing
from ..torch_archive.archives import Archive

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
