"""How replicas without trainers wait for one another: together, and not for one that is gone."""

from __future__ import annotations

import time
from threading import Timer

import pytest

from holdfast.checkpoint.replica.replica_liveness import (
    HERE,
    KEPT,
    ReplicaLocks,
    ReplicaNotes,
    has_kept,
    is_orphan,
)
from holdfast.distributed import Ranks
from holdfast.store.disk import Disk
from holdfast.store.lock import lock_of


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "scratch").mkdir()
    return Disk(tmp_path)


def notes_of(disk, rank):
    return ReplicaNotes(disk, 3, Ranks(rank, 2, "that of the trainers"), lambda: False)


def waits(notes, what, seconds=12.0):
    """What it gets, and whether that was soon."""
    began = time.monotonic()
    return notes.of_all(what, seconds, 0.0), time.monotonic() < began + 10


def test_all_that_ranks_say_is_found_by_rank(disk):
    first, second = notes_of(disk, 0), notes_of(disk, 1)
    second.leave(KEPT, [4, 9])
    Timer(0.3, lambda: first.leave(KEPT, [5, 8])).start()
    assert waits(second, KEPT) == ([[5, 8], [4, 9]], True)
    assert has_kept(disk, 3, 0) and not has_kept(disk, 2, 0) and not is_orphan(disk, 3, 0)


def test_what_one_has_given_up_all_give_up(disk):
    """Also where everybody has said everything before."""
    first, second = notes_of(disk, 0), notes_of(disk, 1)
    for notes in (first, second):
        notes.leave(HERE)
    assert waits(first, HERE) == ([None, None], True)
    Timer(0.3, second.give_up).start()
    assert waits(first, "share") == (None, True)
    assert waits(first, HERE) == (None, True)


def test_one_that_was_seen_at_work_and_is_gone_is_waited_for_no_longer(disk):
    first, lock = notes_of(disk, 0), disk.lock(lock_of(1), {"pid": 1})
    Timer(0.3, lock.release).start()
    assert waits(first, HERE) == (None, True)


@pytest.mark.slow
def test_one_that_was_never_seen_is_waited_for(disk):
    """Its lock may be one of another host."""
    first, second = notes_of(disk, 0), notes_of(disk, 1)
    first.leave(HERE)
    Timer(0.5, lambda: second.leave(HERE)).start()
    assert waits(first, HERE) == ([None, None], True)
    assert waits(first, KEPT, 0.2) == (None, True)


def test_a_lock_says_who_is_gone_once_it_was_seen(disk):
    locks = ReplicaLocks(disk)
    assert not locks.gone(1)
    lock = disk.lock(lock_of(1), {"pid": 1})
    assert not locks.gone(1)
    lock.release()
    assert locks.gone(1) and not ReplicaLocks(disk).gone(1)
