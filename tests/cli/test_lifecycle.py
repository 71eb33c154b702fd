"""``prune`` and ``compact`` as a person and as a tool call them."""

from __future__ import annotations

import json
import shutil

import pytest

from checkpoint.loops import cut_small, make
from holdfast.checkpointer import Checkpointer
from holdfast.store.commit.retention import Keep
from holdfast.store.log.chain import read_journal
from holdfast.store.run_store import LocalStore
from survive_run import OPTIMIZER
from tiny_run import TinyRun, flip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Forty steps; bases of several steps about every ten; a group of records in each segment."""
    loop, root = make(OPTIMIZER), tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch, 1)
        with Checkpointer(
            root, model=loop.model, optimizer=loop.optimizers, base_every=10, keep=Keep(9)
        ) as checkpointer:
            checkpointer.resume()
            for i in range(40):
                loop.iteration(i, checkpointer.step)
                checkpointer._backend.recorder.drain()
    return root


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    cut_small(monkeypatch, 1)
    return shutil.copytree(trained, tmp_path / "run")


def files(run):
    return sorted(
        str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.name != "lock"
    )


def steps(run):
    with LocalStore.read(run) as reader:
        return [ref.step for ref in reader.line()]


def test_a_dry_run_says_what_would_go_and_what_depends_on_it_and_changes_nothing(holdfast, run):
    before, line = files(run), steps(run)
    result = holdfast("prune", run, "--keep-last", 2, "--dry-run")
    assert result.code == 0 and files(run) == before
    rows = result.out.splitlines()
    assert [int(row.split()[0]) for row in rows[1:-1]] == sorted(line[2:])
    assert all(row.rstrip().endswith("records to 40") for row in rows[1:-1])
    assert rows[-1].startswith(f"Would remove {len(line) - 2} commits and")
    assert f"Steps 0 to {line[1] - 1} could not be recovered any more." in rows[-1]


@pytest.mark.parametrize("named, step", [("", 40), ("@38", 38)])
def test_show_describes_the_step_that_diff_means(holdfast, run, named, step):
    base = steps(run)[0]
    text = " ".join(holdfast("show", f"{run}{named}").out.split())
    assert f"step {step}, by the records of steps {base + 1} to {step} after the base of step {base} " in text
    told = json.loads(holdfast("show", f"{run}{named}", "--json").out)
    assert (told["step"], told["base_step"], told["records_to"]) == (step, base, 40)
    with LocalStore.read(run) as reader:
        manifest = reader.head()
        [stream] = manifest.streams
        record = read_journal(reader, stream).records[step].about["progress"]
    assert told["progress"]["random"] == record["random"] != manifest.progress["random"]
    compared = json.loads(holdfast("diff", f"{run}{named}", f"{run}@{base}", "--json").out)
    assert compared["a"]["step"] == step


def test_show_follows_the_timeline_that_a_name_has(holdfast, run):
    """Not the current one, which has a step of that number, too."""
    loop = make(OPTIMIZER)
    with Checkpointer(run, model=loop.model, optimizer=loop.optimizers, base_every=100) as checkpointer:
        checkpointer.resume(step=37)
        loop.iteration(37, checkpointer.step)
    for step in (38, 40):
        told = json.loads(holdfast("show", f"{run}@{step}.t1", "--json").out)
        assert (told["step"], told["records_to"]) == (step, 40)
    assert json.loads(holdfast("show", f"{run}@38", "--json").out)["records_to"] == 38


def test_show_of_a_base_names_the_records_after_it(holdfast, run):
    base = steps(run)[0]
    assert f"step         {base}, and records of every step to 40" in holdfast("show", f"{run}@{base}").out
    assert "has no step 41" in holdfast("show", f"{run}@41").err


def test_show_says_that_needed_records_are_damaged(holdfast, run):
    newest = steps(run)[0]
    for path in (run / "journal").rglob("*"):
        if path.is_file():
            flip(path, 8 * 40)
    result = holdfast("show", run)
    assert result.code == 0 and f"step         {newest}; records that it needs cannot be used" in result.out
    assert json.loads(holdfast("show", run, "--json").out)["records_to"] is None


def test_a_prune_removes_what_the_dry_run_named(holdfast, run):
    before, line = files(run), steps(run)
    planned = json.loads(holdfast("prune", run, "--keep-last", 2, "--dry-run", "--json").out)
    done = json.loads(holdfast("prune", run, "--keep-last", 2, "--json").out)
    assert {**planned, "dry_run": False} == done
    assert steps(run) == line[:2] == [kept["step"] for kept in done["kept"]]
    gone = set(before) - set(files(run))
    assert set(done["segments"]) <= gone and done["segments"]
    assert len([path for path in gone if path.startswith("commits/")]) == len(done["commits"])
    assert done["steps_lost"] == [[0, line[1] - 1]]
    assert holdfast("verify", run).code == 0
    assert holdfast("prune", run, "--keep-last", 2).out.startswith("nothing to remove")


def test_a_base_of_each_so_many_steps_stays(holdfast, run):
    line = steps(run)
    holdfast("prune", run, "--keep-last", 1, "--every", 15)
    left = steps(run)
    assert left[0] == line[0] and {step // 15 for step in left} == {1, 2}
    for step in left:
        assert holdfast("verify", f"{run}@{step}").code == 0


def test_a_damaged_newest_base_keeps_the_older_ones(holdfast, run):
    with LocalStore.read(run) as reader:
        path = run / next(iter(reader.load(reader.line()[0]).files.values())).path
    data = bytearray(path.read_bytes())
    data[4100] ^= 1
    path.write_bytes(data)
    before = files(run)
    result = holdfast("prune", run, "--keep-last", 1)
    assert result.code == 1 and "nothing was removed, since step" in result.err
    assert files(run) == before


@pytest.mark.parametrize("verb", [("prune", "--keep-last", 1), ("compact",)])
def test_a_run_that_is_being_written_is_left_alone(holdfast, run, verb):
    with LocalStore.open(run, keep=Keep(9)):
        result = holdfast(verb[0], run, *verb[1:])
    assert result.code == 2 and "is being written by this very process" in result.err


def test_a_base_is_made_of_the_newest_step_and_nothing_goes(holdfast, run):
    line = steps(run)
    result = holdfast("compact", run)
    assert result.code == 0 and result.err == ""
    assert result.out.startswith(f"{run}@40 is a base now, ")
    assert f"made from that of step {line[0]} and the records of" in result.out
    assert steps(run) == [40, *line]
    assert "step 40 is a base already" in holdfast("compact", run).err


def test_what_led_to_a_step_is_dropped_when_it_is_named(holdfast, run):
    line = steps(run)
    to = line[0] + 2
    done = json.loads(holdfast("compact", run, "--to", to, "--json").out)
    assert (done["step"], done["from_step"], done["dropped"]) == (to, line[0], True)
    assert steps(run) == [to, *line[1:]]
    assert holdfast("verify", run).code == 0


def test_show_tells_of_which_steps_the_parts_of_a_base_are(holdfast, run):
    newest = steps(run)[0]
    units = json.loads(holdfast("show", run, "--json").out)["units"]
    assert max(units.values()) == newest > min(units.values())
    text = holdfast("show", run).out
    low = min(units.values())
    assert (
        f"{len(units)} parts of steps {low} to {newest}, which the records of steps {low + 1} to {newest} bring"
        in (" ".join(text.split()))
    )


def test_a_run_of_whole_steps_is_pruned_as_well_and_goes_on(holdfast, tmp_path):
    with TinyRun(tmp_path, retain=4, copies=5) as tiny:
        for _ in range(5):
            tiny.take_step()
    assert steps(tmp_path) == [5, 4, 3, 2]
    result = holdfast("prune", tmp_path, "--keep-last", 1)
    assert result.code == 0 and "Steps 2 to 4 cannot be recovered any more." in result.out
    assert holdfast("verify", tmp_path).code == 0
    with TinyRun(tmp_path, retain=4, copies=5) as tiny:
        tiny.take_step()
    assert steps(tmp_path) == [6, 5]


def test_what_was_not_made_by_a_checkpointer_is_not_compacted(holdfast, tmp_path):
    with TinyRun(tmp_path) as tiny:
        tiny.take_step()
    result = holdfast("compact", tmp_path)
    assert result.code == 2 and "step 1 is a base already, so there is nothing to compact" in result.err
