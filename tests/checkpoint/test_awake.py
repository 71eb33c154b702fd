"""A process that was suspended does not call others hung for the time that it was away itself."""

from __future__ import annotations

import pytest

from holdfast.checkpoint import running_clock
from holdfast.checkpoint.replica.replica_process import ReplicaProcess
from holdfast.errors import WriterHung


class Hands:
    """Of a clock that is set by hand."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def test_a_clock_stands_still_while_suspended():
    hands = Hands()
    clock = running_clock.RunningClock(hands)
    found = []
    for seconds in (0.5, 0.5, 3600.0, 0.5):
        hands.seconds += seconds
        found.append(clock.now())
    assert found == [0.5, 1.0, 1.0 + running_clock.MOST_SECONDS, 1.5 + running_clock.MOST_SECONDS]


def test_a_replica_is_not_hung_after_suspension(monkeypatch):
    hands = Hands()
    monkeypatch.setattr(running_clock, "now", running_clock.RunningClock(hands).now)
    helper, since = ReplicaProcess(lambda about: None, 60.0), running_clock.now()
    hands.seconds += 3600
    helper.check(since)
    with pytest.raises(WriterHung, match="said nothing for 6"):
        for _ in range(61):
            hands.seconds += 1
            helper.check(since)
