"""A trainer with a replica is killed, at random moments and at every failpoint, alone or together with its replica.
What goes on from there has the bits of a loop that was never killed."""

from __future__ import annotations

import os
import random
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from fork_server import at_random
from holdfast import failpoints
from holdfast.checkpoint.replica import retained_state, shared_memory
from holdfast.checkpoint.replica.channel import Channel
from holdfast.events import read_events
from survive_run import kill_and_end

STEPS = 40
TRAINERS = ["after_gradient_copied", "before_step_handed", "after_step_handed", "after_state_handed"]
REPLICAS = [name for name in failpoints.REPLICA if name not in TRAINERS]


@pytest.fixture(scope="module")
def undisturbed(undisturbed_loop):
    return undisturbed_loop(steps=STEPS)


@pytest.fixture(autouse=True)
def nothing_is_left_in_memory(tmp_path):
    yield
    for root in (tmp_path, *tmp_path.iterdir()):
        assert not shared_memory.place_of(root, shared_memory.MEMORY).exists()


def run(server, root, **options):
    return server.run(replica=True, root=root, steps=STEPS, **options)


def go_on_to_the_end(server, undisturbed, root, at_least, **options):
    """Resume once more and compare all that is computed from there on."""
    last = run(server, root, **options)
    assert last.finished, last.error
    assert last.resumed >= at_least
    assert last.losses == undisturbed.losses[len(undisturbed.losses) - len(last.losses) :]
    assert last.digest == undisturbed.digest
    return last


def resumed_from_memory(root):
    return [event["step"] for event in read_events(root / "events.jsonl") if event["event"] == "resumed"]


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(20))
def test_the_trainer_is_killed_at_random_moments(server, undisturbed, tmp_path, seed):
    """In turn: every step that was handed over is there, from memory."""
    kills = [at_random(random.Random(seed), 1.0)] * 4
    kill_and_end(partial(run, server, base_every=3 + 5 * seed), undisturbed, tmp_path, kills)


@pytest.mark.campaign(cover=True)
@pytest.mark.crash
@pytest.mark.parametrize("failpoint", TRAINERS)
@pytest.mark.parametrize("arrival", [1, 30])
def test_the_trainer_is_killed_at_a_failpoint(server, undisturbed, tmp_path, failpoint, arrival):
    outcome = run(server, tmp_path, base_every=1000, failpoint=f"{failpoint}:{arrival}")
    assert outcome.killed or (failpoint == "after_state_handed" and arrival > 1), outcome
    last = go_on_to_the_end(server, undisturbed, tmp_path, outcome.durable, base_every=1000)
    if outcome.durable > 0 and outcome.killed:
        assert resumed_from_memory(tmp_path) == [last.resumed]
        wait_for_end(outcome.replica, seconds=5)  # it was told that it may


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(6))
def test_whoever_arrives_at_a_failpoint_is_killed(server, undisturbed, tmp_path, seed):
    """Trainer or replica, whichever comes there first, in turn. What a replica that dies has held is not used."""
    root, durable, chance, missed = tmp_path / "0", -1, random.Random(seed), []
    names = [name for name in (*failpoints.NAMES, *REPLICAS) if not name.endswith("replica_kept")]
    for number, name in enumerate(chance.sample(names, len(names)) if seed else names, 1):
        outcome = run(
            server, root, base_every=3, failpoint=f"{name}:{1 if not seed else chance.choice([1, 2, 4])}"
        )
        assert outcome.killed or outcome.finished or "ReplicaDied" in outcome.error, outcome
        assert outcome.resumed is None or outcome.resumed >= durable, (name, outcome)
        durable = max(durable, outcome.durable_step)
        if outcome.finished:
            assert outcome.digest == undisturbed.digest
            root, durable, missed = tmp_path / str(number), -1, [*missed, name]
    assert len(missed) <= len(names) // 3, missed
    go_on_to_the_end(server, undisturbed, root, durable, base_every=3)


