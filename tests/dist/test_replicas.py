"""Several ranks, each with a replica of what it stores: they hold what training holds, and all lead to one step."""

from __future__ import annotations

import os
import re
import shutil
import time

import pytest

from combined import one_in
from dist.world import ended
from holdfast.events import read_events
from holdfast.store.disk import Disk
from holdfast.store.reader import RunReader

KINDS = ["ddp", "fsdp"]


@pytest.fixture
def memory(tmp_path):
    """In place of ``/dev/shm``. Nothing is left in it when a run has come to its end."""
    (tmp_path / "memory").mkdir()
    yield tmp_path / "memory"
    assert os.listdir(tmp_path / "memory") == []


def run(world, tmp_path, kind, steps, ranks=2, **order):
    order = {"base_every": 1000, "deadline_seconds": 30, "replica": tmp_path / "memory", **order}
    return world.run(ranks, kind=kind, root=tmp_path / "run", steps=steps, **order)


def events(tmp_path, name):
    return [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == name]


def from_memory(tmp_path):
    return [event["step"] for event in events(tmp_path, "resumed")]


def wait_for(met, seconds=20):
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end
        time.sleep(0.01)


def goes_on(world, tmp_path, kind, died, steps=14, told="", rest_order=None, **order):
    """All ranks come to the end from one step, with the bits of a run that was never cut, and are ``told``."""
    whole = ended(world.run_undisturbed(2, kind=kind, steps=steps, **order))
    rest = ended(run(world, tmp_path, kind, steps, **{**order, **(rest_order or {})}))
    assert not told or all(any(told in text for text in said["warnings"]) for said in rest)
    for one, other in zip(whole, rest, strict=True):
        assert other["resumed"] == rest[0]["resumed"]
        assert other["losses"] == one["losses"][other["resumed"] :]
        assert other["digests"].items() <= one["digests"].items()
    return rest[0]["resumed"]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "kind, ranks, optimizer",
    [
        ("ddp", 2, "sgd"),
        ("ddp", 3, "adamw"),
        ("hsdp", 4, "adamw"),
        ("fsdp", 2, "fused"),
        ("fsdp", 3, "foreach"),
    ],
)
def test_the_replicas_are_what_the_trainers_are_after_every_step(
    world, tmp_path, memory, kind, ranks, optimizer
):
    """Each step is compared in full by digest, and what the replicas wrote of it is read back without one."""
    said = ended(run(world, tmp_path, kind, 5, ranks, optimizer=optimizer, save_every=1, keep_last=9))
    assert not events(tmp_path, "drift")
    for step in range(6):
        shutil.copytree(tmp_path / "run", tmp_path / f"{step}")
    common = {"kind": kind, "optimizer": optimizer}
    orders = [{"root": tmp_path / f"{n}", "steps": n, "resume": {"step": n}, **common} for n in range(6)]
    for step, found in enumerate(world.run_each(ranks, orders)):
        assert ended(found)[0]["digests"] == {str(step): said[0]["digests"][str(step)]}


def test_a_saved_state_is_the_trainers_though_one_rank_changed_its_part(world, tmp_path, memory):
    said = ended(run(world, tmp_path, "fsdp", 2, changed_at=[1, 2], save_at=2))
    assert [event["step"] for event in events(tmp_path, "base")] == [0, 2, 2]
    assert not events(tmp_path, "drift")
    rest = ended(world.run(2, kind="fsdp", root=tmp_path / "run", steps=2))
    assert [each["digests"] for each in rest] == [{"2": each["digests"]["2"]} for each in said]


