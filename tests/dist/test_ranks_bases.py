"""Bases of several ranks: what is made of several parts brings back what was, whenever it was made,
whatever is lost."""

from __future__ import annotations

import pytest

from combined import one_in
from dist.world import ended, flip
from holdfast.events import read_events
from holdfast.store.reader import RunReader


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("kind, ranks", one_in(2, ["ddp", "fsdp"], [2, 3]))
def test_a_rank_that_stores_nothing_takes_part_all_the_same(world, tmp_path, kind, ranks):
    """There is one parameter, and there are no buffers."""
    whole = ended(world.run_undisturbed(ranks, kind=kind, steps=21, width=0))
    options = {"kind": kind, "root": tmp_path, "width": 0, "base_every": 3}
    ended(world.run(ranks, steps=20, pause=0.03, **options))
    with RunReader(tmp_path) as reader:
        assert reader.head().step > 3 and reader.verify(reader.head()) == []
    after = ended(world.run(ranks, steps=21, **options))
    assert after[0]["resumed"] == 20
    assert after[0]["digests"].items() <= whole[0]["digests"].items()
    alone = ended(world.run(1, steps=22, **options))
    assert alone[0]["digests"]["21"] == after[0]["digests"]["21"]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "more", [{"average": True}, *({"optimizer": name} for name in ("apollo", "global", "8bit"))]
)
def test_what_updates_all_parameters_at_once_comes_back_from_bases_of_one_step(world, tmp_path, more):
    """An optimizer that is not elementwise, and averages that ``after_update`` keeps."""
    whole = ended(world.run_undisturbed(2, kind="ddp", steps=26, **more))
    options = {"kind": "ddp", "root": tmp_path / "run", "base_every": 4, "pause": 0.03, **more}
    ended(world.run(2, steps=23, **options))
    with RunReader(tmp_path / "run") as reader:
        newest = reader.head()
    rest = ended(world.run(2, steps=26, **options))
    assert rest[0]["resumed"] == 23
    assert rest[0]["digests"].items() <= whole[0]["digests"].items()
    assert newest.step == 20 and newest.oldest_step == 20


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_saves_between_bases_that_are_made_beside_training_are_all_whole(world, tmp_path, every):
    options = {"kind": "ddp", "root": tmp_path, "base_every": 2, "unit_bytes": 2000, "keep_last": 99}
    said = ended(world.run(2, steps=20, save_every=every, pause=0.02, **options))
    assert [each["saved"] for each in said] == [20 // every * every] * 2
    with RunReader(tmp_path) as reader:
        for ref in reader.commits():
            assert reader.verify(reader.load(ref)) == []
        steps = {ref.step for ref in reader.commits()}
    assert steps >= set(range(every, 21, every))


def test_a_base_that_one_rank_has_shared_is_not_published_while_its_files_are_written_anew(world, tmp_path):
    """Many a save comes between the last share of a base and its manifest."""
    options = {"kind": "ddp", "root": tmp_path, "base_every": 2, "keep_last": 99, "unit_bytes": 100_000}
    ended(world.run(2, steps=40, pause=0.03, save_every=12, slow_publish=0.5, **options))
    with RunReader(tmp_path) as reader:
        for ref in reader.commits():
            assert reader.verify(reader.load(ref)) == []


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("kind, worlds", one_in(2, ["ddp", "fsdp"], [(2, 3), (3, 2), (1, 2), (2, 1)]))
def test_records_of_another_cut_are_not_replayed_on_a_base_before_it(world, tmp_path, kind, worlds):
    """The base that the change of ranks made is damaged, so the run goes on from where the ranks were others."""
    one, other = worlds
    before = ended(world.run(one, kind=kind, root=tmp_path, steps=5, base_every=100))
    ended(world.run(other, kind=kind, root=tmp_path, steps=9, base_every=100))
    with RunReader(tmp_path) as reader:
        newest = reader.head()
        assert (newest.timeline, newest.step) == (2, 5)
    for file in newest.files.values():
        flip(tmp_path / file.path, file.bytes // 2)
    after = ended(world.run(other, kind=kind, root=tmp_path, steps=6))
    assert after[0]["resumed"] == 5
    assert after[0]["digests"]["5"] == before[0]["digests"]["5"]


def test_ranks_that_ask_for_different_steps_are_refused(world, tmp_path):
    ended(world.run(2, kind="ddp", root=tmp_path, steps=9, save_at=6, keep_last=9))
    said = world.run(2, kind="ddp", root=tmp_path, steps=9, resume_of={"0": {"step": 5}, "1": {"step": 8}})
    assert all("resume was called differently" in each["error"] for each in said)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "who, kind, more",
    [(0, "ddp", {"average": True}), (0, "ddp", {}), (1, "fsdp", {}), (1, "ddp", {"base_every": 3})],
)
def test_steps_that_one_rank_could_not_record_are_followed_by_a_base_of_all(world, tmp_path, kind, who, more):
    """Its disk is behind for a while, and nobody waits for it but for that base."""
    options = {"kind": kind, "when_behind": "commit", "base_every": 1000, "deadline_seconds": 40} | more
    said = ended(world.run(2, root=tmp_path, steps=60, slow=[who, 5, 30], **options))
    assert said[who]["lost"] > 3
    assert all(each["recording"] and each["durable"] == 60 for each in said)
    after = ended(world.run(2, root=tmp_path, steps=61, **options))
    assert after[0]["resumed"] == 60 and after[0]["digests"]["60"] == said[0]["digests"]["60"]


def test_what_was_durable_before_a_gap_of_one_rank_is_there_after_a_kill_in_it(world, tmp_path):
    options = {"kind": "plain", "when_behind": "commit", "base_every": 1000, "deadline_seconds": 40}
    cut = world.run(2, root=tmp_path, steps=60, slow=[1, 5, 60], kill=[1, 14], **options)
    assert cut[1]["code"] == -9 and cut[1]["lost"] > 0
    after = ended(world.run(2, root=tmp_path, steps=60, **options))
    durable = max(each["durable"] for each in cut)
    assert all(durable <= each["resumed"] < 14 for each in after)


def test_a_gap_says_what_is_durable_on_all_ranks(world, tmp_path):
    """The first loses a step while the other is behind; what its log says is what a resume asks for."""
    options = {"kind": "plain", "when_behind": "commit", "base_every": 1000, "deadline_seconds": 40}
    cut = world.run(2, root=tmp_path, steps=60, slow=[1, 5, 60], lose_at=[0, 9], kill=[1, 14], **options)
    assert cut[1]["code"] == -9
    gaps = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "gap"]
    assert gaps[0]["step"] == 9
    after = ended(world.run(2, root=tmp_path, steps=60, **options))
    assert all(gaps[0]["durable_step"] <= each["resumed"] < 14 for each in after)


