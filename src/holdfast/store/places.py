"""Places: which directories can be those of a run, and what is said of others."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from holdfast.errors import BadInput

NO_PLACE = (
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EROFS,
)
"""What the system says of a name that can be no directory's, or not for us."""


def check_place(root: str | Path) -> None:
    """Raise ``BadInput`` if ``root`` cannot be the directory of a run that is written: it is no directory, a link to
    nothing, in a bucket, or cannot be made or written in. Nothing is changed."""
    if str(root).startswith("s3:/"):
        raise BadInput(
            f"{root} is in a bucket, and no run is written there: write it in a directory, and copy it with remote= or"
            " `holdfast push`."
        )
    path = Path(root)
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
    if not os.access(found, os.R_OK | os.W_OK | os.X_OK):
        reason = "Read-only file system" if os.statvfs(found).f_flag & os.ST_RDONLY else "Permission denied"
        raise bad_place(root, OSError(0, f"{reason}: {found}"))


def refuse_dangling(path: Path) -> None:
    """Raise ``BadInput`` if ``path`` is a link to nothing."""
    if path.is_symlink() and not os.path.lexists(os.path.realpath(path)):
        raise BadInput(f"{path} is a link to {os.readlink(path)}, which is not there. Is its disk mounted?")


def bad_place(path: str | Path, error: OSError) -> BadInput:
    """The error for a path that cannot be that of a run, or of anything else that is a directory."""
    why = "it is a file" if error.errno in (errno.EEXIST, errno.ENOTDIR) else error.strerror or error
    return BadInput(f"{path} cannot be used as a directory: {why}. Give another directory.")