@pytest.mark.parametrize("kind, killed", one_in(2, KINDS, [0, 1]))
def test_a_rank_is_killed_and_all_go_on_from_memory(world, tmp_path, memory, kind, killed):
    died = run(world, tmp_path, kind, 14, kill=[killed, 9])
    assert died[killed]["code"] == -9 and "error" in died[1 - killed]
    told = "param_groups[0]['initial_lr'] is 0.01 and not 0.02"
    step = goes_on(world, tmp_path, kind, died, told=told, rest_order={"optimizer": "faster adamw"})
    assert max(said["survives"] for said in died) <= step <= 8
    assert from_memory(tmp_path) == [step]
    assert max(said["durable"] for said in died) == 0


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("kind, after", one_in(2, KINDS, [{"0": 8, "1": 8}, {"0": 8}, {"1": 8}]))
def test_all_are_killed_and_go_on_from_the_newest_step_that_all_have(world, tmp_path, memory, kind, after):
    """Right after a step was handed over, by both or by one of them."""
    died = run(world, tmp_path, kind, 14, killed_after=after)
    assert [said["code"] for said in died].count(-9) == len(after)
    step = goes_on(world, tmp_path, kind, died)
    assert max(said["survives"] for said in died) <= step
    assert step in (7, 8) and from_memory(tmp_path) == [step]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_that_one_rank_alone_has_handed_over_is_left_out(world, tmp_path, memory, ahead):
    died = run(world, tmp_path, "ddp", 14, killed_after={str(ahead): 8}, kill=[1 - ahead, 8])
    assert [said["code"] for said in died] == [-9, -9]
    assert goes_on(world, tmp_path, "ddp", died) == 7
    assert from_memory(tmp_path) == [7]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_not_all_are_known_to_have_are_kept_as_records(world, tmp_path, memory, kind):
    """The replicas have heard of no step that all have, and are brought to one all the same."""
    died = run(world, tmp_path, kind, 14, kill=[0, 7], deaf_from=1, clip=False, clip_norm=0.5)
    assert max(said["survives"] for said in died) == 0
    wait_for(lambda: [event["step"] for event in events(tmp_path, "kept")] == [0, 0])
    assert goes_on(world, tmp_path, kind, died, clip=False, clip_norm=0.5) == 6
    assert from_memory(tmp_path) == [6]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_that_come_from_a_device_late_are_in_time_for_all(world, tmp_path, memory, ranks):
    """The device is played. What was killed with them is brought to one step by records, on that device as well."""
    order = {"device": True, "clip": False, "clip_norm": 0.5}
    said = ended(run(world, tmp_path, "ddp", 5, ranks, save_every=2, **order))
    assert not events(tmp_path, "drift") and not any("early" in each for each in said)
    shutil.rmtree(tmp_path / "run")
    died = run(world, tmp_path, "ddp", 14, 2, kill=[0, 7], deaf_from=1, **order)
    wait_for(lambda: [event["step"] for event in events(tmp_path, "kept")] == [0, 0])
    step = goes_on(world, tmp_path, "ddp", died, **order)
    assert from_memory(tmp_path) == [step] and 0 < step <= 6
    assert not events(tmp_path, "drift")


def lost(died, rank):
    """A replica was, and all ranks know of which."""
    assert "ReplicaDied" in died[rank]["error"]
    assert (
        f"rank {rank} failed: ReplicaDied" in died[1 - rank]["error"] or "Runtime" in died[1 - rank]["error"]
    )


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind, rank", one_in(2, KINDS, [0, 1]))
def test_where_one_replica_is_gone_the_disk_is_taken(world, tmp_path, memory, kind, rank):
    began = time.monotonic()
    died = run(world, tmp_path, kind, 40, kill_replica=[rank, 7], save_at=5, pause=0.05, deadline_seconds=75)
    assert time.monotonic() < began + 60, "a rank waits for its deadline"
    lost(died, rank)
    assert goes_on(world, tmp_path, kind, died) == 5
    assert from_memory(tmp_path) == []


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_with_its_replica_and_the_disk_is_taken(world, tmp_path, memory, rank):
    died = run(world, tmp_path, "fsdp", 14, kill_replica=[rank, 9], kill=[rank, 9], save_at=5)
    assert died[rank]["code"] == -9
    assert goes_on(world, tmp_path, "fsdp", died) == 5
    assert from_memory(tmp_path) == []


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind, base_every", one_in(2, KINDS, [3, 1000]))
def test_a_replica_that_has_drifted_is_made_anew(world, tmp_path, memory, kind, base_every):
    """It is told of where it is, and what goes to the disk is the trainers'."""
    said = ended(run(world, tmp_path, kind, 12, drift_at=[1, 4], base_every=base_every, pause=0.05))
    warned = [any("the replica has drifted" in text for text in each.get("warnings", [])) for each in said]
    assert warned == [False, True]
    assert goes_on(world, tmp_path, kind, said) == 12


