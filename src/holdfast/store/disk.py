"""The file system as the store sees it: every sync, rename, unlink and allocation is made here.

Paths are relative to the disk's root and ``/``-separated; "" is the root itself. Sizes are bytes. The calls are few
and plain so that ``SimDisk`` of the tests, which has the same ones, can compute what a power cut would leave after
each. ``why`` names a sync, so that a test can remove it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

from holdfast.errors import BadInput, Damaged, DiskFailed, RunLocked
from holdfast.io.threads import NO_SPACE, File, advice_of, disk_full, open_file
from holdfast.regular_files import home_path, open_regular, read_regular
from holdfast.store.format.manifest import is_reference
from holdfast.store.format.reference_files import Reference, ReferencedFile
from holdfast.store.lock import (
    HeldLock,
    Lock,
    is_file_of,
    is_our_content,
    locked_text,
    refuse_without_locks,
    set_aside,
)
from holdfast.store.path_checks import NO_PLACE, bad_place, refuse_dangling

TEMPORARY = ".tmp"
"""The suffix of a file's name until its content is durable."""

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""The error numbers of a file system that has no locks."""

_data_sync = getattr(os, "fdatasync", os.fsync)
_F_FULLFSYNC = 51  # macOS: fsync alone leaves the bytes in the drive's cache


class OpenFile(Protocol):
    """An open file of any disk."""

    @property
    def path(self) -> Path: ...
    def read(self, view: memoryview, offset: int) -> None: ...
    def write(self, view: memoryview, offset: int) -> None: ...
    def close(self) -> None: ...


class ReadOnly:
    """The operations of a disk that write, for a disk on which nothing is written: each raises ``BadInput``."""

    def allocate(self, *_: Any, **__: Any) -> Any:
        self._refuse()

    cut = link = lock = makedirs = rename = sync = sync_dir = unlink = write_bytes = allocate

    def _refuse(self) -> NoReturn:
        """Raise ``BadInput``, which says where a run is written instead."""
        raise NotImplementedError


class AnyDisk(Protocol):
    """The disk operations that the store needs.

    Implemented by ``Disk``, ``SimDisk`` of the tests and ``store.remote.object_store.ObjectDisk``.
    """

    @property
    def root(self) -> Path: ...
    def open(self, path: str, *, write: bool = True, direct: bool = True) -> Any: ...
    def allocate(self, path: str, nbytes: int) -> None: ...
    def cut(self, path: str, nbytes: int) -> None: ...
    def sync(self, target: Any, *, why: str) -> None: ...
    def sync_dir(self, path: str, *, why: str) -> None: ...
    def rename(self, src: str, dst: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def link(self, path: str, directory: str) -> None: ...
    def link_of(self, path: str) -> str | None: ...
    def makedirs(self, path: str) -> None: ...
    def is_named(self, path: str, file: Any) -> bool: ...
    def listdir(self, path: str) -> list[str]: ...
    def exists(self, path: str) -> bool: ...
    def size(self, path: str) -> int: ...
    def read_bytes(self, path: str) -> bytes: ...
    def data_end(self, path: str) -> int: ...
    def write_bytes(self, path: str, data: bytes) -> None: ...
    def free_bytes(self) -> int: ...
    def lock(self, path: str, owner: dict) -> HeldLock: ...
    def is_locked(self, path: str) -> bool: ...


class Disk:
    """The directory ``root`` on a real file system. The root itself is made by ``makedirs("")``.

    ``root`` is resolved once, here: a change of the working directory, or of a link on the way, does not move
    an open run to another place.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.realpath(home_path(root)))
        self.references: dict[str, Reference] = {}
        """References that this process uses in place of those in files, by path."""

    def open(self, path: str, *, write: bool = True, direct: bool = True) -> File | ReferencedFile:
        """Open ``path``; the caller closes it. Raises ``FileNotFoundError`` if it is absent.

        A reference file is opened for reading, as the payload file that it stands for. Raises ``FileMissing`` if its
        folder has changed.
        """
        if is_reference(path):
            return ReferencedFile(self.root / path, reference_at(self, path), direct)
        return open_file(self.root / path, write=write, direct=direct)

    def allocate(self, path: str, nbytes: int) -> None:
        """Make ``path`` a file of exactly ``nbytes`` whose space is reserved. Its content is undefined."""
        target = self.root / path
        with open_file(target, write=True, create=True, direct=False) as file:
            try:
                os.ftruncate(file.fd, nbytes)
                _reserve(file.fd, nbytes)
            except OSError as error:
                os.ftruncate(file.fd, 0)
                raise _failure("allocate", target, error, nbytes) from error

    def cut(self, path: str, nbytes: int) -> None:
        """Truncate ``path``, which is longer, to ``nbytes``."""
        try:
            os.truncate(self.root / path, nbytes)
        except OSError as error:
            raise _failure("cut", self.root / path, error, nbytes) from error

    def sync(self, target: File | str, *, why: str) -> None:
        """Make the content and the size of ``target`` durable. Its name may still be lost."""
        if not isinstance(target, str):
            return _sync_fd(target.fd, target.path, _data_sync)
        try:
            fd = open_regular(self.root / target)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _failure("open", self.root / target, error, 0) from error
        try:
            _sync_fd(fd, self.root / target, _data_sync)
        finally:
            os.close(fd)

    def sync_dir(self, path: str, *, why: str) -> None:
        """Make the names durable that were made, changed or removed in ``path``."""
        _sync_directory(self.root / path)

    def rename(self, src: str, dst: str) -> None:
        """Rename ``src`` to ``dst`` atomically, replacing ``dst``. Both are in one directory."""
        try:
            os.replace(self.root / src, self.root / dst)
        except OSError as error:
            raise _failure("rename", self.root / src, error, 0) from error

    def unlink(self, path: str) -> None:
        """Remove ``path``; nothing happens if it is absent."""
        try:
            os.unlink(self.root / path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _failure("remove", self.root / path, error, 0) from error

    def link(self, path: str, directory: str) -> None:
        """Make ``path``, which is absent, a link to ``directory``.

        The link is not durable until its own directory is synced.
        """
        try:
            os.symlink(directory, self.root / path)
        except OSError as error:
            raise _failure("link", self.root / path, error, 0) from error

    def link_of(self, path: str) -> str | None:
        """Return the directory that the link ``path`` leads to, present or not; None if it is no link."""
        target = self.root / path
        return os.path.realpath(target) if target.is_symlink() else None

    def makedirs(self, path: str) -> None:
        """Make the directory ``path`` and its missing parents, the root included, all durable.

        The names of existing directories are made durable too, because their maker may have been killed. This goes up
        to the root; for the root itself, or where ``path`` is a link to elsewhere, up to the mount point.
        """
        refuse_dangling(self.root / path)
        target = Path(os.path.realpath(self.root / path))
        missing = [directory for directory in (target, *target.parents) if not directory.is_dir()]
        for directory in reversed(missing):
            try:
                directory.mkdir(exist_ok=True)
            except OSError as error:
                if error.errno in (*NO_PLACE, errno.ENOENT):  # /proc reports ENOENT for any new name
                    raise bad_place(directory, error) from error
                raise _failure("make", directory, error, 0) from error
        if path and target != self.root / path:
            _sync_directory(self.root)
        for directory, parent in pairwise((target, *target.parents)):
            if directory.is_mount() or (path and directory == self.root):
                break
            try:
                _sync_directory(parent)
            except PermissionError:  # a parent that belongs to others and cannot be read
                if directory in missing:
                    raise

    def mkdir(self, path: str) -> None:
        """Make the directory ``path`` if it is absent.

        Its name is not durable until its parent is synced.
        """
        try:
            (self.root / path).mkdir(exist_ok=True)
        except OSError as error:
            raise _failure("make", self.root / path, error, 0) from error

    def listdir(self, path: str) -> list[str]:
        """Return the sorted names in ``path``; none if it is absent."""
        try:
            return sorted(os.listdir(self.root / path))
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno in NO_PLACE:
                raise bad_place(self.root / path, error) from error
            raise _failure("list", self.root / path, error, 0) from error

    def exists(self, path: str) -> bool:
        return os.path.exists(self.root / path)

    def is_named(self, path: str, file: File) -> bool:
        """Return whether the open ``file`` is the one that ``path`` names now."""
        return is_file_of(self.root / path, file.fd)

    def size(self, path: str) -> int:
        """Return the bytes of ``path``, or of the payload file that it stands for.

        Raises ``FileNotFoundError`` if it is absent, ``FileMissing`` if the folder of a reference file has changed.
        """
        if is_reference(path):
            reference = reference_at(self, path)
            reference.check(path)
            return reference.nbytes
        return os.stat(self.root / path).st_size

    def data_end(self, path: str) -> int:
        """Return the end of the last bytes of ``path`` that were written, as far as the file system knows."""
        fd, end = open_regular(self.root / path), 0
        try:
            while True:
                end = os.lseek(fd, os.lseek(fd, end, os.SEEK_DATA), os.SEEK_HOLE)
        except OSError as error:
            return end if error.errno == errno.ENXIO else os.fstat(fd).st_size
        finally:
            os.close(fd)

    def read_bytes(self, path: str) -> bytes:
        """Return the content of a small file.

        Raises ``FileNotFoundError`` if it is absent, ``ManifestCorrupt`` if it is not a regular file.
        """
        try:
            return read_regular(self.root / path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _failure("read", self.root / path, error, 0) from error

    def write_bytes(self, path: str, data: bytes) -> None:
        """Make ``path`` a file that holds ``data``. It is not durable until it is synced."""
        try:
            with self._created(path) as file:
                file.write(data)
        except OSError as error:
            raise _failure("write", self.root / path, error, len(data)) from error

    def _created(self, path: str) -> BinaryIO:
        """Open ``path`` for writing, created if absent and emptied."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        # opening a FIFO without a reader fails with O_NONBLOCK and would block without it
        return open(os.open(self.root / path, flags | os.O_NONBLOCK, 0o666), "wb")

    @contextmanager
    def made(self, path: str, nbytes: int) -> Iterator[BinaryIO]:
        """Open the file ``path``, emptied, for ``nbytes`` that are written in order.

        It is not durable until it is synced. Raises ``DiskFull`` or ``DiskFailed`` where the system refuses.
        """
        try:
            with self._created(path) as file:
                yield file
        except OSError as error:
            raise _failure("write", self.root / path, error, nbytes) from error

    def free_bytes(self) -> int:
        """Return the bytes that this process may still write to the file system of the root."""
        directory = self.root
        while not directory.exists():
            directory = directory.parent
        status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize

    def lock(self, path: str, owner: dict) -> Lock:
        """Take the lock file ``path`` for ``owner`` (JSON), or raise ``RunLocked``.

        The lock is an ``flock``, which the system drops with the process. The content of the file decides nothing:
        what an ended process or a power cut left in it is overwritten, and what may belong to another program is set
        aside. Raises ``BadInput`` where the file system has no locks.
        """
        target = self.root / path
        lock = self._locked(target)
        text = json.dumps(owner).encode() + b"\n"
        try:
            lock.check()
            if not self._is_run() and not is_our_content(os.pread(lock.fd, 4096, 0)):
                set_aside(target)
                lock.release(emptied=False)
                lock = self._locked(target)
            os.ftruncate(lock.fd, 0)
            os.pwrite(lock.fd, text, 0)
        except OSError as error:
            lock.release()
            raise _failure("write", target, error, len(text)) from error
        except BaseException:
            lock.release(emptied=False)
            raise
        return lock

    def _locked(self, path: Path) -> Lock:
        """Open and lock the file at ``path``, created if absent, or raise ``RunLocked``."""
        try:
            fd = open_file(path, write=True, create=True, direct=False).fd
        except Damaged as error:
            raise BadInput(str(error)) from error
        except (DiskFailed, OSError) as error:
            cause = error.__cause__ or error
            if isinstance(cause, OSError) and cause.errno in (*NO_PLACE, errno.EISDIR, errno.ENOENT):
                raise bad_place(path, cause) from error
            raise
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 4096, 0)
            os.close(fd)
            if error.errno in NO_LOCKS:
                raise refuse_without_locks(path, error) from error
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise _failure("lock", path, error, 0) from error
            raise RunLocked(locked_text(self.root, holder)) from None
        return Lock(path, fd)

    def _is_run(self) -> bool:
        """Return whether the directory holds a run, even one that has barely begun."""
        return (self.root / "commits").is_dir() or (self.root / "timelines").is_dir()

    def is_locked(self, path: str) -> bool:
        """Return whether somebody holds the lock file ``path``, or may hold it."""
        try:
            fd = os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False


def reference_at(disk: AnyDisk, path: str) -> Reference:
    """Return what the reference file ``path`` says, or what this process uses in its place.

    Raises ``FileNotFoundError`` if it is absent, ``ManifestCorrupt`` if it is damaged.
    """
    known = disk.references.get(path) if isinstance(disk, Disk) else None
    return known or Reference.decode(disk.read_bytes(path), path)


def write_durably(
    disk: AnyDisk, path: str, data: bytes, *, why: str, after: Callable[[str], None] = lambda _: None
) -> None:
    """Make ``path`` a file of ``data`` that survives power loss, and never anything in between.

    The order on disk: temporary file, sync, rename, sync of the directory. ``after`` is called with the name of each
    of the first three once it is done.
    """
    temporary = path + TEMPORARY
    disk.write_bytes(temporary, data)
    after("write")
    disk.sync(temporary, why=why)
    after("sync")
    disk.rename(temporary, path)
    after("rename")
    disk.sync_dir(path.rpartition("/")[0], why=f"{why} directory")


@contextmanager
def written_durably(disk: Disk, path: str, nbytes: int, *, why: str) -> Iterator[Any]:
    """Open a file of ``nbytes`` that becomes ``path``, durably, when the block ends.

    The block may write at any offsets, from any threads. If the block raises, there is no file. Raises ``RunLocked``
    if another process or thread is in such a block for ``path``.
    """
    temporary = path + TEMPORARY
    with closing(open_file(disk.root / temporary, write=True, create=True, direct=False)) as file:
        _lock(file.fd, disk.root / path)
        if not disk.is_named(temporary, file):  # another process finished and renamed it meanwhile
            raise RunLocked(_written_by_another(disk.root / path))
        disk.allocate(temporary, nbytes)
        yield file
        disk.sync(file, why=why)
        disk.rename(temporary, path)
    disk.sync_dir(path.rpartition("/")[0], why=f"{why} directory")


@contextmanager
def alone_in(disk: Disk) -> Iterator[None]:
    """Exclude other processes and threads from the directory of ``disk`` during the block.

    The directory is made if absent. The lock is on the directory itself, so nothing is left of it. Raises
    ``RunLocked`` if another holder is inside.
    """
    disk.makedirs("")
    fd = os.open(disk.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd, disk.root)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    """Lock ``fd`` without waiting, or raise ``RunLocked``.

    Where a file system has no locks, the name of the file is all that keeps two writers apart.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # SMB reports a held lock as a permission error
        raise RunLocked(_written_by_another(path)) from None
    except OSError as error:
        if error.errno not in (*NO_LOCKS, errno.EBADF):
            raise _failure("lock", path, error, 0) from error


def _written_by_another(path: Path) -> str:
    return f"{path} is being written by another conversion. Wait for it or stop it, or give another place."


def _reserve(fd: int, nbytes: int) -> None:
    """Reserve the space of the file, so that a later write into it finds room."""
    if not nbytes or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot reserve
            raise


def _sync_directory(directory: Path) -> None:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise _failure("open", directory, error, 0) from error
    try:
        _sync_fd(fd, directory, os.fsync)
    finally:
        os.close(fd)


def _sync_fd(fd: int, path: Path, call: Callable[[int], None]) -> None:
    try:
        call(fd)
        if sys.platform == "darwin":
            fcntl.fcntl(fd, _F_FULLFSYNC)
    except OSError as error:
        raise _failure("sync", path, error, 0) from error


def _failure(verb: str, path: Path, error: OSError, nbytes: int) -> DiskFailed:
    if error.errno in NO_SPACE:
        return disk_full(path, nbytes, error)
    otherwise = "What was acknowledged before is still durable: check the device, then run again to resume."
    return DiskFailed(f"cannot {verb} {path}: {error.strerror or error}. {advice_of(error, otherwise)}")