@pytest.mark.crash
@pytest.mark.parametrize(
    "failpoint, whole",
    [
        ("before_replica_kept", False),
        ("after_manifest_write:2", False),
        ("after_manifest_sync:2", False),
        ("after_manifest_rename:2", True),
        ("after_replica_kept", True),
    ],
)
def test_the_replica_is_killed_while_it_keeps_a_dead_trainers_state(
    server, undisturbed, tmp_path, failpoint, whole
):
    """The first manifest that the replica writes is that of the run's beginning, the second one is in memory."""
    outcome = run(server, tmp_path, base_every=1000, failpoint=failpoint, dies_at=25)
    assert outcome.killed and outcome.durable == 25, outcome
    wait_for_end(outcome.replica)
    last = go_on_to_the_end(server, undisturbed, tmp_path, outcome.durable_step, base_every=1000)
    assert last.resumed == (25 if whole else 0)


@pytest.mark.crash
def test_what_was_handed_over_is_done_after_the_trainers_death(server, undisturbed, tmp_path):
    """The replica is eight steps behind when the trainer dies."""
    outcome = run(server, tmp_path, base_every=1000, dies_at=25, slow_seconds=0.05)
    assert outcome.killed and outcome.durable == 25, outcome
    go_on_to_the_end(server, undisturbed, tmp_path, 25, base_every=1000)
    assert resumed_from_memory(tmp_path) == [25]


@pytest.mark.crash
def test_a_child_that_outlives_the_trainer_does_not_hide_its_death(server, undisturbed, tmp_path):
    """A data loader's worker has the trainer's end of the channel open as well."""
    outcome = run(server, tmp_path, base_every=1000, dies_at=20, with_child=True)
    assert outcome.killed, outcome
    last = go_on_to_the_end(server, undisturbed, tmp_path, 20, base_every=1000)
    assert last.seconds < 40 and resumed_from_memory(tmp_path) == [20]


@pytest.mark.crash
def test_a_disk_that_has_gone_on_is_preferred_to_what_was_kept(server, undisturbed, tmp_path):
    """A trainer without a replica goes on from what the dead one's replica persisted."""
    outcome = run(server, tmp_path, base_every=1000, dies_at=11)
    assert outcome.killed and outcome.durable == 11, outcome
    wait_for_event(tmp_path, "base", 11)
    plain = server.run(survive=True, root=tmp_path, steps=20)
    assert plain.finished and plain.resumed == 11, plain
    last = go_on_to_the_end(server, undisturbed, tmp_path, 20)
    assert last.resumed == 20 and resumed_from_memory(tmp_path) == []


@pytest.mark.crash
def test_a_kept_state_that_is_damaged_is_not_used(server, undisturbed, tmp_path):
    outcome = run(server, tmp_path, base_every=1000, dies_at=11)
    assert outcome.killed and outcome.durable == 11, outcome
    wait_for_event(tmp_path, "base", 11)
    for file in (
        shared_memory.place_of(tmp_path, shared_memory.MEMORY) / retained_state.KEPT / "data"
    ).iterdir():
        data = bytearray(file.read_bytes())
        if any(data):
            data[-100] ^= 1
            file.write_bytes(data)
    last = go_on_to_the_end(server, undisturbed, tmp_path, 11)
    assert resumed_from_memory(tmp_path) == []
    assert "what the replica kept is not whole" in last.warnings[0]


@pytest.mark.crash
def test_a_replica_that_has_drifted_is_not_kept(server, undisturbed, tmp_path):
    """The trainer dies before it hears of it."""
    outcome = run(server, tmp_path, base_every=1000, dies_at=11, drifts_at=11)
    assert outcome.killed and outcome.durable in (10, 11), outcome  # it may know that step 11 has drifted
    wait_for_end(outcome.replica, seconds=40)
    assert not shared_memory.place_of(tmp_path, shared_memory.MEMORY).exists()
    last = go_on_to_the_end(server, undisturbed, tmp_path, 0)
    # Where the trainer heard of it all the same, it may have handed over its own state, which is that of step 11.
    heard = any(event["event"] == "drift" for event in read_events(tmp_path / "events.jsonl"))
    assert last.resumed in ((0, 11) if heard else (0,)) and resumed_from_memory(tmp_path) == []