@pytest.mark.parametrize("kind, rank", one_in(2, KINDS, [0, 1]))
def test_a_base_for_which_one_replica_has_drifted_is_given_up_by_all(world, tmp_path, memory, kind, rank):
    """A moment is another one, which only the comparison in full finds; all make another base when it is told."""
    order = {"drift_at": [rank, 6], "drifting_slot": "exp_avg", "base_every": 6, "settle_at": [rank, 7]}
    said = run(world, tmp_path, kind, 11, **order)
    assert "exp_avg differs" in ended(said)[rank]["warnings"][0]
    first, instead, last = [event["step"] for event in events(tmp_path, "base")]
    assert (first, last) == (0, 11) and 6 < instead < 11
    assert goes_on(world, tmp_path, kind, said) == 11


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_replica_has_drifted_none_is_taken(world, tmp_path, memory, rank):
    """The trainers die before they hear of it."""
    order = {"drift_at": [rank, 9], "settle_at": ["all", 9], "kill": ["all", 10], "save_at": 5}
    died = run(world, tmp_path, "ddp", 14, numb=True, **order)
    assert {said["code"] for said in died} == {-9}
    assert goes_on(world, tmp_path, "ddp", died) == 5
    assert from_memory(tmp_path) == []


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_here_is_that_of_torch(world, tmp_path, memory, kind):
    """With and without replicas; what has been reduced is copied while backward runs, and not again."""
    whole = ended(world.run_undisturbed(2, kind=kind, steps=6))
    here = {"clip": False, "clip_norm": 0.5}
    beside = ended(run(world, tmp_path, kind, 6, **here))
    alone = ended(world.run(2, kind=kind, root=tmp_path / "alone", steps=6, **here))
    assert whole[0]["digests"] == beside[0]["digests"] == alone[0]["digests"]
    assert [said["copied_again"] for said in beside] == [0, 0]
    assert sum(said["early"] for said in beside) == (72 if kind == "fsdp" else 36)  # shards, or parameters
    assert goes_on(world, tmp_path, kind, beside, **here) == 6


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "kind, ranks, other, others, clips",
    [
        ("ddp", 2, "ddp", 3, {"clip": False, "clip_norm": 0.5}),
        ("fsdp", 3, "ddp", 2, {"clip": False, "clip_norm": 0.5}),
        ("fsdp", 2, "plain", 1, {}),
        ("fsdp", 2, "ddp", 2, {}),
    ],
)
def test_under_another_parallelism_the_base_is_taken_that_orphaned_replicas_made(
    world, tmp_path, memory, kind, ranks, other, others, clips
):
    order = {"save_at": 5, "linger_seconds": 1.0, "asked_seconds": 20.0, "deaf_from": 6}
    died = run(world, tmp_path, kind, 14, ranks, kill=[0, 9], **order, **clips)
    assert max(said["durable"] for said in died) == 5
    rest = ended(run(world, tmp_path, other, 9, others, **clips))
    assert rest[0]["resumed"] == 8 and from_memory(tmp_path) == []
    assert rest[0]["digests"]["8"] == died[0]["digests"]["8"]


