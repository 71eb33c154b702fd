"""What most tests of several ranks begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist.world import World


def pytest_collection_modifyitems(items):
    """Ranks wait for one another, and on a busy machine that takes many times what it does on an idle one."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="module")
def world():
    """Ranks that do what ``dist.training`` says; files with another script have a fixture of that name."""
    with World() as world:
        yield world
