"""Files for direct I/O from threads, and the CPUs of these threads.

``preadv`` and ``pwritev`` transfer all bytes or fail. In direct mode, offsets, lengths and memory are multiples of a
page. A transfer repeats short and interrupted calls. Where a file system refuses O_DIRECT (at open or at the first
transfer), the file is used buffered, with one warning per directory. Nothing is synced here. Offsets and lengths are
bytes.

Threads that hash, compress and write beside training take time from the cores that train. Where the system has CPUs
that no training process of the run is confined to, each such thread puts itself there (``use_cpus``). No other thread
is touched.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import threading
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from holdfast.errors import DiskFailed, DiskFull
from holdfast.quantities import PAGE, format_bytes
from holdfast.regular_files import open_regular

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""The flag of direct I/O, 0 on a system that has none (macOS)."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_STALLS = 16  # short transfers in a row that do not advance by a page
_warned_directories: set[str] = set()


class BufferedIOWarning(UserWarning):
    """The warning that a file system refused direct I/O, so that the page cache is used."""


class File:
    """An open file. ``read`` and ``write`` may be called from several threads at once."""

    def __init__(self, path: Path, fd: int, direct: bool) -> None:
        self.path = path
        self.fd = fd
        self.direct = direct

    def read(self, view: memoryview, offset: int) -> None:
        """Fill all of ``view`` from ``offset``, or raise ``DiskFailed``. An EIO is tried once more."""
        self._transfer(os.preadv, view, offset, "read")

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of ``view`` at ``offset``, or raise ``DiskFull`` or ``DiskFailed``. Not durable yet."""
        self._transfer(os.pwritev, view, offset, "write")

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _transfer(self, call: Callable, view: memoryview, offset: int, verb: str) -> None:
        if self.direct and (offset % PAGE or len(view) % PAGE):
            raise ValueError(
                f"direct I/O needs multiples of {PAGE}, got offset {offset} and {len(view)} bytes"
            )
        done = stalls = 0
        retries = 1 if verb == "read" else 0
        while done < len(view):
            direct = self.direct
            try:
                count = call(self.fd, [view[done:]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._leave_direct(view, error)
                elif error.errno == errno.EIO and retries:
                    retries -= 1
                else:
                    raise self._failure(verb, offset + done, len(view) - done, error) from error
                continue
            if done + count == len(view):
                return
            advanced = count - count % PAGE if self.direct else count  # direct I/O continues at a whole page
            stalls = 0 if advanced else stalls + 1
            if count == 0 or stalls > _STALLS or self._ended(verb, offset + done + count):
                raise self._short(verb, offset, len(view), done + count)
            done += advanced

    def _ended(self, verb: str, position: int) -> bool:
        return verb == "read" and position >= os.fstat(self.fd).st_size

    def _leave_direct(self, view: memoryview, error: OSError) -> None:
        if not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE:
            raise ValueError(f"direct I/O needs memory aligned to {PAGE} bytes; take it from a BufferPool")
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~O_DIRECT)
        self.direct = False
        _warn_buffered(self.path, error)

    def _short(self, verb: str, offset: int, wanted: int, got: int) -> DiskFailed:
        return DiskFailed(
            f"short {verb}: {self.path} at offset {offset}: wanted {wanted} bytes, got {got};"
            f" the file has {os.fstat(self.fd).st_size} bytes. It was truncated or the device is failing:"
            f" check with `holdfast verify` and resume from the newest whole step."
        )

    def _failure(self, verb: str, offset: int, nbytes: int, error: OSError) -> DiskFailed:
        if error.errno in NO_SPACE:
            return disk_full(self.path, nbytes, error)
        way_out = (
            "Check the device (`dmesg` names what fails)."
            if verb == "read"
            else "What was acknowledged before is still durable: check the device, then run again to resume."
        )
        return DiskFailed(
            f"{verb} failed: {self.path} at offset {offset}, {nbytes} bytes: {error.strerror or error}. {way_out}"
        )


def open_file(path: str | Path, *, write: bool, create: bool = False, direct: bool = True) -> File:
    """Open ``path`` for reading, or with ``write`` for both; ``create`` makes it if it is absent.

    Raises ``FileNotFoundError`` if it is absent, ``Damaged`` if it is not a regular file, and ``DiskFailed`` for
    other failures.
    """
    path = Path(path)
    flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
    if direct and not O_DIRECT:
        _warn_buffered(path, OSError(errno.EINVAL, "this system has no O_DIRECT"))
    if direct and O_DIRECT:
        try:
            return File(path, open_regular(path, flags | O_DIRECT), True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise _open_failure(path, error) from error
            _warn_buffered(path, error)
    try:
        return File(path, open_regular(path, flags), False)
    except OSError as error:
        raise _open_failure(path, error) from error


def disk_full(path: Path, nbytes: int, error: OSError) -> DiskFull:
    """Return the error for ``nbytes`` that did not fit at ``path``."""
    try:
        status = os.statvfs(path.parent)
        free = status.f_bavail * status.f_frsize
    except OSError:
        free = 0
    return DiskFull(
        f"no space left in {path.parent}: {nbytes} bytes ({format_bytes(nbytes)}) are needed for {path.name},"
        f" {free} ({format_bytes(free)}) are free ({error.strerror}). Nothing that was acknowledged is lost:"
        f" make room (where it is a run, by fewer bases that are kept: keep= of a Checkpointer, durability.retain of"
        f" `holdfast train`), and run again to resume."
    )


def advice_of(error: OSError, otherwise: str) -> str:
    """Return the advice for an error of the system, or ``otherwise`` where there is none of its own."""
    if error.errno == errno.EMFILE:
        return (
            f"This process has as many files open as it may ({_most_open()}): raise that with `ulimit -n`, or"
            " LimitNOFILE= of a service. Nothing is wrong with the device, and what was acknowledged is durable."
        )
    if error.errno == errno.ENFILE:
        return (
            "The system has as many files open as it may: raise fs.file-max, or end what has so many open. Nothing is"
            " wrong with the device, and what was acknowledged is durable."
        )
    return otherwise


def _most_open() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _open_failure(path: Path, error: OSError) -> OSError | DiskFailed:
    if isinstance(error, FileNotFoundError):
        return error
    if error.errno in NO_SPACE:
        return disk_full(path, PAGE, error)
    way_out = advice_of(error, "Check its owner, its mode and the device.")
    return DiskFailed(f"cannot open {path}: {error.strerror}. {way_out}")


def _warn_buffered(path: Path, error: OSError) -> None:
    directory = str(path.parent)
    if directory in _warned_directories:
        return
    _warned_directories.add(directory)
    warnings.warn(
        f"{directory} does not take direct I/O ({error.strerror}); using the page cache there, which costs"
        f" memory and speed. Put the run on ext4 or xfs, or set io.direct = false to accept it.",
        BufferedIOWarning,
        stacklevel=3,
    )


def use_cpus(cpus: Collection[int]) -> None:
    """Confine the calling thread to ``cpus``, as far as the system allows. Without any, nothing happens."""
    if cpus:
        with suppress(OSError):  # they were taken away meanwhile
            os.sched_setaffinity(0, cpus)


def used_cpus() -> set[int]:
    """Return the CPUs that threads of this process may run on: those of all their masks."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended meanwhile
            found |= os.sched_getaffinity(int(thread))
    return found


def allowed_cpus() -> set[int]:
    """Return the CPUs on which the system lets this process run, whatever its present mask is.

    A cpuset (of a container, or of a batch system) holds for every thread; a mask can be changed. A thread of its own
    asks for all CPUs and sees which of them it gets.
    """
    found: set[int] = set()

    def ask() -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        found.update(os.sched_getaffinity(0))

    asking = threading.Thread(target=ask, name="holdfast-cpus", daemon=True)
    asking.start()
    asking.join()
    return found