def test_replicas_to_which_nobody_comes_clean_up_and_the_disk_has_their_step(world, tmp_path, memory):
    died = run(world, tmp_path, "fsdp", 14, kill=[0, 9], linger_seconds=0.3)
    wait_for(lambda: os.listdir(memory) == [])
    rest = ended(world.run(2, kind="fsdp", root=tmp_path / "run", steps=9))
    assert rest[0]["resumed"] == 8 and rest[0]["digests"]["8"] == died[0]["digests"]["8"]
    assert os.listdir(tmp_path / "run" / "scratch") == []


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_run_that_is_killed_again_and_again_loses_no_step_that_all_had(world, tmp_path, memory, kind):
    """Also right after it was resumed, when some replicas have begun anew and others have not."""
    survives = 0
    for rank, step in ((0, 4), (1, 6), ("all", 9)):
        died = run(world, tmp_path, kind, 14, kill=[rank, step], base_every=5)
        assert died[0]["resumed"] == died[1]["resumed"] >= survives
        survives = max(said["survives"] for said in died)
    assert goes_on(world, tmp_path, kind, died) >= survives >= 6


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "failpoint, rank", [("after_state_handed", 0), ("after_gradient_copied", 1), ("after_step_handed", 0)]
)
def test_a_rank_that_dies_as_it_resumes_takes_nothing_from_the_others(
    world, tmp_path, memory, rank, failpoint
):
    """The steps in memory are still there, though some replicas have a new beginning and others none."""
    order = {"orphans_persist": False}
    run(world, tmp_path, "fsdp", 14, killed_after={"0": 8, "1": 8}, **order)
    died = run(world, tmp_path, "fsdp", 14, failpoint=[rank, failpoint], **order)
    assert died[rank]["code"] == -9 and died[rank].get("resumed", 8) == 8, died
    with RunReader(tmp_path / "run") as reader:
        durable = reader.head().step  # the base that resuming began may have been made before the rank died
    assert goes_on(world, tmp_path, "fsdp", died) >= 8
    assert len(from_memory(tmp_path)) == 2 or durable >= 8


def test_what_orphaned_replicas_have_no_room_for_on_the_disk_stays_in_memory(world, tmp_path, memory):
    died = run(world, tmp_path, "ddp", 14, kill=[0, 9], disk_fails_orphans=True, linger_seconds=0.1)
    wait_for(lambda: len(events(tmp_path, "replica_failed")) == 2)
    assert goes_on(world, tmp_path, "ddp", died) == 8
    assert from_memory(tmp_path) == [8]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("who", [0, 1])
def test_a_mistake_of_one_rank_loses_no_step(world, tmp_path, memory, who):
    died = run(world, tmp_path, "ddp", 14, raises=[who, 9])
    assert died[who]["error"] == "ValueError: a mistake of the script"
    step = goes_on(world, tmp_path, "ddp", died)
    assert step == 8 and from_memory(tmp_path) == [8]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_stop_at_one_step_on_a_sigterm_and_the_disk_has_it(world, tmp_path, memory, kind):
    died = run(world, tmp_path, kind, 5000, signal_at=[1, 5])
    assert [said["error"] for said in died] == ["SystemExit: 143"] * 2
    rest = ended(world.run(2, kind=kind, root=tmp_path / "run", steps=died[0]["at"]))
    assert died[0]["at"] == died[1]["at"] == rest[0]["resumed"]


def test_a_parameter_that_is_trained_later_is_handed_over_anew(world, tmp_path, memory):
    died = run(world, tmp_path, "ddp", 14, unfreeze_at=4, kill=[1, 9])
    whole = ended(world.run_undisturbed(2, kind="ddp", steps=14, unfreeze_at=4))
    rest = ended(run(world, tmp_path, "ddp", 14, unfreeze_at=9))
    assert rest[0]["resumed"] == 8 and from_memory(tmp_path) == [8]
    assert rest[0]["digests"].items() <= whole[0]["digests"].items()
    assert died[0]["digests"].items() <= whole[0]["digests"].items()


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_ranks_that_have_nothing_to_store_have_replicas_all_the_same(world, tmp_path, memory, kind):
    """A model with fewer parameters than there are ranks, and no buffers."""
    died = run(world, tmp_path, kind, 14, tiny=True, kill=[0, 9], base_every=3)
    assert goes_on(world, tmp_path, kind, died, tiny=True) == 8
    assert from_memory(tmp_path) == [8]


