"""The matrix: what one parallelism wrote, with records in the chain, any other resumes, every tensor bit for bit."""

from __future__ import annotations

import shutil

import pytest

from dist.world import World

pytestmark = pytest.mark.matrix

WRITTEN, STEPS = 3, 8
SIZES = {
    "plain": 1, "ddp2": 2, "ddp4": 4, "fsdp2": 2, "fsdp3": 3, "fsdp4": 4, "hsdp2x2": 4, "tp2": 2, "tp4": 4,
    "fsdp2xtp2": 4, "pp2": 2, "pp4": 4, "pp2v2": 2, "ep2": 2, "ep4": 4,
    "engine": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


def merged(ranks, step):
    """The digests of all tensors at ``step``, which no two ranks may have otherwise."""
    found = {}
    assert all(rank.get("finished") for rank in ranks), [rank.get("trace", rank)[-900:] for rank in ranks]
    for rank in ranks:
        for key, digest in rank["digests"][str(step)].items():
            assert found.setdefault(key, digest) == digest, key
    return found


def heads(*topologies):
    return (12, 4) if any("tp4" in each for each in topologies) else (6, 2)


@pytest.fixture(scope="module")
def written(world, tmp_path_factory):
    """By topology and number of heads: a run of ``WRITTEN`` steps, and what its ranks said."""
    made = {}

    def of(topology, sizes):
        if (topology, sizes) not in made:
            root = tmp_path_factory.mktemp(topology)
            said = world.run(SIZES[topology], topology=topology, root=root, steps=WRITTEN, sizes=sizes)
            made[topology, sizes] = root, merged(said, WRITTEN)
        return made[topology, sizes]

    return of


@pytest.fixture(scope="module")
def losses(world):
    """Of a plain loop that was never interrupted."""
    made = {}

    def of(sizes):
        if sizes not in made:
            made[sizes] = world.run(1, topology="plain", steps=STEPS, sizes=sizes)[0]["losses"]
        return made[sizes]

    return of


@pytest.mark.parametrize("target", SIZES)
@pytest.mark.parametrize("source", SIZES)
def test_what_one_parallelism_wrote_any_other_resumes(world, written, losses, tmp_path, source, target):
    sizes = heads(source, target)
    root, expected = written(source, sizes)
    order = {"topology": target, "root": tmp_path / "run", "steps": STEPS, "sizes": sizes}
    if (source == "engine") == (target == "engine"):
        shutil.copytree(root, tmp_path / "run")
    else:  # a run in memory and one out of core are two directories
        order["source"] = root
    said = world.run(SIZES[target], **order)
    assert merged(said, WRITTEN) == expected
    for rank in said:
        assert rank["resumed"] == WRITTEN
        assert rank["losses"] == pytest.approx(losses(sizes)[WRITTEN:], rel=1e-6)