@pytest.mark.parametrize("more, who", one_in(2, [{}, {"wait_at": 9}, {"save_at": 9}], [0, 1]))
def test_a_step_that_one_rank_lost_is_made_durable_by_what_all_wait_for(world, tmp_path, who, more):
    """In ``close``, ``wait`` and ``save``, which the others call knowing nothing of it."""
    options = {"kind": "ddp", "when_behind": "commit", "base_every": 1000, "deadline_seconds": 40}
    said = ended(world.run(2, root=tmp_path, steps=9, lose_at=[who, 9], **options, **more))
    assert [each["durable"] for each in said] == [9, 9]
    with RunReader(tmp_path) as reader:
        assert reader.head().step == 9 and reader.verify(reader.head()) == []
    after = ended(world.run(2, root=tmp_path, steps=10, **options))
    assert after[0]["resumed"] == 9 and after[0]["digests"]["9"] == said[0]["digests"]["9"]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    ("kind", "what", "who"),
    [
        *((kind, {"halved_at": 4}, [0, 1]) for kind in ("ddp", "fsdp")),
        ("fsdp", {"forgets": [1, 4]}, [1]),
        ("ddp", {"forgets": ["all", 4]}, [0, 1]),
    ],
)
def test_what_a_script_does_to_the_state_after_a_step_is_followed_by_a_base_of_all(
    world, tmp_path, kind, what, who
):
    """No record of the step would bring it back. One rank alone may know."""
    options = {"kind": kind, "root": tmp_path, "base_every": 1000}
    killed = world.run(2, steps=9, wait_at=7, killed_after={"0": 8, "1": 8}, **what, **options)
    told = [" ".join(each.get("warnings", [])) for each in killed]
    assert [rank for rank, text in enumerate(told) if "changed otherwise" in text] == who
    rest = world.run(2, steps=9, **options)
    assert all(each.get("finished") for each in rest), rest
    done = rest[0]["resumed"]
    assert done in (7, 8) and rest[0]["digests"][str(done)] == killed[0]["digests"][str(done)]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "more, save_at", one_in(2, [{"base_every": 2}, {"replica": "memory"}, {"base_every": 1000}], [4, None])
)
def test_a_schedule_that_is_moved_after_a_step_is_in_what_save_and_close_make(world, tmp_path, save_at, more):
    """Of the step there may be a base already."""
    options = {"kind": "ddp", "root": tmp_path / "run", **more}
    if "replica" in options:
        (tmp_path / "memory").mkdir()
        options["replica"] = tmp_path / "memory"
    before = ended(world.run(2, steps=4, moved_at=4, save_at=save_at, **options))
    after = ended(world.run(2, steps=5, **options))
    assert [each["resumed"] for each in after] == [4, 4]
    assert [each["first_rate"] for each in after] == [each["rate"] for each in before]
    assert before[0]["rate"] < before[0]["first_rate"]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_names_its_frozen_files_again(world, tmp_path, kind):
    """Also after a resume; other ranks write their own once, and go on from these."""

    def frozen(manifest):
        return {name: (f.path, f.checksums) for name, f in manifest.files.items() if "frozen-" in name}

    def bases():
        with RunReader(tmp_path) as reader:
            assert all(reader.verify(reader.load(ref)) == [] for ref in reader.commits())
            return [reader.load(ref) for ref in reader.line()]

    options = {"kind": kind, "root": tmp_path, "base_every": 3, "keep_last": 99, "pause": 0.04}
    options["unit_bytes"] = 100_000
    before = ended(world.run(2, steps=20, **options))
    after = ended(world.run(2, steps=40, **options))
    assert after[0]["resumed"] == 20
    newest, *others = bases()
    assert newest.step > 20 and len(others) > 3
    assert all(frozen(each) == frozen(newest) != {} for each in others)
    other = ended(world.run(3, steps=60, **options))
    assert other[0]["resumed"] == 40
    now, *_ = bases()
    assert now.step > 40 and frozen(now).keys() != frozen(newest).keys()
    last = ended(world.run(3, steps=61, **options))
    assert last[0]["digests"]["60"] == other[0]["digests"]["60"] and before[0]["digests"]