def test_an_earlier_step_is_taken_from_the_disk_though_later_ones_are_kept(world, tmp_path, memory):
    run(world, tmp_path, "ddp", 14, kill=[0, 12], save_at=5, pause=0.05)
    rest = ended(run(world, tmp_path, "ddp", 7, resume={"before": 8}))
    assert [said["resumed"] for said in rest] == [5, 5] and from_memory(tmp_path) == []


def test_what_needs_all_parameters_for_an_update_is_refused(world, tmp_path, memory):
    said = run(world, tmp_path, "ddp", 3, optimizer="global")
    assert all("Global needs all to update any of it" in each["error"] for each in said)
    assert not (tmp_path / "run").exists()


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "ranks, kind, others, why",
    [(2, "ddp", 2, "and rank 0 and 1 of 2 has nothing that goes with it"),
     (3, "fsdp", 2, "and rank 0 and 1 of 2 has nothing that goes with it"),
     (2, "plain", 1, "which go with other ranks than these"),
     (2, "fsdp", 3, "and rank 0 and 1 and 2 of 3 has nothing that goes with it")],
)  # fmt: skip
def test_what_was_kept_of_another_cut_is_not_taken_and_it_is_said(
    world, tmp_path, memory, ranks, kind, others, why
):
    """The disk has an older step, and memory one that these ranks cannot have, which goes when they have begun."""
    order = {"kill": [0, 9], "save_at": 5, "orphans_persist": False}
    died = run(world, tmp_path, "fsdp", 14, ranks, **order)
    rest = ended(run(world, tmp_path, kind, 7, others))
    assert rest[0]["resumed"] == 5 and from_memory(tmp_path) == []
    assert rest[0]["digests"]["5"] == died[0]["digests"]["5"]
    for said in rest:
        assert f"replicas kept steps up to 8 in memory, {why}: the disk was taken" in said["warnings"][0]
    assert [event["kept_step"] for event in events(tmp_path, "not_taken")] == [8]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "topology, ranks", [("pp2v2", 2), ("tp2", 2), ("ep2", 2), ("pp2", 2), ("fsdp2xtp2", 4)]
)
def test_ranks_that_hold_different_tensors_go_on_from_memory(world, tmp_path, memory, topology, ranks):
    """Stages of a pipeline, experts, and what tensor parallelism cuts."""
    order = {"topology": topology, "steps": 6, "base_every": 1000}
    whole = world.run_undisturbed(ranks, **order)
    order |= {"root": tmp_path / "run", "replica": memory}
    died = world.run(ranks, fails_after=4, **order)
    assert [said["error"] for said in died] == ["ValueError: a mistake of the script"] * ranks
    rest = world.run(ranks, **order)
    assert from_memory(tmp_path) == [4] and not events(tmp_path, "drift")
    for one, other in zip(whole, rest, strict=True):
        assert other["finished"] and other["resumed"] == 4 and other["losses"] == one["losses"][4:]
        assert other["digests"] == {step: one["digests"][step] for step in ("4", "5", "6")}


def test_of_a_pipeline_no_rank_has_the_norm(world, tmp_path):
    for said in world.run(2, topology="pp2", root=tmp_path / "run", steps=1, clip_norm=0.5):
        assert "BadInput: clip_norm = 0.5: this rank does not hold " in said["error"]


