"""What most tests of several ranks begin with."""

from __future__ import annotations

import pytest

from dist.world import World


@pytest.fixture(scope="module")
def world():
    """Ranks that do what ``dist.training`` says; files with another script have a fixture of that name."""
    with World() as world:
        yield world
