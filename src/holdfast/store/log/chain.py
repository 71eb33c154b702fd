"""The chain of a snapshot and the log records after it, as far as replay can use them.

Only headers are read, except by ``verify_records``. Nothing here is trusted before it has been verified.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from math import inf
from typing import Any

from holdfast.errors import Damaged, DiskFailed, Unreadable
from holdfast.io.buffers import Buffer
from holdfast.io.queue import IOQueue
from holdfast.state.encoding import lengthen
from holdfast.store.commit.retention import ancestry
from holdfast.store.disk import AnyDisk
from holdfast.store.format.manifest import Manifest, Point
from holdfast.store.log.segments import (
    SegmentRef,
    StoredRecord,
    read_payload,
    read_what_can_be,
    segments,
)
from holdfast.store.log.striping import open_segment
from holdfast.store.reader import ATTEMPTS, RunReader

AHEAD = 2
"""Number of log records that are read ahead of the one in use."""


def payloads(
    disk: AnyDisk, queue: IOQueue, records: list[StoredRecord]
) -> Generator[tuple[StoredRecord, list[memoryview]], None, None]:
    """Yield each log record with the verified memory of its parts.

    The memory is reused: it is valid only until the next record is requested. Raises ``Damaged`` where a record fails
    its verification.
    """
    files: dict[str, Any] = {}
    buffers: list[Buffer] = []
    under_way: list[tuple[StoredRecord, Buffer, Any]] = []
    size = max((record.payload_bytes for record in records), default=0)
    try:
        buffers = [Buffer(max(size, 1), "records") for _ in range(min(AHEAD + 1, len(records)))]
        free = list(buffers)
        following = iter(records)
        while True:
            while free and (record := next(following, None)) is not None:
                if record.path not in files:
                    files[record.path] = open_segment(disk, record.path, record.stripes)
                buffer = free.pop()
                view = buffer.view[: record.payload_bytes]
                under_way.append((record, buffer, read_payload(queue, files[record.path], record, view)))
            if not under_way:
                return
            record, buffer, future = under_way.pop(0)
            future.result()
            yield record, _parts(buffer.view, record)
            free.append(buffer)
    finally:
        for _, _, future in under_way:
            future.cancel() or future.exception()
        for file in files.values():
            file.close()
        for buffer in buffers:
            buffer.free()


def _parts(view: memoryview, record: StoredRecord) -> list[memoryview]:
    parts, start = [], 0
    for nbytes, _ in record.parts:
        parts.append(view[start : start + nbytes])
        start += nbytes
    return parts


@dataclass
class Chain:
    """A snapshot (``base``) and the usable log records that follow it on its timeline.

    ``damage`` is the damage that ended the chain, or None where the log simply ends.
    """

    base: Manifest
    stream: str
    records: list[StoredRecord]
    damage: Damaged | None = None

    @property
    def last(self) -> Point:
        return self.records[-1] if self.records and self.records[-1].step > self.base.step else self.base

    @cached_property
    def progress(self) -> dict[str, Any]:
        """The progress after the last step.

        Raises ``Damaged`` if the records do not continue the progress that the snapshot stores.
        """
        first = self.first_step
        later = [record for record in self.records if record.step > first]
        told = [self.base.progress_of(self.stream), *(record.about["progress"] for record in later)]
        try:
            return lengthen(told)
        except ValueError as error:
            last = later[-1]
            what = f"the record of step {last.step} in {last.path} does not follow those before it: {error}"
            raise Damaged(what, path=last.path) from error

    @property
    def first_step(self) -> int:
        """The step of the progress that the snapshot itself stores."""
        return self.base.step if not self.base.shares else self.base.shares[self.stream].step

    def cut_to(self, step: int) -> None:
        """Drop the log records after ``step``."""
        self.records = [record for record in self.records if record.step <= step]
        self.__dict__.pop("progress", None)


@dataclass
class Journal:
    """The log records of one timeline by step, with the damage found in its segments."""

    records: dict[int, StoredRecord] = field(default_factory=dict)
    errors: dict[int, Damaged | DiskFailed] = field(default_factory=dict)
    """The error that ended each segment early, by the last readable step before it."""
    may_hold: dict[int, float] = field(default_factory=dict)
    """The newest step that what follows the error may hold, by the same step; infinity where nothing bounds it."""
    acknowledged: int = -1
    """A step that certainly was durable: a later segment was begun after it, or a resume reached it."""

    def end_after(self, step: int) -> Damaged | DiskFailed | None:
        """Return why there is no log record after ``step``, or None if the reason is not known.

        A segment that ends early may hold every step up to the next record that is there, also after steps that have a
        snapshot and no record.
        """
        last = max((end for end in self.errors if end <= step < self.may_hold[end]), default=None)
        if last is None or any(last < each <= step for each in self.records):
            return None
        return self.errors[last]


DURABLE_AT_FORK = "durable_step"
"""The key in a timeline's record that names the newest durable step, where the step that it continues was in memory."""

ReadSegment = Callable[[AnyDisk, SegmentRef], tuple[list[StoredRecord], Damaged | DiskFailed | None]]
"""A function like ``read_what_can_be``."""