@pytest.mark.parametrize("more", [{}, {"save_at": 8}])
def test_a_rank_that_was_killed_is_named_to_who_waits_for_it(world, tmp_path, memory, more):
    """In ``close`` and in ``save``. No collective of the training tells of it, and the lock is its replica's."""
    died = run(world, tmp_path, "plain", 8, 3, kill=[1, 5], **more)
    for other in (died[0], died[2]):
        assert "RankFailed: rank 1 has ended without a word" in other["error"], other
    rest = ended(run(world, tmp_path, "plain", 8, 3))
    assert [said["resumed"] for said in rest] == [4] * 3 and from_memory(tmp_path) == [4]


def test_a_rank_that_died_with_its_replica_is_named_to_who_waits_for_it(world, tmp_path, memory):
    """Within seconds, and nobody is promised what it had."""
    began = time.monotonic()
    died = run(
        world, tmp_path, "plain", 20, 3, kill=[1, 7], kill_replica=[1, 7], save_at=5, deadline_seconds=75
    )
    assert time.monotonic() < began + 60
    for other in (died[0], died[2]):
        assert "RankFailed: rank 1 has ended without a word" in other["error"], other
        assert "Step 5 is with the replicas, or durable, on all ranks" in other["error"]
    rest = ended(run(world, tmp_path, "plain", 8, 3))
    assert [said["resumed"] for said in rest] == [5] * 3 and from_memory(tmp_path) == []


def test_a_rank_that_does_not_come_is_named_by_those_who_wait_for_it(world, tmp_path, memory):
    """No replica is blamed, since all wait for steps of that rank."""
    died = run(world, tmp_path, "plain", 20, 3, sleeps_at=[1, 4, 8.0], deadline_seconds=4)
    told = "rank 1 has got to step 3 of "
    named = [rank for rank in (0, 2) if f"RankFailed: {told}" in died[rank]["error"]]
    assert named
    for rank in (0, 2):  # whoever comes second may find that the first has given up, and names that one
        assert rank in named or "RankFailed: rank 0, which the others ask" in died[rank]["error"]
    assert all("it is slow or has been stopped, and has not ended" in died[rank]["error"] for rank in named)
    rest = ended(run(world, tmp_path, "plain", 5, 3))
    assert [said["resumed"] for said in rest] == [3] * 3
    assert from_memory(tmp_path) in ([3], [])  # the replicas may have written it meanwhile


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_share_of_a_base_is_waited_for_and_its_rank_is_named(world, tmp_path, memory, slow):
    """As long as it gives signs of life."""
    said = run(
        world,
        tmp_path,
        "ddp",
        7,
        slow_share=[slow, 9.0, "beats"],
        base_every=6,
        deadline_seconds=4,
        save_at=3,
    )
    assert goes_on(world, tmp_path, "ddp", ended(said)) == 7
    [warned] = said[1 - slow]["warnings"]
    assert f"rank {slow} has not written its share of the base of step 3 for " in warned
    assert "It is slow and goes on, so it is waited for" in warned


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("hangs", [0, 1])
def test_a_replica_that_hangs_in_its_share_is_named_with_its_rank(world, tmp_path, memory, hangs):
    died = run(world, tmp_path, "ddp", 7, slow_share=[hangs, 10.0, "silent"], deadline_seconds=4, save_at=3)
    assert re.search(r"WriterHung: the replica has said nothing for \d+ s", died[hangs]["error"])
    assert f"RankFailed: rank {hangs} failed: WriterHung" in died[1 - hangs]["error"]
    assert goes_on(world, tmp_path, "ddp", died) in (0, 3)


@pytest.mark.parametrize("how", ["drifted", "died"])
def test_what_a_replica_has_lost_is_promised_by_no_rank_once_it_is_heard_of(world, tmp_path, memory, how):
    """The other ranks go on training meanwhile, and have heard of it when their step is over."""
    cause = {"drift_at": [1, 6]} if how == "drifted" else {"kill_replica": [1, 7]}
    survives = [1, 2, 3, 4, 5, 3, 7, 8, 9] if how == "drifted" else [1, 2, 3, 4, 5, 6, 3]
    said = run(world, tmp_path, "plain", 9, 2, pause=0.1, save_at=3, survives_as=survives, **cause)
    told = said[0]["survived"]
    assert told[:7] == survives[:7]
    if how == "drifted":
        assert ended(said)[0]["survived"] == survives
        return
    assert set(told[6:]) == {3}
    assert "rank 1 failed: ReplicaDied" in said[0]["error"]
    assert "Step 3 is with the replicas, or durable, on all ranks" in said[0]["error"]
    rest = ended(run(world, tmp_path, "plain", 5))
    assert [each["resumed"] for each in rest] == [3, 3]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("deaf", [0, 1])
