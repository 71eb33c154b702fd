"""A loop with a checkpointer is killed, at random moments and at every failpoint, and goes on: from a step that is not
before the last acknowledged one, to the very bits of a loop that was never killed. With error feedback it may choose:
that step, or the newest base, from where the bits are the same."""

from __future__ import annotations

import random
import shutil

import pytest

from combined import one_in, some_of
from holdfast import failpoints
from holdfast.store.log.chain import chain_of, read_journal, verify_records
from holdfast.store.run_store import LocalStore
from survive_run import kill_in_turn

STEPS, LONG = 40, 160
EVERY = [*failpoints.NAMES, *failpoints.RECORDING, *failpoints.JOURNAL]
RARE = [*failpoints.NAMES, "before_segment_unlink"]
"""At these, which are of bases, a run of more steps arrives three times however slow the disk is."""


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    outcome = server.run(
        survive=True, root=tmp_path_factory.mktemp("undisturbed"), steps=STEPS, base_every=1000
    )
    assert outcome.finished, outcome.error
    return outcome


def go_on_to_the_end(server, undisturbed, root, acknowledged, **options):
    """Resume once more and compare all that is computed from there on."""
    last = server.run(root=root, **{"survive": True, **options})
    assert last.finished, last.error
    assert last.resumed >= acknowledged
    assert last.losses == undisturbed.losses[len(undisturbed.losses) - len(last.losses) :]
    assert last.digest == undisturbed.digest


@pytest.fixture(scope="module")
def long(server, tmp_path_factory):
    """One of more steps, so that several kills in turn find it on its way."""
    outcome = server.run(survive=True, root=tmp_path_factory.mktemp("long"), steps=LONG, base_every=1000)
    assert outcome.finished, outcome.error
    return outcome


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.parametrize(
    "codec, seed", some_of(12, [*((None, n) for n in range(50)), *(("compressed", n) for n in range(5))])
)
def test_killed_at_random_moments(server, long, tmp_path, codec, seed):
    """Ten times each, a while after one another."""
    chance = random.Random(seed)
    options = {"survive": True, "steps": LONG, "base_every": 3 + seed, "codec": codec}
    root, acknowledged = kill_in_turn(
        lambda root, **kill: server.run(root=root, **options, **kill),
        tmp_path,
        10,
        lambda: chance.uniform(0.0, 0.3 * long.seconds),
        long.digest,
    )
    go_on_to_the_end(server, long, root, acknowledged, **options)


@pytest.mark.crash
@pytest.mark.parametrize("failpoint, arrival", one_in(3, EVERY, [1, 2, 3]))
def test_killed_at_a_failpoint(server, undisturbed, long, tmp_path, failpoint, arrival):
    steps, whole = (LONG, long) if failpoint in RARE else (STEPS, undisturbed)
    if failpoint == "after_timeline_opened" and arrival > 1:
        server.run(survive=True, root=tmp_path, steps=7, base_every=3)
        arrival = 1
    outcome = server.run(
        survive=True, root=tmp_path, steps=steps, base_every=3, failpoint=f"{failpoint}:{arrival}"
    )
    assert outcome.killed, outcome
    go_on_to_the_end(server, whole, tmp_path, outcome.durable, steps=steps, base_every=3)


@pytest.mark.crash
@pytest.mark.parametrize("failpoint", ["before_records_write", "after_records_write", "after_records_sync"])
def test_killed_where_records_leave_out_rows_of_zeros(server, tmp_path, failpoint):
    options = {"survive": True, "feature": "rows", "steps": STEPS, "base_every": 1000}
    whole = server.run(root=tmp_path / "whole", **options)
    assert whole.finished, whole.error
    outcome = server.run(root=tmp_path / "run", failpoint=f"{failpoint}:3", **options)
    assert outcome.killed, outcome
    with LocalStore.read(tmp_path / "run") as reader:
        records = read_journal(reader, "rank-00000").records.values()
    assert {update["codec"]["kind"] for record in records for update in record.about["updates"]} == {"rows"}
    go_on_to_the_end(server, whole, tmp_path / "run", outcome.durable, **options)


