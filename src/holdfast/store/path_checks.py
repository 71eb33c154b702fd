"""The directories that can hold a run, and the errors about others.

A place is refused before anything is written if it is a file, a dangling link, or inside another run. Called by
everything that opens a run for writing.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from holdfast.errors import BadInput, Damaged
from holdfast.regular_files import home_path, read_regular

NO_PLACE = (
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EROFS,
)
"""The error numbers for a name that cannot be a directory, or not one of ours."""
OF_A_RUN = ("data", "index", "commits", "timelines", "scratch", "journal")
"""The directories inside a run's directory."""
OF_OTHERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    ".metadata",
    "latest_checkpointed_iteration.txt",
)
"""The files by which checkpoints of other libraries are known: Hugging Face, DCP, Megatron."""


def check_place(root: str | Path) -> None:
    """Raise ``BadInput`` if ``root`` cannot be the directory of a run that is written.

    It is then no directory, a link to nothing, in a bucket, within another run's directory, or cannot be made or
    written to. Nothing is changed.
    """
    if str(root).startswith("s3:/"):
        place = str(root)[3:].lstrip("/")  # Path merges the two slashes of an address
        raise BadInput(
            f"s3://{place} is in a bucket, and no run is written there: write it in a directory, and copy it with"
            " remote= or `holdfast push`."
        )
    path = home_path(root)
    try:
        if path.is_symlink() and not path.exists():
            raise BadInput(
                f"{root} is a link to {os.readlink(path)}, which is not there. Is its disk mounted?"
            )
        found = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
        status = os.stat(found)
        os.stat(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise bad_place(root, error) from error
    if not stat.S_ISDIR(status.st_mode):
        what = "is a file" if found == path.absolute() else f"cannot be made: {found} is a file"
        raise BadInput(f"{root} {what}. Give a directory for the run; it is made if it is not there.")
    if (run := _run_around(path.absolute())) is not None and not (path / "commits").is_dir():
        raise BadInput(
            f"{root} is among the files of the run {run}, and no run itself. Give {run} to go on with it, or another"
            " directory to begin anew."
        )
    if not os.access(found, os.R_OK | os.W_OK | os.X_OK):
        reason = "Read-only file system" if os.statvfs(found).f_flag & os.ST_RDONLY else "Permission denied"
        raise bad_place(root, OSError(0, f"{reason}: {found}"))


def refuse_foreign_checkpoint(root: str | Path) -> None:
    """Raise ``BadInput`` if training in ``root`` would begin anew beside a checkpoint of another library.

    Its author may mean to continue that checkpoint. DeepSpeed's is known by a file that names a folder in it.
    """
    path = Path(root)
    if os.path.isdir(path / "commits"):
        return
    found = [name for name in OF_OTHERS if os.path.isfile(path / name)]
    found += [name for name in ("latest", "latest_universal") if _names_folder(path, name)]
    if found:
        raise BadInput(
            f"{path} is no run, but a checkpoint of another library: it has {found[0]}. Give the run a directory of"
            " its own; source= begins from a checkpoint, and `holdfast train --model` from a Hugging Face folder."
        )


def _names_folder(path: Path, name: str) -> bool:
    """Return whether the small text file ``name`` in ``path`` names a folder there."""
    with suppress(OSError, Damaged, ValueError):
        tag = read_regular(path / name, 4096).decode().strip()
        return bool(tag) and (path / tag).is_dir()
    return False


def _run_around(path: Path) -> Path | None:
    """Return the run that contains ``path`` in one of its directories, or None."""
    around = (place.parent for place in (path, *path.parents) if place.name in OF_A_RUN)
    return next(
        (run for run in around if all((run / name).is_dir() for name in ("commits", "timelines"))), None
    )


def refuse_dangling(path: Path) -> None:
    """Raise ``BadInput`` if ``path`` is a link to nothing."""
    if path.is_symlink() and not os.path.lexists(os.path.realpath(path)):
        raise BadInput(f"{path} is a link to {os.readlink(path)}, which is not there. Is its disk mounted?")


def bad_place(path: str | Path, error: OSError) -> BadInput:
    """Return the error for a path that cannot be used as a directory."""
    why = "it is a file" if error.errno in (errno.EEXIST, errno.ENOTDIR) else error.strerror or error
    return BadInput(f"{path} cannot be used as a directory: {why}. Give another directory.")