def test_a_changed_form_that_not_all_replicas_know_to_be_with_all_takes_no_step(
    world, tmp_path, memory, deaf
):
    """All trainers die when some replicas have the new form, and others still have the one before."""
    order = {"unfreeze_at": 4, "pause": 0.2}
    died = run(
        world,
        tmp_path,
        "ddp",
        14,
        deaf_replica=[deaf, 4],
        killed_after={str(1 - deaf): 4},
        deadline_seconds=10,
        **order,
    )
    assert died[1 - deaf]["code"] == -9 and died[deaf]["at"] == 4 and "error" in died[deaf]
    whole = ended(world.run_undisturbed(2, kind="ddp", steps=8, unfreeze_at=4))
    rest = ended(run(world, tmp_path, "ddp", 8, unfreeze_at=5))
    assert rest[0]["resumed"] == 4 and from_memory(tmp_path) == [4]
    assert rest[0]["digests"].items() <= whole[0]["digests"].items()


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("rank", [0, 1])
def test_steps_that_wait_are_kept_where_a_replica_fails_with_its_disk(world, tmp_path, memory, rank):
    """Those that were handed over while it tried to write."""
    died = run(
        world,
        tmp_path,
        "ddp",
        99,
        slow_share=[rank, 20.0, "fails"],
        base_every=3,
        orphans_persist=False,
    )
    assert "DiskFull: no space left" in died[rank]["error"]
    assert f"rank {rank} failed: DiskFull" in died[1 - rank]["error"] or "Runtime" in died[1 - rank]["error"]
    assert [said["at"] for said in died] == [6, 6]  # where the base before is waited for
    assert goes_on(world, tmp_path, "ddp", died) == 6
    assert from_memory(tmp_path) == [6]


def test_orphaned_replicas_wait_no_longer_for_one_that_has_given_up(world, tmp_path, memory):
    """And the run can be opened by others, since the first one lets go of it."""
    run(world, tmp_path, "fsdp", 14, kill=["all", 9], orphan_fails=1, linger_seconds=30)
    wait_for(lambda: not Disk(tmp_path / "run").is_locked("lock"), 15)
    assert ended(run(world, tmp_path, "fsdp", 9))[0]["resumed"] == 8


def test_ranks_that_would_make_bases_at_other_steps_are_refused(world, tmp_path, memory):
    for said in run(world, tmp_path, "ddp", 3, options_of={0: {"base_every": 4}, 1: {"base_every": 2}}):
        assert "BadInput: base_every is not the same on all ranks (2, 4)" in said["error"]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("who", [0, 1])
def test_what_one_rank_is_refused_every_rank_is_told_at_once(world, tmp_path, memory, who):
    said = run(world, tmp_path, "ddp", 3, options_of={who: {"storage": "1GB"}})
    assert "BadInput: storage = 1GB is for records" in said[who]["error"]
    assert f"RankFailed: rank {who} failed" in said[1 - who]["error"]
    assert not (tmp_path / "run").exists()


def test_ranks_that_see_another_directory_are_refused_with_replicas_too(world, tmp_path):
    (tmp_path / "memory").mkdir()
    said = run(world, tmp_path, "ddp", 5, elsewhere=1)
    assert "RunMismatch" in said[1]["error"] and "one directory" in said[1]["error"]
    assert "rank 1 failed" in said[0]["error"]
    assert all("at" not in each for each in said)