SPARSE = {"survive": True, "codec": "topk", "steps": STEPS, "base_every": 3, "unit_bytes": 1500}


def undisturbed_with_residuals(server, root, **options):
    outcome = server.run(root=root, **SPARSE | options)
    assert outcome.finished, outcome.error
    return outcome


@pytest.fixture(scope="module")
def sparse(server, tmp_path_factory):
    return undisturbed_with_residuals(server, tmp_path_factory.mktemp("sparse"))


@pytest.fixture(scope="module")
def long_sparse(server, tmp_path_factory):
    return undisturbed_with_residuals(server, tmp_path_factory.mktemp("sparse"), steps=LONG)


def newest_base(root):
    return max((int(path.name[5:17]) for path in (root / "commits").glob("step-*.json")), default=-1)


@pytest.mark.crash
@pytest.mark.parametrize("failpoint, arrival", one_in(6, EVERY, [1, 2, 3]))
def test_killed_at_a_failpoint_with_residuals(server, sparse, long_sparse, tmp_path, failpoint, arrival):
    root, copy = tmp_path / "run", tmp_path / "copy"
    steps, whole = (LONG, long_sparse) if failpoint in RARE else (STEPS, sparse)
    options = SPARSE | {"steps": steps}
    if failpoint == "after_timeline_opened" and arrival > 1:
        server.run(root=root, **options | {"steps": 7})
        arrival = 1
    outcome = server.run(root=root, failpoint=f"{failpoint}:{arrival}", **options)
    assert outcome.killed, outcome
    shutil.copytree(root, copy)
    state = server.run(root=copy, **options)
    assert state.finished and state.resumed >= outcome.durable, state.error
    go_on_to_the_end(server, whole, root, newest_base(root), **options, exactness="continuation")


@pytest.fixture(scope="module")
def of_codec(server, sparse, tmp_path_factory):
    """Undisturbed runs."""
    return {
        "topk": sparse,
        "int8": undisturbed_with_residuals(server, tmp_path_factory.mktemp("int8"), codec="int8"),
    }


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.parametrize("seed", some_of(5, range(10)))
@pytest.mark.parametrize("codec", ["topk", "int8"])
def test_killed_at_random_moments_with_residuals(server, of_codec, tmp_path, seed, codec):
    chance, whole = random.Random(seed), of_codec[codec]
    options = {**SPARSE, "exactness": "continuation", "codec": codec}
    root, _ = kill_in_turn(
        lambda root, **kill: server.run(root=root, **options, **kill),
        tmp_path,
        5,
        lambda: chance.uniform(0.0, whole.seconds),
        whole.digest,
        goes_back=True,
    )
    go_on_to_the_end(server, whole, root, newest_base(root), **options)


# Compaction and pruning


def recoverable(root):
    """The steps that can be brought back, every byte that it takes verified."""
    found = set()
    with LocalStore.read(root) as reader:
        for ref in reader.line():
            manifest = reader.load(ref)
            assert reader.verify(manifest) == []
            last, odd = verify_records(reader, manifest)
            assert (
                last == chain_of(manifest, "rank-00000", read_journal(reader, "rank-00000"), None).last.step
                or odd
            )
            found |= set(range(ref.step, last + 1))
    return found


COMPACTED = [*failpoints.NAMES[:-1], *failpoints.LIFECYCLE, "before_segment_unlink"]
PRUNED = [
    "before_retire",
    "after_retire_unlink",
    "after_retire_sync",
    "before_retired_unlink",
    "before_segment_unlink",
]


def finished(server, root, keep_last):
    """A run whose bases are of several steps, with records since the oldest, a group in each segment."""
    outcome = server.run(
        survive=True, root=root, steps=STEPS, base_every=12, keep_last=keep_last, groups_per_segment=1
    )
    assert outcome.finished, outcome.error
    return root


