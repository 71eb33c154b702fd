"""A loop with a checkpointer is killed, at random moments and at every failpoint, and goes on: from a step that is not
before the last acknowledged one, to the very bits of a loop that was never killed. With error feedback it may choose:
that step, or the newest base, from where the bits are the same."""

from __future__ import annotations

import itertools
import random
import shutil
from functools import partial

import pytest

from combined import CAMPAIGN
from fork_server import at_each, at_random
from holdfast import failpoints
from holdfast.store.log.chain import chain_of, read_journal, verify_records
from holdfast.store.run_store import LocalStore
from survive_run import kill_and_end

STEPS, LONG = 40, 160
"""In so many more steps each failpoint is reached twice, however slow the disk is."""
EVERY = [*failpoints.NAMES, *failpoints.RECORDING, *failpoints.JOURNAL]
SPARSE = {"codec": "topk", "unit_bytes": 1500}


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(1, 25))
@pytest.mark.parametrize("codec", [None, "compressed"])
def test_killed_at_random_moments(server, undisturbed_loop, tmp_path, codec, seed):
    whole = undisturbed_loop(steps=LONG)
    kills = [at_random(random.Random(seed), 0.3 * whole.seconds)] * 6
    run = partial(server.run, survive=True, steps=LONG, base_every=2 + seed, codec=codec)
    kill_and_end(run, whole, tmp_path, kills)


BASES = [*failpoints.NAMES, "after_unit_staged"]
WAYS = {
    "records": ({"base_every": 3}, EVERY),
    "drives": ({"base_every": 3}, EVERY),
    "bases": ({"every": 3, "patient": True}, BASES),
    "auto": ({"every": "auto", "switching": True, "patient": True}, BASES),
    "copies": ({"every": "auto"}, [*failpoints.MEMORY, *failpoints.NAMES[2:-1]]),
}
"""How steps are kept, and where processes are killed that keep them so. Of a copy in memory no file is synced."""


@pytest.mark.crash
@pytest.mark.parametrize("seed", range(20 if CAMPAIGN else 1))
@pytest.mark.parametrize("way", WAYS)
def test_killed_at_every_failpoint_in_turn(server, undisturbed_loop, in_memory, way, seed):
    """Over drives, each process has another list of them; copies in memory are made after some steps."""
    (options, names), chance = WAYS[way], random.Random(seed)
    memory, kills = in_memory / "memory", at_each(names, seed)
    memory.mkdir()
    if way == "copies":
        options = options | {"copies_in": memory}
        kills = [partial(dict, failpoint=f"{name}:{chance.randint(3, 11)}") for name in names]

    def run(root, **kill):
        drives = [f"{root}-{name}" for name in chance.choice(("", "a", "ab", "b", "ba"))]
        over = {"drives": drives} if way == "drives" else {}
        return server.run(survive=True, root=root, steps=LONG, **options, **over, **kill)

    kill_and_end(run, undisturbed_loop(steps=LONG), in_memory / "runs", kills)
    assert list(memory.iterdir()) == []


@pytest.mark.crash
def test_killed_where_records_leave_out_rows_of_zeros(server, undisturbed_loop, in_memory):
    options = {"feature": "rows", "steps": STEPS, "base_every": 1000}
    kills = at_each(["before_records_write", "after_records_write", "after_records_sync"])
    run = partial(server.run, survive=True, **options)
    root = kill_and_end(run, undisturbed_loop(**options), in_memory, kills)
    with LocalStore.read(root) as reader:
        records = read_journal(reader, "rank-00000").records.values()
    assert {update["codec"]["kind"] for record in records for update in record.about["updates"]} == {"rows"}


def newest_base(root):
    return max((int(path.name[5:17]) for path in (root / "commits").glob("step-*.json")), default=-1)


