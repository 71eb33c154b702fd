"""A loop whose steps ``every="auto"`` copies into memory is killed in the middle of a copy, at each point of its
publication and at any moment, and comes back with no acknowledged step lost, to the bits of a loop that ran through."""

from __future__ import annotations

import pytest

from combined import one_in
from holdfast import failpoints

STEPS = 40
IN_COPIES = [*failpoints.MEMORY, *failpoints.NAMES[2:-1]]
"""A copy is published as any commit is. The points before are of files on the disk."""


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    outcome = server.run(survive=True, root=tmp_path_factory.mktemp("undisturbed"), steps=STEPS)
    assert outcome.finished, outcome.error
    return outcome


@pytest.mark.crash
@pytest.mark.parametrize("failpoint, arrival", one_in(4, IN_COPIES, [3, 5, 8, 11]))
def test_killed_in_a_copy_no_acknowledged_step_is_lost(server, undisturbed, tmp_path, failpoint, arrival):
    memory = tmp_path / "memory"
    memory.mkdir()
    options = {
        "survive": True,
        "root": tmp_path / "run",
        "steps": STEPS,
        "every": "auto",
        "copies_in": memory,
    }
    outcome = server.run(failpoint=f"{failpoint}:{arrival}", **options)
    assert outcome.killed, outcome
    last = server.run(**options)
    assert last.finished, last.error
    assert last.resumed >= outcome.durable
    assert last.losses == undisturbed.losses[len(undisturbed.losses) - len(last.losses) :]
    assert last.digest == undisturbed.digest
    assert list(memory.iterdir()) == []