@pytest.mark.crash
def test_a_replica_to_which_nobody_comes_cleans_up_and_the_disk_has_its_step(server, undisturbed, tmp_path):
    outcome = run(server, tmp_path, base_every=1000, dies_at=11, linger_seconds=0.3)
    assert outcome.killed and outcome.durable == 11, outcome
    wait_for_end(outcome.replica)
    assert not shared_memory.place_of(tmp_path, shared_memory.MEMORY).exists()
    last = go_on_to_the_end(server, undisturbed, tmp_path, 11)
    assert last.resumed == 11 and resumed_from_memory(tmp_path) == []


@pytest.mark.crash
def test_a_dead_trainers_state_is_persisted_where_memory_has_no_room_to_keep_it(
    server, undisturbed, tmp_path
):
    outcome = run(server, tmp_path, base_every=1000, dies_at=11, no_memory=True)
    assert outcome.killed and outcome.durable == 11, outcome
    wait_for_end(outcome.replica)
    last = go_on_to_the_end(server, undisturbed, tmp_path, 11)
    assert last.resumed == 11 and resumed_from_memory(tmp_path) == []


@pytest.mark.crash
def test_a_kept_state_that_the_disk_has_no_room_for_waits_for_whoever_comes(server, undisturbed, tmp_path):
    """Longer than the replica does."""
    outcome = run(server, tmp_path, base_every=1000, dies_at=11, linger_seconds=0.3, no_disk=True)
    assert outcome.killed and outcome.durable == 11, outcome
    wait_for_end(outcome.replica)
    last = go_on_to_the_end(server, undisturbed, tmp_path, 11)
    assert last.resumed == 11 and resumed_from_memory(tmp_path) == [11]


@pytest.mark.crash
def test_what_a_replica_has_when_the_disk_fails_beside_training_is_kept(server, undisturbed, tmp_path):
    """As far as it has got: what lies in the ring then is lost."""
    outcome = run(server, tmp_path, base_every=10, no_disk=True)
    assert "no space left" in outcome.error
    last = go_on_to_the_end(server, undisturbed, tmp_path, 10)
    assert resumed_from_memory(tmp_path) == [last.resumed]


@pytest.mark.crash
@pytest.mark.parametrize("copies", [True, False])
def test_a_trainer_that_resumes_from_memory_does_not_wait_for_the_disk(server, undisturbed, tmp_path, copies):
    """A slow one, to which the dead trainer's replica began to write what it had kept."""
    order = {"base_every": 1000, "dies_at": 25, "slow_when_kept": 16_000, "copies": copies}
    outcome = run(server, tmp_path, **order)
    assert outcome.killed and outcome.durable == 25, outcome
    wait_for_event(tmp_path, "kept", 25)
    last = go_on_to_the_end(server, undisturbed, tmp_path, 25, base_every=1000)
    assert last.resumed == 25
    found = [(event["event"], event.get("step")) for event in read_events(tmp_path / "events.jsonl")]
    assert found.index(("resumed", 25)) < found.index(("base", 25))


@pytest.mark.crash
def test_one_that_said_it_takes_what_was_kept_and_was_killed_has_not_taken_it(server, undisturbed, tmp_path):
    """It asked while the replica did what waits. The disk has the step all the same, and the replica goes on waiting
    for somebody."""
    outcome = run(server, tmp_path, base_every=1000, dies_at=25, slow_seconds=0.05)
    assert outcome.killed and outcome.durable == 25, outcome
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(shared_memory.place_of(tmp_path, shared_memory.MEMORY) / retained_state.SOCKET))
        Channel(asking).send({"takes": True})
    wait_for_event(tmp_path, "base", 25)
    go_on_to_the_end(server, undisturbed, tmp_path, 25, base_every=1000)
    assert resumed_from_memory(tmp_path) == [25]


