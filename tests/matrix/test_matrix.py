"""The matrix: what one parallelism wrote, with records in the chain, any other resumes, every tensor bit for bit."""

from __future__ import annotations

import shutil

import pytest

from dist.world import World
from matrix.cells import CELLS, ROUNDED, SIZES, STEPS, WRITTEN, form_of_cell, merged

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


@pytest.fixture(scope="module")
def written(world, tmp_path_factory):
    """By topology and form: a run of ``WRITTEN`` steps, the digests of its tensors, and by rank the losses of the same
    training that went on."""
    made = {}

    def of(topology, form):
        if (topology, form) not in made:
            root = tmp_path_factory.mktemp(topology)
            order = {"topology": topology, "form": form, "told": [WRITTEN]}
            said = world.run(SIZES[topology], root=root / "run", steps=WRITTEN, beyond=STEPS, **order)
            after = said
            if topology == "engine":  # which ends with its run
                after = world.run(1, root=root / "whole", steps=STEPS, **order)
            losses = [rank["losses"][WRITTEN:] for rank in after]
            made[topology, form] = root / "run", merged(said, WRITTEN), losses
        return made[topology, form]

    return of


@pytest.fixture(scope="module")
def resumed(world, written, tmp_path_factory):
    """By topology and form: what its ranks said that resumed each source in turn."""
    made = {}

    def of(target, form):
        if (target, form) not in made:
            root = tmp_path_factory.mktemp(target)
            sources = {}
            for source in (
                one for one, other in CELLS if other == target and form_of_cell(one, other) == form
            ):
                sources[source] = place = written(source, form)[0]
                if (source == "engine") == (target == "engine"):
                    shutil.copytree(place, root / source)
                    sources[source] = None
                # otherwise a run in memory and one out of core are two directories
            order = {"topology": target, "root": root, "steps": STEPS, "form": form, "told": [WRITTEN]}
            made[target, form] = world.run(SIZES[target], sources=sources, **order)
        return made[target, form]

    return of


@pytest.mark.parametrize("source, target", CELLS)
def test_what_one_parallelism_wrote_any_other_resumes(written, resumed, source, target):
    form = form_of_cell(source, target)
    _, expected, losses = written(source, form)
    said = [rank.get(source, rank) for rank in resumed(target, form)]
    assert merged(said, WRITTEN) == expected
    assert ("scalar/exp_avg" in expected and "empty/exp_avg" in expected) == form[-1]
    [expected_losses] = written("plain", form)[2]
    for rank in said:
        assert rank["resumed"] == WRITTEN
        assert rank["losses"] == pytest.approx(expected_losses, rel=1e-6)
    if source == target and source not in ROUNDED:
        assert [rank["losses"] for rank in said] == losses
