"""Verified ranges of payload files, for many threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import xxhash

from holdfast.store.disk import Disk
from holdfast.store.format import payload_ranges
from holdfast.store.format.manifest import FileRef


def test_reading_keeps_nothing_for_each_block_that_was_read(tmp_path, monkeypatch):
    """Of a small block size the ends of most ranges lie in one that another reads too."""
    monkeypatch.setattr(payload_ranges, "CHECKSUM_BLOCK", 4096)
    disk = Disk(tmp_path)
    data = bytes(range(256)) * 16 * 600
    (tmp_path / "file").write_bytes(data)
    checksums = tuple(xxhash.xxh3_64_hexdigest(data[a : a + 4096]) for a in range(0, len(data), 4096))
    files, ref = payload_ranges.VerifiedFiles(disk), FileRef("file", len(data), checksums)

    def read(offset):
        into = bytearray(100)
        files.read(ref, offset, memoryview(into))
        assert into == data[offset : offset + 100]

    def held():
        return sum(len(value) for value in vars(files).values() if isinstance(value, dict | list))

    read(50)
    before = held()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, [block * 4096 + 50 for block in range(600)] * 2))
    assert held() <= before + payload_ranges.KEPT_BLOCKS
