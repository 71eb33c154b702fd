"""Random trainings in processes that are killed: each resume has the bits of a plain copy, or says what is lost."""

from __future__ import annotations

import pytest

from combined import CAMPAIGN
from support.warm_python import call, environment_of

EACH = 8
"""Sequences of a test: some seconds of a processor."""


@pytest.mark.crash
@pytest.mark.parametrize("first", range(0, 1000 if CAMPAIGN else EACH, EACH))
def test_random_trainings_are_brought_back(first):
    wrong = call("random_runs", "play_some", env=environment_of(), first=first, last=first + EACH)
    assert not wrong, "\n\n".join(wrong)
