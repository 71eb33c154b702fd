"""Verified ranges of payload files, for many threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash

from holdfast.errors import Damaged
from holdfast.state.split_masters import SplitArrays, split
from holdfast.store.disk import Disk
from holdfast.store.format import payload_files
from holdfast.store.format.manifest import FileRef
from holdfast.store.format.payload_layout import CHECKSUM_BLOCK, Layout


def test_reading_keeps_nothing_for_each_block_that_was_read(tmp_path, monkeypatch):
    """Of a small block size the ends of most ranges lie in one that another reads too."""
    monkeypatch.setattr(payload_files, "CHECKSUM_BLOCK", 4096)
    disk = Disk(tmp_path)
    data = bytes(range(256)) * 16 * 600
    (tmp_path / "file").write_bytes(data)
    checksums = tuple(xxhash.xxh3_64_hexdigest(data[a : a + 4096]) for a in range(0, len(data), 4096))
    files, ref = payload_files.VerifiedFiles(disk), FileRef("file", len(data), checksums)

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
    assert held() <= before + payload_files.KEPT_BLOCKS


COUNT = 9 * 1009
"""The elements of a master in parts, no multiple of 8."""


def file_of_parts(folder, changed=(), missing=()):
    """A file with a master of 9 rows in parts, or with others of the form ``changed`` or ``missing``; the master."""
    master = np.random.default_rng(0).integers(0, 1 << 32, COUNT, dtype=np.uint32)
    parts = SplitArrays(np.empty(COUNT, "u2"), np.empty(COUNT, "u2"), np.empty(-(-COUNT // 8), "u1"))
    split(master, parts)
    forms = {
        "high": ("BF16", (9, 1009)),
        "low": ("U16", (9, 1009)),
        "carry": ("U8", (-(-COUNT // 8),)),
    } | dict(changed)
    kept = [part for part in forms if part not in missing]
    layout = Layout.build([(f"w/param.{part}", *forms[part]) for part in kept])
    data = bytearray(layout.file_bytes)
    data[: len(layout.header)] = layout.header
    for part, array in zip(("high", "low", "carry"), parts, strict=True):
        if part in kept and part not in dict(changed):
            entry = layout[f"w/param.{part}"]
            data[entry.offset : entry.end] = array.tobytes()
    (folder / "file").write_bytes(data)
    spans = range(0, len(data), CHECKSUM_BLOCK)
    checksums = tuple(xxhash.xxh3_64_hexdigest(data[a : a + CHECKSUM_BLOCK]) for a in spans)
    return payload_files.VerifiedFiles(Disk(folder)), FileRef("file", len(data), checksums), master


def test_a_master_in_parts_is_a_tensor_of_fp32(tmp_path, monkeypatch):
    monkeypatch.setattr(payload_files, "JOINED_AT_ONCE", 1024)
    files, ref, master = file_of_parts(tmp_path)
    assert (files.entry(ref, "w/param").dtype, files.entry(ref, "w/param").nbytes) == ("F32", 4 * COUNT)
    assert files.tensor(ref, "w/param").tobytes() == master.tobytes()
    for start, stop in (
        (0, 1),
        (3, 4 * 1024 + 5),
        (4 * 1023, 4 * COUNT),
        (7 * 4, 7 * 4),
        (4 * COUNT - 1, 4 * COUNT),
    ):
        into = memoryview(bytearray(stop - start))
        files.read_tensor(ref, "w/param", start, into)
        assert into == master.tobytes()[start:stop], (start, stop)


def test_more_than_a_tensor_has_is_refused(tmp_path):
    files, ref, _ = file_of_parts(tmp_path)
    with pytest.raises(Damaged, match=r"'w/param' has 36324 bytes in file, and 36320 to 36328 are asked for"):
        files.read_tensor(ref, "w/param", 4 * COUNT - 4, memoryview(bytearray(8)))


@pytest.mark.parametrize("part", ["high", "low", "carry"])
def test_a_master_without_one_of_its_parts_is_damage(tmp_path, part):
    files, ref, _ = file_of_parts(tmp_path, missing=[part])
    with pytest.raises(Damaged, match="file has no tensor 'w/param'"):
        files.tensor(ref, "w/param")


@pytest.mark.parametrize(
    "part, form",
    [
        ("high", ("F16", (9, 1009))),
        ("low", ("U16", (9, 1008))),
        ("low", ("BF16", (9, 1009))),
        ("carry", ("U8", (1134,))),
    ],
)
def test_parts_that_do_not_fit_together_are_damage(tmp_path, part, form):
    files, ref, _ = file_of_parts(tmp_path, changed={part: form}.items())
    with pytest.raises(Damaged, match=r"the parts of 'w/param' are .*, which do not fit together"):
        files.tensor(ref, "w/param")