def compacted_to(root):
    """A step that no base of the run has, the newest but one."""
    with LocalStore.read(root) as reader:
        newest = reader.line()[0].step
    to = max(recoverable(root)) - 1
    assert newest < to
    return to, newest


def check_compaction_ends(server, root, before, newest, to):
    """What there was before a step that is compacted to may be gone, and nothing else; and it can be done again."""
    assert before - recoverable(root) <= set(range(newest, to))
    again = server.run(verb="compact", root=root, to=to)
    assert again.finished or f"step {to} is a base already" in again.error, again.error
    assert to in recoverable(root)


def check_pruning_ends(server, root, before, kept):
    should = set(range(min(kept), max(before) + 1))
    assert should <= recoverable(root)
    again = server.run(verb="prune", root=root, keep=[len(kept)])
    assert again.finished, again.error
    assert should <= recoverable(root) <= before
    with LocalStore.read(root) as reader:
        assert [ref.step for ref in reader.line()] == kept


@pytest.mark.crash
@pytest.mark.parametrize(
    "failpoint, arrival", [*((name, 1) for name in COMPACTED), *some_of(6, [(name, 2) for name in COMPACTED])]
)
def test_killed_while_it_is_compacted(server, undisturbed, tmp_path, failpoint, arrival):
    before = recoverable(finished(server, tmp_path, 1))
    to, newest = compacted_to(tmp_path)
    outcome = server.run(verb="compact", root=tmp_path, to=to, failpoint=f"{failpoint}:{arrival}")
    assert outcome.killed or arrival == 2, outcome
    check_compaction_ends(server, tmp_path, before, newest, to)
    go_on_to_the_end(server, undisturbed, tmp_path, STEPS, steps=STEPS, base_every=10)


@pytest.mark.crash
@pytest.mark.parametrize("arrival", [1, 2])
@pytest.mark.parametrize("failpoint", PRUNED)
def test_killed_while_it_is_pruned(server, undisturbed, tmp_path, failpoint, arrival):
    before = recoverable(finished(server, tmp_path, 9))
    with LocalStore.read(tmp_path) as reader:
        kept = [ref.step for ref in reader.line()[:2]]
    outcome = server.run(verb="prune", root=tmp_path, keep=[2], failpoint=f"{failpoint}:{arrival}")
    assert outcome.killed or arrival == 2, outcome
    check_pruning_ends(server, tmp_path, before, kept)
    go_on_to_the_end(server, undisturbed, tmp_path, STEPS, steps=STEPS, base_every=10)


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.parametrize("seed", some_of(3, range(5)))
@pytest.mark.parametrize("verb", ["compact", "prune"])
def test_killed_at_random_moments_while_it_is_made_shorter(server, undisturbed, tmp_path, verb, seed):
    """Five times each, of as many copies of one run."""
    chance, whole = random.Random(seed), finished(server, tmp_path / "whole", 1 if verb == "compact" else 9)
    before = recoverable(whole)
    to, newest = compacted_to(whole)
    with LocalStore.read(whole) as reader:
        kept = [ref.step for ref in reader.line()[:2]]
    order = {"verb": verb, **({"to": to} if verb == "compact" else {"keep": [2]})}
    seconds = server.run(root=shutil.copytree(whole, tmp_path / "undisturbed"), **order).seconds
    killed = 0
    for number in range(100):
        root = shutil.copytree(whole, tmp_path / str(number))
        outcome = server.run(root=root, kill_after=chance.uniform(0.0, seconds), **order)
        assert outcome.killed or outcome.finished, outcome.error
        if verb == "compact":
            check_compaction_ends(server, root, before, newest, to)
        else:
            check_pruning_ends(server, root, before, kept)
        killed += outcome.killed
        if killed == 5:
            return go_on_to_the_end(server, undisturbed, root, STEPS, steps=STEPS, base_every=10)
    raise AssertionError(f"{killed} of 100 came before the end")
