"""Scripts of two processes that train by other libraries are killed and end as if they never had been."""

from __future__ import annotations

import pytest

from combined import some_of
from dist.habits import ACCELERATE, LIGHTNING, TRAINER, killed_it_ends_the_same
from dist.world import World

SCRIPTS = {
    "accelerated": ("accelerate", ACCELERATE),
    "lightened": ("lightning", LIGHTNING),
    "trained": ("transformers", TRAINER),
}
STEPS = [lambda last: {2, last // 3, last - 1}, lambda last: {last // 3 + 1}, lambda last: {last}]


@pytest.mark.campaign
@pytest.mark.crash
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "script, habit", some_of(4, [(script, habit) for script, (_, of) in SCRIPTS.items() for habit in of])
)
def test_killed_again_and_again_they_end_the_same(tmp_path, script, habit):
    """Every third of them at other steps than tests/integrations kills in CI, the others at one of those."""
    library, habits = SCRIPTS[script]
    pytest.importorskip(library)
    steps = STEPS[list(habits).index(habit) % 3]
    killed_it_ends_the_same(World(script), tmp_path, 2, habits[habit], steps)
