"""Log records that are made up, and a journal written with them."""

from __future__ import annotations

import random

from holdfast.io.buffers import Buffer
from holdfast.store.disk import Disk
from holdfast.store.format.manifest import Timeline
from holdfast.store.log.journal import JournalWriter, Record
from holdfast.store.log.segments import read_payload
from holdfast.store.log.striping import open_segment

TIMELINE = Timeline(3, 2, 10, "ab" * 16, "cd" * 16)
PAGE = 4096


def part(nbytes, seed):
    view = Buffer(nbytes, "test").view
    view[:] = random.Random(seed).randbytes(nbytes)
    return view


def record(step, sizes=(PAGE, 2 * PAGE)):
    parts = tuple(part(size, step * 10 + number) for number, size in enumerate(sizes))
    return Record(step, {"rate": 0.1 * step, "text": "é\n"}, parts)


def written(root, queue, groups, **options):
    disk = Disk(root)
    disk.makedirs("")
    writer = JournalWriter(disk, queue, "s", TIMELINE, **options)
    for group in groups:
        writer.append(group)
    writer.close()
    return disk


def payload(disk, queue, stored):
    view = Buffer(max(stored.payload_bytes, 1), "test").view[: stored.payload_bytes]
    file = open_segment(disk, stored.path, stored.stripes)
    try:
        read_payload(queue, file, stored, view).result(10)
    finally:
        file.close()
    return bytes(view)
