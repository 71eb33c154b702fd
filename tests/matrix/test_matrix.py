"""The matrix: what one parallelism wrote, with records in the chain, any other resumes, every tensor bit for bit."""

from __future__ import annotations

import shutil

import pytest

from combined import CAMPAIGN
from dist.world import World
from matrix.cells import ROUNDED, SIZES, STEPS, WRITTEN, form_of, merged

pytestmark = pytest.mark.matrix

NUMBERED = list(enumerate(SIZES))
CELLS = [(source, target) for i, source in NUMBERED for j, target in NUMBERED if CAMPAIGN or (i - j) % 4 == 0]
"""All of them in a campaign, otherwise four of each row and column, the one on the diagonal among them."""


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


@pytest.fixture(scope="module")
def written(world, tmp_path_factory):
    """By topology and form: a run of ``WRITTEN`` steps, and what its ranks said."""
    made = {}

    def of(topology, form):
        if (topology, form) not in made:
            root = tmp_path_factory.mktemp(topology)
            order = {"topology": topology, "root": root, "steps": WRITTEN, "form": form, "told": [WRITTEN]}
            said = world.run(SIZES[topology], **order)
            made[topology, form] = root, merged(said, WRITTEN)
        return made[topology, form]

    return of


@pytest.fixture(scope="module")
def losses(world, tmp_path_factory):
    """By rank, of a training that was never interrupted, from where the others are resumed."""
    made = {}

    def of(topology, form):
        if (topology, form) not in made:
            root = tmp_path_factory.mktemp(topology) if topology == "engine" else None
            order = {"topology": topology, "root": root, "steps": STEPS, "form": form, "told": []}
            said = world.run(SIZES[topology], **order)
            made[topology, form] = [rank["losses"][WRITTEN:] for rank in said]
        return made[topology, form]

    return of


@pytest.mark.parametrize("source, target", CELLS)
def test_what_one_parallelism_wrote_any_other_resumes(world, written, losses, tmp_path, source, target):
    form = form_of(source, target)
    root, expected = written(source, form)
    order = {"topology": target, "root": tmp_path / "run", "steps": STEPS, "form": form, "told": [WRITTEN]}
    if (source == "engine") == (target == "engine"):
        shutil.copytree(root, tmp_path / "run")
    else:  # a run in memory and one out of core are two directories
        order["source"] = root
    said = world.run(SIZES[target], **order)
    assert merged(said, WRITTEN) == expected
    assert ("scalar/exp_avg" in expected and "empty/exp_avg" in expected) == form[-1]
    [expected_losses] = losses("plain", form)
    for rank in said:
        assert rank["resumed"] == WRITTEN
        assert rank["losses"] == pytest.approx(expected_losses, rel=1e-6)
    if source == target and source not in ROUNDED:
        assert [rank["losses"] for rank in said] == losses(source, form)
