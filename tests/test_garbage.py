"""Nothing is collected while a step is planned or played, and afterwards as before."""

from __future__ import annotations

import gc

import pytest

from holdfast.garbage import without_collection


@without_collection()
def collections_of(count):
    """How often garbage was collected while so many objects were made."""
    before = [each["collections"] for each in gc.get_stats()]
    kept = [[] for _ in range(count)]
    return sum(each["collections"] for each in gc.get_stats()) - sum(before) + 0 * len(kept)


def test_nothing_is_collected_inside_and_all_is_as_before_afterwards():
    assert collections_of(10_000) == 0 and gc.isenabled()
    with pytest.raises(ValueError), without_collection():
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    try:
        assert collections_of(10_000) == 0 and not gc.isenabled()
    finally:
        gc.enable()
