"""Whose a replica's memory is."""

from __future__ import annotations

from dataclasses import replace

from holdfast.checkpoint.replica import shared_memory


def owned(path, memory, key, number=0):
    """A tier in ``memory`` of the run with ``key`` at ``path``."""
    place = shared_memory.place_of(path, memory, number=number)
    shared_memory.make(place)
    shared_memory.say_owner(place, path, key)
    return place


def test_tiers_of_other_runs_are_no_strays(tmp_path):
    memory, here = tmp_path / "memory", tmp_path / "here"
    places = {}
    for key in ("", "one", "two"):
        run = tmp_path / f"run{key}"
        run.mkdir(parents=True)
        memory.mkdir(exist_ok=True)
        places[key] = owned(run, memory, key)
        run.rename(tmp_path / f"away{key}")
    here.mkdir()
    assert shared_memory.strays_of(here, memory, "one") == [places["one"]]
    assert shared_memory.strays_of(here, memory, "") == []


def test_the_tier_that_holds_something_is_taken(tmp_path):
    """Though an older name, or one without anything in it, is there as well."""
    first, second = (owned(tmp_path, tmp_path, "key", number) for number in (0, 1))
    for place in (first, second):
        (place / "state").mkdir()
        assert shared_memory.place_for(tmp_path, tmp_path, "key") == place
        (place / "state").rmdir()


def test_an_inode_counts_with_its_device(tmp_path):
    owner = shared_memory.owner_of(owned(tmp_path, tmp_path, "key"))
    assert owner.is_run(tmp_path, "key") and not owner.is_run(tmp_path, "other")
    assert not replace(owner, device=owner.device + 1).is_at(tmp_path)
    assert replace(owner, key="").is_run(tmp_path, "key")


def test_a_tier_that_goes_meanwhile_is_no_ones(tmp_path, monkeypatch):
    """Another run may end, and remove its memory, between the listing and a look at it."""
    run = tmp_path / "run"
    run.mkdir()
    gone, own = owned(tmp_path, tmp_path, "other"), owned(run, tmp_path, "key")

    unpatched = type(tmp_path).glob

    def glob(folder, pattern):
        found = [*unpatched(folder, pattern)]
        shared_memory.remove(gone)
        return found

    monkeypatch.setattr(type(tmp_path), "glob", glob)
    assert shared_memory.places_of(run, tmp_path, "key") == [own] and not gone.exists()
