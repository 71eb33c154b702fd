"""What a checkpointer keeps: the newest bases with their records, others for good, and nothing that does not verify in
their place."""

from __future__ import annotations

import pytest

from checkpoint.loops import cut_small, manifests, same
from holdfast.cli.inspect import ls
from holdfast.errors import CommitRetired, Damaged, NoCommit
from holdfast.store.commit.pruning import prune
from holdfast.store.commit.retention import Keep
from holdfast.store.log.chain import last_step, read_journal, verify_records
from holdfast.store.run_store import LocalStore
from test_checkpointer import go_on, reference, start


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """A base is of several units, one of them in each step; a segment holds one group."""
    cut_small(monkeypatch, 1)


def trained(root, steps, **options):
    loop, checkpointer = start(root, **options)
    with checkpointer:
        checkpointer.resume()
        for i in range(checkpointer.steps_done, steps):
            loop.iteration(i, checkpointer.step)
            checkpointer._backend.recorder.drain()


def resumed(root, step=None):
    loop, checkpointer = start(root, keep=Keep(99))
    with checkpointer:
        return checkpointer.resume(step=step), loop.state()


@pytest.mark.slow
def test_bases_kept_for_good_come_back_without_the_records_since(tmp_path):
    states, _ = reference(120)
    trained(tmp_path, 120, base_every=10, keep=Keep(2, every=30))
    found = manifests(tmp_path)
    assert all(m.oldest_step < m.step for m in found if m.step)
    kept = [manifest.step for manifest in found]
    assert [step // 30 for step in sorted(kept)] == [1, 2, 3, 3, 3]  # three for good, and the newest two
    segments = len(list((tmp_path / "journal" / "rank-00000").iterdir()))
    assert segments < 60  # of 120, with one record each
    for step in kept:
        assert same(resumed(tmp_path, step)[1], states[step])
    with pytest.raises(NoCommit, match="cannot be brought to step 50"):
        resumed(tmp_path, 50)


@pytest.mark.slow
def test_a_number_of_files_follows_what_is_kept(tmp_path):
    trained(tmp_path, 120, base_every=10, keep=Keep(2, every=30))
    num_units = len(manifests(tmp_path)[0].files)
    many = len(list((tmp_path / "data").iterdir()))
    assert many <= num_units * (len(manifests(tmp_path)) + 1)
    trained(tmp_path, 150, base_every=10, keep=Keep(2))
    assert len(manifests(tmp_path)) == 2
    assert len(list((tmp_path / "data").iterdir())) == num_units * 3


def flip(root, manifest):
    for file in manifest.files.values():
        path = root / file.path
        data = bytearray(path.read_bytes())
        data[-5000] ^= 1
        path.write_bytes(data)


def test_a_damaged_base_does_not_count_among_those_that_are_kept(tmp_path):
    states, _ = reference(80)
    trained(tmp_path, 30, base_every=10)
    damaged, whole = manifests(tmp_path)
    flip(tmp_path, damaged)
    loop, checkpointer = start(tmp_path, base_every=10)
    with checkpointer, pytest.warns(UserWarning, match="checksum"):
        assert checkpointer.resume() == 30
        while len(manifests(tmp_path)) < 3 and damaged.ref in [m.ref for m in manifests(tmp_path)]:
            loop.iteration(checkpointer.steps_done, checkpointer.step)
            checkpointer._backend.recorder.drain()
    newest, other = manifests(tmp_path)
    assert newest.step > 30 and other.ref == whole.ref  # the damaged one went
    flip(tmp_path, newest)
    with pytest.warns(UserWarning, match="checksum"):
        step, state = resumed(tmp_path)
    assert step == checkpointer.steps_done and same(state, states[step])


def test_an_abandoned_line_gives_way_when_the_new_one_has_its_own(tmp_path):
    trained(tmp_path, 40, base_every=10, keep=Keep(2, every=20))
    loop, checkpointer = start(tmp_path, base_every=10, keep=Keep(2, every=20))
    with checkpointer:
        [first, *_] = [m.step for m in sorted(manifests(tmp_path), key=lambda m: m.step)]
        checkpointer.resume(step=first)
        go_on(loop, checkpointer, first + 60)
    with LocalStore.read(tmp_path) as reader:
        assert {ref.timeline for ref in reader.commits() if ref.step > first} == {2}
        assert first in [ref.step for ref in reader.line()]  # for good: it is of the new line too


def commits(root):
    """Those of lines that were left included."""
    with LocalStore.read(root) as reader:
        return reader.commits()


@pytest.mark.slow
def test_what_is_to_be_kept_of_a_line_that_was_left_stays_until_the_new_one_has_come_so_far(tmp_path):
    """The newest, with its records, and those that are kept for good."""
    keep = Keep(2, every=10)
    trained(tmp_path, 100, base_every=10, keep=keep)
    before = manifests(tmp_path)
    first = before[-1].step
    segments = {path.name for path in (tmp_path / "journal" / "rank-00000").iterdir()}
    loop, checkpointer = start(tmp_path, base_every=1000, keep=keep)
    with checkpointer:
        checkpointer.resume(step=first)
        go_on(loop, checkpointer, first + 3)
        checkpointer.save()
    assert {manifest.ref for manifest in before} <= set(commits(tmp_path)) and len(before) > 4
    assert segments <= {path.name for path in (tmp_path / "journal" / "rank-00000").iterdir()}
    loop, checkpointer = start(tmp_path, base_every=1000, keep=keep)
    with checkpointer:
        assert checkpointer.resume() == first + 3
        go_on(loop, checkpointer, before[2].step)
        checkpointer.save()
    left = [ref.step for ref in commits(tmp_path) if ref.timeline == 1]
    assert left == [m.step for m in before if m.step > before[2].step or m.step == first]


def pruning_at(monkeypatch, reader, call, root, keep):
    """The writer prunes right before the reader's first ``call`` that is of a segment."""
    real, todo = getattr(reader.disk, call), [keep]

    def first(path, *args, **kwargs):
        if todo and str(path).startswith("journal/rank-00000/"):
            prune(root, todo.pop())
        return real(path, *args, **kwargs)

    monkeypatch.setattr(reader.disk, call, first)


@pytest.mark.parametrize("call", ["open", "size"])
def test_who_reads_records_while_they_go_is_told_that_the_base_was_retired(tmp_path, monkeypatch, call):
    trained(tmp_path, 60, base_every=10, keep=Keep(9))
    with LocalStore.read(tmp_path) as reader:
        oldest = reader.load(reader.line()[-1])
        pruning_at(monkeypatch, reader, call, tmp_path, Keep(1))
        with pytest.raises(CommitRetired):
            verify_records(reader, oldest)


@pytest.mark.parametrize("call", ["open", "size"])
def test_who_lists_records_while_they_go_gets_those_that_are_there(tmp_path, monkeypatch, call):
    trained(tmp_path, 60, base_every=10, keep=Keep(9))
    with LocalStore.read(tmp_path) as reader:
        newest = reader.line()[0].step
        pruning_at(monkeypatch, reader, call, tmp_path, Keep(1))
        records = read_journal(reader, "rank-00000").records
    assert set(range(newest + 1, 61)) <= set(records) and 1 not in records


def test_who_reads_a_base_kept_for_good_while_its_records_go_has_what_is_left(tmp_path, monkeypatch):
    trained(tmp_path, 60, base_every=10, keep=Keep(9))
    with LocalStore.read(tmp_path) as reader:
        base = reader.load(reader.line()[-3])
        real = reader.disk.open
        opened = []

        def pruned_at_the_payloads(path, *args, **kwargs):
            opened.append(path)
            if len(opened) == len(set(opened)) + 1:  # a segment for the second time
                prune(tmp_path, Keep(1, every=base.step))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(reader.disk, "open", pruned_at_the_payloads)
        assert verify_records(reader, base) == (verify_records(reader, base)[0], [])
        assert base.step <= verify_records(reader, base)[0] < 60


def test_ls_beside_a_writer_that_prunes_lists_what_is_there(tmp_path, monkeypatch, capsys):
    trained(tmp_path, 60, base_every=10, keep=Keep(9))
    real = last_step

    def pruned(*reader_and_manifests):
        prune(tmp_path, Keep(1))
        return real(*reader_and_manifests)

    monkeypatch.setattr("holdfast.cli.inspect.last_step", pruned)
    ls(tmp_path, as_json=False)
    assert "damaged" not in capsys.readouterr().out


def test_nothing_is_pruned_where_a_record_is_damaged_that_the_base_which_stays_needs(tmp_path):
    trained(tmp_path, 40, base_every=10, keep=Keep(9))
    newest = manifests(tmp_path)[0]
    with LocalStore.read(tmp_path) as reader:
        record = read_journal(reader, "rank-00000").records[newest.step]
    assert newest.oldest_step < newest.step
    path = tmp_path / record.path
    data = bytearray(path.read_bytes())
    data[record.offset + record.header_bytes + 100] ^= 1
    path.write_bytes(data)
    before = manifests(tmp_path)
    with pytest.raises(Damaged, match=rf"nothing was removed, since step {newest.step}, .* is damaged"):
        prune(tmp_path, Keep(1))
    assert manifests(tmp_path) == before


def test_what_is_kept_for_good_is_counted_while_another_thread_retires_commits(tmp_path, monkeypatch):
    trained(tmp_path, 20, base_every=5, keep=Keep(9))
    with LocalStore.open(tmp_path, keep=Keep(1, every=5)) as store:
        store.timeline, store._timelines = store.tip(), store.timelines()[0]
        expected = store.for_good_bytes
        real = store._newest
        monkeypatch.setattr(store, "_newest", lambda: (real(), store._keep({}))[0])
        assert store.for_good_bytes == expected > 0
