"""A layout places tensors where the design says, and any safetensors reader can open the file."""

from __future__ import annotations

import json
import math

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Damaged
from holdfast.state.tensor_entries import DTYPE_BYTES
from holdfast.store.format.payload_layout import CHECKSUM_BLOCK, Layout, block_spans

KiB = 1024
DTYPES = sorted(DTYPE_BYTES)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 7, 64, 127]), max_size=3).map(tuple) | st.sampled_from(
    [(4095,), (4096,), (4097,), (104729,), (16384,)]
)
TENSORS = st.lists(
    st.tuples(st.text(min_size=1), st.sampled_from(DTYPES), SHAPES), unique_by=lambda t: t[0]
).filter(lambda tensors: not any(key.startswith("__") for key, _, _ in tensors))


@pytest.mark.slow
@given(TENSORS, st.dictionaries(st.text(), st.text(), max_size=3))
def test_a_header_parses_back_to_its_layout(tensors, metadata):
    layout = Layout.build(tensors, metadata)
    assert Layout.parse(layout.header) == layout
    assert [(entry.key, entry.dtype, entry.shape) for entry in layout.entries] == tensors
    assert all(layout[key].key == key and key in layout for key, _, _ in tensors)
    assert "absent" * 9 not in layout


@given(TENSORS)
def test_tensors_lie_aligned_without_overlap_and_filler_covers_the_rest(tensors):
    layout = Layout.build(tensors)
    assert len(layout.header) % 4096 == layout.file_bytes % 4096 == 0
    position = len(layout.header)
    for entry in sorted([*layout.entries, *layout.pads], key=lambda entry: (entry.offset, entry.end)):
        assert entry.offset == position
        position = entry.end
    assert position == layout.file_bytes
    for entry in layout.entries:
        assert entry.nbytes == math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]
        assert entry.offset % (16 * KiB if entry.nbytes >= 16 * KiB else 64) == 0


@given(TENSORS)
def test_safetensors_itself_reads_the_file(tensors):
    layout = Layout.build(tensors, {"unit": "block_0"})
    image = bytearray(layout.header.ljust(layout.file_bytes, b"\0"))
    for number, entry in enumerate(layout.entries):
        image[entry.offset : entry.end] = bytes([number % 256]) * entry.nbytes
    theirs = dict(safetensors.deserialize(bytes(image)))
    for number, entry in enumerate(layout.entries):
        assert bytes(theirs[entry.key]["data"]) == bytes([number % 256]) * entry.nbytes
        assert theirs[entry.key]["shape"] == list(entry.shape)


def test_a_checksum_block_edge_is_where_the_optimizer_may_cut():
    layout = Layout.build(
        [("small", "F32", (3,)), ("large", "F32", (3 << 20,)), ("next", "BF16", (5 << 20,))]
    )
    for entry in layout.entries[1:]:
        for edge in range(0, layout.file_bytes, CHECKSUM_BLOCK):
            if entry.offset < edge < entry.end:
                assert (edge - entry.offset) // DTYPE_BYTES[entry.dtype] % 4096 == 0


def test_the_literal_bytes_of_a_header():
    header = Layout.build([("w", "F32", (3,)), ("b", "U8", ())]).header
    text = (
        b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},'
        b'"__pad__0":{"dtype":"U8","shape":[52],"data_offsets":[12,64]},'
        b'"b":{"dtype":"U8","shape":[],"data_offsets":[64,65]},'
        b'"__pad__1":{"dtype":"U8","shape":[4031],"data_offsets":[65,4096]}}'
    )
    assert header == (4088).to_bytes(8, "little") + text.ljust(4088, b" ")


def test_a_header_longer_than_a_page_grows_by_pages():
    layout = Layout.build([(f"tensor_{number}", "F32", (1,)) for number in range(200)])
    assert len(layout.header) > 4096 and len(layout.header) % 4096 == 0
    assert layout.entries[0].offset == len(layout.header)


def test_a_layout_of_nothing_is_a_header():
    layout = Layout.build([])
    assert (layout.entries, layout.file_bytes) == ((), 4096)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([("w", "F32", (1,)), ("w", "F32", (2,))], "there twice"),
        ([("__pad__0", "F32", (1,))], "reserved"),
        ([("__metadata__", "F32", (1,))], "reserved"),
        ([("w", "F31", (1,))], "dtype 'F31'"),
        ([("w", "F32", (-1,))], "shape"),
    ],
)
def test_impossible_tensors_are_refused(tensors, text):
    with pytest.raises(ValueError, match=text):
        Layout.build(tensors)


def test_broken_headers_are_damage_and_nothing_else():
    good = Layout.build([("w", "F32", (3,))]).header
    table = json.loads(good[8:])
    table["w"]["data_offsets"] = [4, 16]
    moved = json.dumps(table).encode()
    for header in [b"", good[:7], good[:100], b"\xff" * 4096, good.replace(b"F32", b"F99"),
                   len(moved).to_bytes(8, "little") + moved, b"\x02" + bytes(7) + b"[]"]:  # fmt: skip
        with pytest.raises(Damaged, match="not the header of a payload file"):
            Layout.parse(header)


@pytest.mark.parametrize(
    "file_bytes", [0, 4096, CHECKSUM_BLOCK - 4096, CHECKSUM_BLOCK, CHECKSUM_BLOCK + 4096]
)
def test_blocks_cover_a_file_once(file_bytes):
    spans = list(block_spans(file_bytes))
    assert [start for start, _ in spans] == list(range(0, file_bytes, CHECKSUM_BLOCK))
    assert sum(stop - start for start, stop in spans) == file_bytes