@pytest.mark.campaign(keep=2)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("codec, kind", [("topk", "failpoint"), ("int8", "moment"), ("topk", "moment")])
def test_killed_with_residuals(server, undisturbed_loop, tmp_path, codec, kind, seed):
    """Each goes on from the newest base, with the same bits. Copies of some go on from the acknowledged step."""
    options = {"unit_bytes": 1500, "codec": codec, "steps": LONG, "base_every": 3}
    whole, exact = undisturbed_loop(**options), partial(server.run, survive=True, **options)
    killed = itertools.count()

    def run(root, **kill):
        base = newest_base(root)
        outcome = exact(root=root, exactness="continuation", **kill)
        assert outcome.resumed is None or outcome.resumed >= base
        if outcome.killed and (number := next(killed)) % 4 == 0:
            state = exact(root=shutil.copytree(root, tmp_path / f"copy {number}"))
            assert state.finished and state.resumed >= outcome.durable, state.error
        return outcome

    kills = (
        at_each(EVERY, seed) if kind == "failpoint" else [at_random(random.Random(seed), whole.seconds)] * 4
    )
    kill_and_end(run, whole, tmp_path, kills, goes_back=True)


# Compaction and pruning

COMPACTED = [*failpoints.NAMES[:-1], *failpoints.LIFECYCLE, "before_segment_unlink"]
PRUNED = [
    "before_retire",
    "after_retire_unlink",
    "after_retire_sync",
    "before_retired_unlink",
    "before_segment_unlink",
]


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


class Shortened:
    """A run that has ended, to be compacted or pruned in copies."""

    def __init__(self, server, root, verb):
        """Its bases are of several steps, with records since the oldest, a group in each segment."""
        self.server, self.root, self.verb = server, root, verb
        self.whole = server.run(
            survive=True, root=root, steps=STEPS, base_every=12, keep_last=1 if verb == "compact" else 9,
            groups_per_segment=1,
        )  # fmt: skip
        assert self.whole.finished, self.whole.error
        self.before = recoverable(root)
        with LocalStore.read(root) as reader:
            self.bases = [ref.step for ref in reader.line()]
        self.kept, self.to = self.bases[:2], max(self.before) - 1
        assert self.bases[0] < self.to
        self.order = {"verb": verb, **({"to": self.to} if verb == "compact" else {"keep": [2]})}

    def run(self, root, **kill):
        return self.server.run(root=root, **self.order, **kill)

    def check(self, root):
        """What a compaction or pruning that was killed left is whole, it can be done again, and the run goes on.

        A compaction may have removed what there was before the step that is compacted to, and nothing else."""
        must = (
            self.before - set(range(self.bases[0], self.to))
            if self.verb == "compact"
            else set(range(min(self.kept), max(self.before) + 1))
        )
        assert must <= recoverable(root)
        again = self.run(root)
        assert again.finished or f"step {self.to} is a base already" in again.error, again.error
        assert must | ({self.to} if self.verb == "compact" else set()) <= recoverable(root) <= self.before
        if self.verb == "prune":
            with LocalStore.read(root) as reader:
                assert [ref.step for ref in reader.line()] == self.kept
        last = self.server.run(survive=True, root=root, steps=STEPS, base_every=10)
        assert last.finished and last.resumed == STEPS and last.digest == self.whole.digest, last


@pytest.fixture(scope="module")
def shortened(server, tmp_path_factory):
    return {
        verb: Shortened(server, tmp_path_factory.mktemp(verb) / "run", verb) for verb in ("compact", "prune")
    }


@pytest.mark.crash
@pytest.mark.parametrize("arrival", [1, pytest.param(2, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(
    "verb, failpoint", [*(("compact", name) for name in COMPACTED), *(("prune", name) for name in PRUNED)]
)
def test_killed_while_it_is_made_shorter(shortened, in_memory, verb, failpoint, arrival):
    root = shutil.copytree(shortened[verb].root, in_memory / "run")
    outcome = shortened[verb].run(root, failpoint=f"{failpoint}:{arrival}")
    assert outcome.killed or arrival == 2, outcome
    shortened[verb].check(root)


@pytest.mark.campaign
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("verb", ["compact", "prune"])
def test_killed_at_random_moments_while_it_is_made_shorter(shortened, in_memory, verb, seed):
    """Five times each, of as many copies of one run."""
    of, chance, killed = shortened[verb], random.Random(seed), 0
    seconds = of.run(shutil.copytree(of.root, in_memory / "undisturbed")).seconds
    for number in range(100):
        root = shutil.copytree(of.root, in_memory / str(number))
        outcome = of.run(root, kill_after=chance.uniform(0.0, seconds))
        assert outcome.killed or outcome.finished, outcome.error
        of.check(root)
        killed += outcome.killed
        if killed == 5:
            return
    raise AssertionError(f"{killed} of 100 came before the end")
