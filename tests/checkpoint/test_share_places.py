"""Who keeps whose copies, and which step is complete after nodes are lost with their disks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.nodes.local_disks import LocalDisks, NodeLayout, node_here
from holdfast.distributed import stream_of
from holdfast.errors import BadInput
from holdfast.store.format.manifest import FileRef, Manifest, RankShare, object_path
from holdfast.store.share_places import (
    OWN,
    PARTNER,
    Holdings,
    missing_streams,
    newest_complete,
    payload_places,
    segment_places,
    tiers_of,
)

layouts = st.lists(st.integers(1, 3), min_size=2, max_size=5).flatmap(
    lambda sizes: st.tuples(
        st.just([node for node, size in enumerate(sizes) for _ in range(size)]),
        st.integers(1, len(sizes) - 1),
    )
)


@given(layouts)
def test_every_rank_has_a_partner_on_another_node(drawn):
    nodes, offset = drawn
    layout = NodeLayout.of(nodes, [offset] * len(nodes))
    ranks = range(len(nodes))
    for rank in ranks:
        partner = layout.partner_of(rank)
        assert nodes[partner] == (nodes[rank] + offset) % len(layout.ranks) != nodes[rank]
        assert rank in layout.copied_by(partner)
        assert nodes[layout.server_of(layout.place_of(rank), 17)] == nodes[rank]
    assert sorted(each for rank in ranks for each in layout.copied_by(rank)) == list(ranks)
    assert sum(layout.leads(rank) for rank in ranks) == len(layout.ranks)


@pytest.mark.parametrize("offset", [0, 2, -4])
def test_a_node_that_is_its_own_partner_is_refused(offset):
    with pytest.raises(BadInput, match="own partner"):
        NodeLayout.of([0, 1], [offset] * 2)


def test_torchrun_says_which_node_this_is():
    assert node_here(LocalDisks(node=5), {}) == 5
    assert node_here(LocalDisks(), {"GROUP_RANK": "3", "RANK": "6", "LOCAL_WORLD_SIZE": "8"}) == 3
    assert node_here(LocalDisks(), {"RANK": "17", "LOCAL_WORLD_SIZE": "8"}) == 2
    with pytest.raises(BadInput, match="torchrun"):
        node_here(LocalDisks(), {"RANK": "17"})


def manifest(step, ranks, timeline=1, key="k1"):
    """A commit of which each rank has two files; their content is the step's."""
    shares = {}
    for rank in range(ranks):
        stream = stream_of(rank)
        files = {
            f"{stream}.{unit}": FileRef(
                f"data/{stream}.{unit}.{step % 3}.safetensors", 4096, (f"{step:016x}",), step
            )
            for unit in "ab"
        }
        ref = {"path": f"index/{step:032x}.json", "bytes": 1, "xxh3_128": f"{step:032x}"}
        shares[stream] = RankShare(**ref, step=step, files=files, index=ref, progress={})
    found = Manifest(step, timeline, None, None, key, None, {}, {}, {}, 0.0, {})
    return found.with_shares(shares)


def held(layout, line):
    """What each node holds if all copies were made."""
    found = []
    for place, ranks in enumerate(layout.ranks):
        streams = [stream_of(rank) for rank in ranks]
        from_here = [
            r for each in layout.ranks for r in each if layout.place_of(layout.partner_of(r)) == place
        ]
        own = {f.path: f.bytes for m in line for s in streams for f in m.files_of(s).values()}
        copies = {
            object_path(f): f.bytes
            for m in line
            for r in from_here
            for f in m.files_of(stream_of(r)).values()
        }
        own |= {f"journal/{stream}/step-000000000001.t0001.log": 4096 for stream in streams}
        copies |= {f"journal/{stream_of(r)}/step-000000000001.t0001.log": 4096 for r in from_here}
        found.append(Holdings({"k1": streams}, own, copies))
    return found


@settings(deadline=None)
@given(layouts, st.data())
def test_a_step_is_complete_unless_a_node_and_its_partner_are_lost(drawn, data):
    nodes, offset = drawn
    layout = NodeLayout.of(nodes, [offset] * len(nodes))
    line = [manifest(8, len(nodes)), manifest(4, len(nodes))]
    lost = data.draw(st.sets(st.integers(0, len(layout.ranks) - 1)))
    holdings = [Holdings() if place in lost else each for place, each in enumerate(held(layout, line))]
    reader = data.draw(st.integers(0, len(layout.ranks) - 1))
    places = payload_places(line, holdings, reader)
    gone = {
        stream_of(rank)
        for rank in range(len(nodes))
        if {layout.place_of(rank), layout.partner_place(layout.place_of(rank))} <= lost
    }
    assert set(missing_streams(line[0], places)) == gone
    assert newest_complete(line, places) == (None if gone else line[0])
    tiers = tiers_of(line[0], places, segment_places(holdings, reader))
    for rank in range(len(nodes)):
        if stream_of(rank) not in gone:
            assert tiers[stream_of(rank)] == (PARTNER if layout.place_of(rank) in lost else OWN)


def test_a_file_counts_where_its_stream_was_hosted():
    """The same name on a node that a rank has left holds other bytes."""
    line = [manifest(8, 1, timeline=2, key="k2"), manifest(5, 1)]
    path = line[0].files_of("rank-00000")["rank-00000.a"].path
    assert path == line[1].files_of("rank-00000")["rank-00000.a"].path
    own = {f.path: f.bytes for f in line[0].files.values()}
    stale, here = Holdings({"k1": ["rank-00000"]}, own), Holdings({"k1": [], "k2": ["rank-00000"]}, own)
    newest = [replace(line[0]), manifest(4, 1)]
    assert [place.node for place in payload_places(newest, [stale, here], 0)[path]] == [1]


def test_a_copy_of_another_content_is_no_copy():
    line = [manifest(8, 1)]
    other = {object_path(replace(f, checksums=("0" * 16,))): f.bytes for f in line[0].files.values()}
    assert missing_streams(line[0], payload_places(line, [Holdings({}, {}, other)], 0)) == ["rank-00000"]
