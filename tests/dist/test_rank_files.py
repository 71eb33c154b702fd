"""Files in which each rank saved its distributed tensors begin a run under another parallelism, or out of core."""

from __future__ import annotations

import pytest

from combined import CAMPAIGN
from dist.awkward import TOPOLOGIES

STEPS = 2
SOURCES = ("fsdp3", "hsdp2x2", "fsdp2xtp2") if CAMPAIGN else ("fsdp3", "fsdp2xtp2")
TARGETS = ("plain", "fsdp3", "engine")


@pytest.fixture(scope="module")
def written(world, tmp_path_factory):
    """By source the folder, and what its first rank said."""
    found = {}
    for source in SOURCES:
        folder = tmp_path_factory.mktemp(source)
        order = {"topology": source, "steps": STEPS, "rank_files": folder}
        said = world.run(TOPOLOGIES[source][0], **order)
        assert all(rank.get("finished") for rank in said), said[0].get("trace")
        found[source] = folder, said[0]["digests"][str(STEPS)]
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_a_run_begins_from_files_of_ranks(world, written, tmp_path, target):
    size = TOPOLOGIES[target][0] if target in TOPOLOGIES else 1
    every = {
        f"{source}{form}": (f"{folder}{form}", digests)
        for source, (folder, digests) in written.items()
        for form in (("", "-dcp") if source == "fsdp3" else ("",))
    }
    sources = {name: folder for name, (folder, _) in every.items()}
    for rank in world.run(size, topology=target, steps=1, root=str(tmp_path), sources=sources):
        for source, (_, digests) in every.items():
            assert rank.get(source, {}).get("finished"), rank.get("trace")
            found = rank[source]["digests"]["0"]
            there = found.keys() & digests.keys()
            assert {key for key in digests if "/exp_avg" in key or key.endswith("/param")} <= there
            assert {key: found[key] for key in there} == {key: digests[key] for key in there}