@pytest.mark.crash
@pytest.mark.parametrize("end", ["killed", "refused"])
def test_what_was_taken_by_one_that_never_began_is_on_the_disk(server, undisturbed, tmp_path, end):
    """The replica that kept it has gone by then, so that of the one that took it persists it."""
    outcome = run(server, tmp_path, base_every=1000, dies_at=25, slow_when_kept=16_000)
    assert outcome.killed and outcome.durable == 25, outcome
    wait_for_event(tmp_path, "kept", 25)
    how = {"failpoint": "after_state_handed:1"} if end == "killed" else {"feature": ""}
    second = run(server, tmp_path, base_every=1000, **how)
    assert second.killed if end == "killed" else "RunMismatch" in second.error, second
    wait_for_end(outcome.replica)
    wait_for_event(tmp_path, "base", 25)
    go_on_to_the_end(server, undisturbed, tmp_path, 25, base_every=1000)
    assert resumed_from_memory(tmp_path) == ([25] if end == "killed" else [])


@pytest.mark.crash
def test_what_was_taken_by_one_that_never_began_stays_where_the_disk_has_no_room(
    server, undisturbed, tmp_path
):
    outcome = run(server, tmp_path, base_every=1000, dies_at=25, slow_when_kept=16_000)
    assert outcome.killed and outcome.durable == 25, outcome
    wait_for_event(tmp_path, "kept", 25)
    refused = run(server, tmp_path, base_every=1000, feature="", no_disk=True)
    assert "RunMismatch" in refused.error, refused
    wait_for_event(tmp_path, "not_persisted", None)
    go_on_to_the_end(server, undisturbed, tmp_path, 25, base_every=1000)
    assert resumed_from_memory(tmp_path) == [25]


@pytest.mark.crash
def test_who_resumes_an_earlier_step_leaves_what_was_kept_on_the_disk(server, undisturbed, tmp_path):
    outcome = run(server, tmp_path, base_every=7, dies_at=25, slow_when_kept=160_000)
    assert outcome.killed and outcome.durable == 25, outcome
    wait_for_event(tmp_path, "kept", 25)
    earlier = run(server, tmp_path, base_every=1000, keep_last=9, before=20, dies_at=22)
    assert earlier.killed and earlier.resumed < 20, earlier
    found = [(event["event"], event.get("step")) for event in read_events(tmp_path / "events.jsonl")]
    assert ("base", 25) in found
    go_on_to_the_end(server, undisturbed, tmp_path, 22, base_every=1000)


@pytest.mark.crash
def test_an_earlier_step_is_resumed_though_a_later_one_is_kept(server, undisturbed, tmp_path):
    outcome = run(server, tmp_path, base_every=5, keep_last=9, dies_at=23)
    assert outcome.killed and outcome.durable == 23, outcome
    with_earlier = run(server, tmp_path, base_every=5, keep_last=9, before=12, dies_at=17)
    assert with_earlier.killed and 0 < with_earlier.resumed < 12, with_earlier
    last = go_on_to_the_end(server, undisturbed, tmp_path, 17)
    assert last.resumed == 17 and resumed_from_memory(tmp_path) == [17]


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.parametrize("step", [1, 8, 9, 33])
def test_both_are_killed_and_the_disk_has_its_step(server, undisturbed, tmp_path, step):
    outcome = run(server, tmp_path, base_every=7, dies_at=step, with_replica=True)
    assert outcome.killed and outcome.durable == step, outcome
    wait_for_end(outcome.replica)
    last = go_on_to_the_end(server, undisturbed, tmp_path, outcome.durable_step, base_every=7)
    assert resumed_from_memory(tmp_path) == [] and last.resumed <= step


def wait_for_event(root, name, step):
    until = time.monotonic() + 20
    while (name, step) not in [(e["event"], e.get("step")) for e in read_events(root / "events.jsonl")]:
        assert time.monotonic() < until, f"no {name} of step {step}"
        time.sleep(0.01)


def wait_for_end(pid, seconds=20):
    """Return when no thread of the process is left, which may outlive the first by a moment."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(FileNotFoundError, ProcessLookupError):
            ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not ended or len(os.listdir(f"/proc/{pid}/task")) > 1:
                time.sleep(0.01)
                continue
        return
    raise AssertionError(f"process {pid} is still there")
