"""A recovery says beforehand how long it will take, while it goes on how far it is, and afterwards what it took."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

import holdfast
from holdfast.checkpoint.recovery.recovery_progress import (
    READ_BYTES_PER_SECOND,
    REPLAY_BYTES_PER_SECOND,
    RecoveryProgress,
)
from holdfast.errors import Damaged
from holdfast.events import read_events
from holdfast.monitor.progress_bar import progress_bar
from holdfast.store.run_store import LocalStore
from test_checkpointer import go_on, start


def chain(base_bytes=1_500_000_000, records=100, record_bytes=10_000_000, rates=None):
    record = SimpleNamespace(step=0, payload_bytes=record_bytes)
    progress = {} if rates is None else {"rates": rates}
    base = SimpleNamespace(step=7, total_bytes=base_bytes, progress_of=lambda stream: progress)
    last = SimpleNamespace(step=7 + records)
    return base, [SimpleNamespace(stream="rank-00000", records=[record] * records, last=last)]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_prediction_is_that_of_the_rates_measured_before():
    recovery = RecoveryProgress()
    recovery.begins(*chain(rates={"read_bytes_per_second": 5e8, "replay_seconds": 0.09}))
    assert recovery.predicted_seconds == pytest.approx(3 + 9)
    assert recovery.text == "loading 1.4 GiB and replaying 100 steps, about 12.0 s"


def test_before_any_was_measured_it_is_that_of_plain_numbers():
    recovery = RecoveryProgress()
    recovery.begins(*chain())
    expected = 1.5e9 / READ_BYTES_PER_SECOND + 100 * 1e7 / REPLAY_BYTES_PER_SECOND
    assert recovery.predicted_seconds == pytest.approx(expected)


def test_what_it_took_is_what_the_next_one_is_predicted_by():
    clock, shares = Clock(), []
    recovery = RecoveryProgress(lambda r: shares.append(r.done_share), clock)
    base, chains = chain(rates={"read_bytes_per_second": 1e9, "replay_seconds": 1.0})
    recovery.begins(base, chains)
    for _ in range(3):
        clock.now += 2.0
        recovery.loaded(500_000_000)
    for _ in chains[0].records:
        clock.now += 0.25
        recovery.replayed()
    recovery.ended()
    assert recovery.rates == {"read_bytes_per_second": 2.5e8, "replay_seconds": 0.25}
    assert (recovery.load_seconds, recovery.replay_seconds) == (6.0, 25.0)
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)


def test_a_recovery_without_records_leaves_the_rate_of_replay_as_it_was():
    recovery = RecoveryProgress(clock=Clock())
    recovery.begins(*chain(records=0, rates={"replay_seconds": 0.5}))
    recovery.ended()
    assert recovery.rates == {"replay_seconds": 0.5}
    assert recovery.text.startswith("loading 1.4 GiB, about")


def test_a_resume_tells_how_it_gets_on_and_leaves_events(tmp_path):
    loop, checkpointer = start(tmp_path, base_every=1000)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 9)
    told = []
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume(show=lambda r: told.append((r.loaded_bytes, r.replayed_records, r.over)))
        checkpointer.save()
        go_on(loop, checkpointer, 10)
        checkpointer.save()
    assert told[0] == (0, 0, False) and told[-1][1:] == (9, True)
    assert [records for _, records, over in told if records and not over] == list(range(1, 10))
    found = {event["event"]: event for event in read_events(tmp_path / "events.jsonl")}
    assert found["recovering"]["to_step"] == 9 and found["recovering"]["predicted_seconds"] > 0
    assert found["recovered"]["records"] == 9 and found["recovered"]["replay_seconds"] > 0
    with LocalStore.read(tmp_path) as reader:
        rates = reader.load(reader.line()[0]).progress["rates"]
    assert rates["replay_seconds"] == pytest.approx(found["recovered"]["replay_seconds"] / 9)


def test_a_damaged_base_begins_another_prediction(tmp_path):
    loop, checkpointer = start(tmp_path, base_every=1000)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 4)
        checkpointer.save()
    with LocalStore.read(tmp_path) as reader:
        newest = reader.load(reader.line()[0])
        path = tmp_path / next(iter(newest.files.values())).path
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    bases = []
    _, checkpointer = start(tmp_path)
    with checkpointer, pytest.warns(UserWarning, match="checksum"):
        assert checkpointer.resume(show=lambda r: bases.append(r.base_step)) == 4
    assert bases[0] == 4 and bases[-1] == 0
    assert issubclass(Damaged, Exception)


def drawn(terminal):
    text = io.StringIO()
    show = progress_bar(Console(file=text, force_terminal=terminal, width=120))
    recovery = RecoveryProgress(show)
    recovery.begins(*chain(rates={"read_bytes_per_second": 5e8, "replay_seconds": 0.09}))
    recovery.loaded(1_500_000_000)
    recovery.ended()
    return text.getvalue()


def test_the_bar_is_drawn_on_a_terminal_and_nowhere_else():
    assert "loading 1.4 GiB and replaying 100 steps, about 12.0 s" in drawn(True)
    assert drawn(False) == ""


def test_the_bar_has_a_public_name(tmp_path, capsys):
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume(show=holdfast.progress_bar())
        go_on(loop, checkpointer, 2)
    assert capsys.readouterr() == ("", "")
