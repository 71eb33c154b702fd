"""The payload of one record of the log, as a reader gets it."""

from __future__ import annotations

from holdfast.io.buffers import Buffer
from holdfast.store.log.segments import read_payload
from holdfast.store.log.striping import open_segment


def payload(disk, queue, stored):
    view = Buffer(max(stored.payload_bytes, 1), "test").view[: stored.payload_bytes]
    file = open_segment(disk, stored.path, stored.stripes)
    try:
        read_payload(queue, file, stored, view).result(10)
    finally:
        file.close()
    return bytes(view)
