"""Random trainings in processes that are killed: each resume has the bits of a plain copy, or says what is lost."""

from __future__ import annotations

import pytest

from combined import CAMPAIGN
from support.warm_python import call, environment_of

EACH = {"random_runs": 8, "random_ranks": 4}
"""Sequences of a test, of one process and of several ranks: some seconds of a processor."""
MOST = {"random_runs": 1000, "random_ranks": 400}
"""Sequences of a campaign."""


@pytest.mark.crash
@pytest.mark.parametrize(
    ("tester", "first"),
    [
        (name, first)
        for name, each in EACH.items()
        for first in range(0, MOST[name] if CAMPAIGN else each, each)
    ],
)
def test_random_trainings_are_brought_back(tester, first):
    wrong = call(tester, "play_some", env=environment_of(), first=first, last=first + EACH[tester])
    assert not wrong, "\n\n".join(wrong)
