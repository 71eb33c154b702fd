"""A real power cut: a file system in a file, mounted by loop, shut down without flushing its journal.

    with power_cut_disk(tmp_path, "ext4") as disk:
        ...write below disk.folder, from this process or another...
        disk.cut()        # what is below disk.folder now is what a machine would find at its next boot

A process may cut the power itself, in the middle of its work, with ``shut_down(disk.mount)``; then
``disk.reboot()`` is called once it has ended. Every file below must be closed before. Needs root;
where mounting is refused ``unittest.SkipTest`` says why, which pytest takes as it is meant.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FS_IOC_SHUTDOWN = 0x8004587D  # ext4 and xfs take the same number
NO_LOG_FLUSH = 2
MIB = 1024**2
SMALLEST = {"ext4": 64 * MIB, "xfs": 320 * MIB}


def shut_down(mount: str | Path) -> None:
    """Cut the power of the file system at ``mount``: nothing reaches its disk any more."""
    fd = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, FS_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    finally:
        os.close(fd)


class PowerCutDisk:
    """A mounted file system. ``folder`` is durable and empty at first."""

    def __init__(self, image: Path, mount: Path) -> None:
        self.image, self.mount, self.folder = image, mount, mount / "ck"

    def cut(self) -> None:
        """Cut the power and boot again."""
        shut_down(self.mount)
        self.reboot()

    def reboot(self) -> None:
        """Mount the file system again after ``shut_down``."""
        _run("umount", self.mount)
        _run("mount", "-o", "loop", self.image, self.mount)


@contextmanager
def power_cut_disk(directory: Path, fs: str = "ext4", nbytes: int | None = None) -> Iterator[PowerCutDisk]:
    """A fresh file system of ``nbytes`` in ``directory``; ``unittest.SkipTest`` where there can be none."""
    disk = PowerCutDisk(directory / f"{fs}.img", directory / f"{fs}.mnt")
    disk.mount.mkdir()
    disk.image.touch()
    os.truncate(disk.image, nbytes or SMALLEST[fs])
    if os.geteuid() != 0:
        raise unittest.SkipTest("a power cut needs root to mount a file system")
    if shutil.which(f"mkfs.{fs}") is None:
        raise unittest.SkipTest(f"mkfs.{fs} is not installed")
    _run(f"mkfs.{fs}", "-q", disk.image)
    try:
        _run("mount", "-o", "loop", disk.image, disk.mount)
    except subprocess.CalledProcessError as error:
        raise unittest.SkipTest(f"mounting {fs} is refused here: {error.stderr.strip()}") from None
    try:
        disk.folder.mkdir()
        sync_directory(disk.mount)
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk.mount], check=False, capture_output=True)
        disk.image.unlink()
        disk.mount.rmdir()


def sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