def read_journal(
    store: RunReader, stream: str, tip: int | None = None, read: ReadSegment = read_what_can_be
) -> Journal:
    """Read the headers of all log records of ``stream`` on one timeline.

    Args:
        store: The run.
        stream: The name of the log.
        tip: The id of the timeline; None means the current one.
        read: Reads the headers of a segment.
    """
    journal = Journal()
    timelines = store.timelines()[0]
    line = ancestry(timelines, store.tip() if tip is None else tip)
    limits = dict(line)
    for (resumed, _), (_, limit) in pairwise(line):
        assert limit is not None
        durable = min(limit, timelines[resumed].writer.get(DURABLE_AT_FORK, limit))
        journal.acknowledged = max(journal.acknowledged, durable)
    refs = segments(store.disk, stream)
    for ref, following in zip_longest(refs, refs[1:]):
        if ref.timeline not in limits:
            continue
        limit = limits[ref.timeline]
        found, damage = read(store.disk, ref)
        known = timelines.get(ref.timeline)
        if found and known is not None and found[0].key != known.key:
            damage, found = (
                Damaged(f"{ref.path} is a segment of another run, or of a copy of this one", path=ref.path),
                [],
            )
        for record in found:
            if limit is None or record.step <= limit:
                journal.records[record.step] = record
        end = found[-1].step if found else ref.first_step - 1
        if damage is not None and (limit is None or end < limit):
            journal.errors[end], journal.may_hold[end] = damage, inf if limit is None else limit
            if following is not None and following.timeline == ref.timeline:
                before_next = following.first_step - 1
                journal.may_hold[end] = min(journal.may_hold[end], before_next)
                if limit is None:
                    journal.acknowledged = max(journal.acknowledged, before_next)
    return journal


def chain_of(base: Manifest, stream: str, journal: Journal, target: int | None) -> Chain:
    """Return the chain of records of ``stream`` that follow ``base`` without a gap, to ``target`` at most.

    Raises:
        Damaged: Log records that the snapshot itself needs are missing.
        DiskFailed: Log records that the snapshot itself needs cannot be read.
        Unreadable: A later log record cannot be read.
    """
    records: list[StoredRecord] = []
    first = base.oldest_step_of(stream)
    step, damage = first, None
    while target is None or step < target:
        record = journal.records.get(step + 1)
        if record is None:
            found = journal.end_after(step)
            if isinstance(found, DiskFailed):
                raise found if step < base.step else Unreadable(found, step)
            damage = found
            break
        if records and record.previous != _digest_before(record, records[-1]):
            damage = Damaged(
                f"the record of step {step + 1} in {record.path} does not follow that of step {step}: it is of another"
                " chain",
                path=record.path,
            )
            break
        records.append(record)
        step += 1
    if step < base.step:
        raise Damaged(
            f"{base.path} needs the records of steps {first + 1} to {base.step}, and that of step"
            f" {step + 1} cannot be used. {damage or 'It is missing.'}",
            path=base.path,
        )
    return Chain(base, stream, records, damage)


def _digest_before(record: StoredRecord, before: StoredRecord) -> str:
    return before.digest if before.timeline == record.timeline else record.key


def last_step(store: RunReader, base: Manifest, tip: int | None = None) -> int:
    """Return the last step that the records after ``base`` reach on every stream.

    Only headers are read. ``tip`` is the timeline to follow; None means that which the base is part of. Raises
    ``Unreadable`` where all streams that can be read lead farther than one that cannot.
    """
    tip = _tip_of(store, base) if tip is None else tip
    steps: list[int] = []
    unread: list[Unreadable] = []
    for stream in base.streams:
        try:
            steps.append(chain_of(base, stream, read_journal(store, stream, tip), None).last.step)
        except Unreadable as error:
            unread.append(error)
    first = min(unread, key=lambda error: error.step, default=None)
    if first is not None and all(first.step < step for step in steps):
        raise first
    return min(steps)


def progress_at(
    store: RunReader, base: Manifest, stream: str, step: int, tip: int | None = None
) -> dict[str, Any]:
    """Return the progress of ``stream`` at a ``step`` that its records after ``base`` reach, as ``last_step`` does."""
    tip = _tip_of(store, base) if tip is None else tip
    return chain_of(base, stream, read_journal(store, stream, tip), step).progress


def _tip_of(store: RunReader, base: Manifest) -> int | None:
    """Return the timeline on which to follow ``base``: None for the current one.

    A snapshot that a later resume abandoned is followed on its own timeline.
    """
    return None if base.ref in store.line() else base.timeline


def verify_records(store: RunReader, base: Manifest) -> tuple[int, list[Damaged]]:
    """Verify the log records after ``base`` and return the newest step that every stream reaches.

    The list holds the damage that ended the streams.
    """
    steps, damaged = [], []
    for stream in base.streams:
        step, damage = _verify_stream(store, base, stream)
        steps.append(step)
        damaged += damage
    if not store.is_listed(base):  # the log records that only this snapshot needed were removed with it
        raise store.retired(base.ref)
    return min(steps, default=base.step), damaged


def _verify_stream(store: RunReader, base: Manifest, stream: str) -> tuple[int, list[Damaged]]:
    """Verify one stream, and try again where files vanish meanwhile.

    A writer that removes records has retired the snapshot that needed them, or keeps the snapshot without its later
    records. A second look then shows which.
    """
    for _ in range(ATTEMPTS - 1):
        with suppress(FileNotFoundError):
            return _verify_once(store, base, stream)
    return _verify_once(store, base, stream)


def _verify_once(store: RunReader, base: Manifest, stream: str) -> tuple[int, list[Damaged]]:
    step, queue = base.oldest_step_of(stream), IOQueue()
    try:
        chain = chain_of(base, stream, read_journal(store, stream, _tip_of(store, base)), None)
        for record, _ in payloads(store.disk, queue, chain.records):
            step = record.step
    except Damaged as error:
        return step, [error]
    finally:
        queue.close()
    return step, [] if chain.damage is None else [chain.damage]
