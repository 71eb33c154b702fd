"""Entering: the first rank locks a run and opens its timeline, then the other ranks join."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

from holdfast.errors import RunMismatch
from holdfast.store.drive_links import MARK
from holdfast.store.format.manifest import Point, Timeline
from holdfast.store.run_store import LocalStore


class RankGroup(Protocol):
    """The rank group, with the methods of ``Ranks`` that are needed here."""

    rank: int

    def is_mine(self, unit: str) -> bool: ...
    def all_do(self, what: Callable[[], Any]) -> list[Any]: ...
    def first_does(self, what: Callable[[], Any]) -> Any: ...


def see_alike(store: LocalStore, ranks: RankGroup) -> None:
    """Raise ``RunMismatch`` unless all ranks see the directory that the first rank has entered.

    Collective: every rank must call this.
    """

    def see() -> None:
        if store.writer() != writer:
            raise RunMismatch(
                f"{store.root} as rank {ranks.rank} sees it on {socket.gethostname()} is not the directory that rank 0"
                f" has entered ({writer.strip()}). Give all ranks one directory on a file system that they share."
            )

    writer = ranks.first_does(store.writer)
    ranks.all_do(see)


def see_drives(drives: Mapping[str, Path], ranks: RankGroup) -> None:
    """Raise ``RunMismatch`` unless all ranks see each of ``drives`` as the first rank does.

    The first rank shows a file for a moment in the directory given for each drive: the drive's own, or the place
    where it will be.
    Collective: every rank must call this.
    """

    def show() -> list[tuple[str, str]]:
        marks = []
        for drive, directory in drives.items():
            with suppress(OSError):  # the code that writes there later reports the cause
                file = NamedTemporaryFile(prefix=MARK, dir=directory)  # noqa: SIM115 (until all have seen it)
                marks.append((drive, shown.enter_context(file).name))
        return marks

    def see() -> None:
        for drive, mark in marks:
            if not os.path.exists(mark):
                raise RunMismatch(
                    f"the drive {drive} as rank {ranks.rank} sees it on {socket.gethostname()} is not the one that rank"
                    " 0 has there. Every rank reads and writes the drives, so those of several hosts need a file system"
                    " that they share; leave out disks that only one of them has."
                )

    with ExitStack() as shown:
        marks = ranks.first_does(show)
        ranks.all_do(see)


def begin(
    store: LocalStore, ranks: RankGroup, point: Point | None, about: Mapping[str, Any] | None = None
) -> None:
    """Open the timeline that continues ``point`` on the first rank, and join it on the others.

    Collective: every rank must call this.
    """

    def opened() -> Timeline:
        store.begin(point, about=about)
        return store.opened

    store.is_mine = ranks.is_mine
    timeline = ranks.first_does(opened)
    ranks.all_do(lambda: store.join(timeline, ranks.rank) if ranks.rank else None)
