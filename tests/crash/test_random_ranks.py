"""Random trainings of several ranks that are killed: all resume at one step, with the bits that they had there."""

from __future__ import annotations

import pytest

from combined import CAMPAIGN
from support.warm_python import call, environment_of

EACH = 4
"""Sequences of a test: some ten seconds of a processor."""


@pytest.mark.crash
@pytest.mark.parametrize("first", range(0, 400 if CAMPAIGN else EACH, EACH))
def test_random_trainings_of_ranks_are_brought_back(first):
    wrong = call("random_ranks", "play_some", env=environment_of(), first=first, last=first + EACH)
    assert not wrong, "\n\n".join(wrong)
