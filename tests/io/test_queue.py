"""The queue moves bytes by priority, ends every future, and counts what it moved."""

from __future__ import annotations

import random
import threading
import time

import pytest

from holdfast.errors import QueueClosed
from holdfast.io.queue import IOQueue, Request, Throttle


class Fake:
    """A file that records the order of its transfers; the first one waits for ``gate``."""

    def __init__(self):
        self.log, self.gate, self.entered = [], threading.Event(), threading.Event()

    def _move(self, verb, offset):
        if not self.log:
            self.log.append((verb, offset))
            self.entered.set()
            assert self.gate.wait(10)
        else:
            self.log.append((verb, offset))

    def read(self, view, offset):
        self._move("read", offset)

    def write(self, view, offset):
        self._move("write", offset)


@pytest.fixture
def queue():
    queue = IOQueue(threads=1)
    yield queue
    queue.close()


def request(file, offset, *, write=False, nbytes=10, **hooks):
    return Request(file, memoryview(bytearray(nbytes)), offset, write, **hooks)


def submit(queue, requests, priority=0, **more):
    return queue.submit(requests, kind="state", phase="forward", priority=priority, **more)


def test_smaller_priorities_go_first_and_equal_ones_in_order(queue):
    file = Fake()
    futures = [submit(queue, [request(file, 0)], 9)]
    file.entered.wait(10)
    for offset, priority, write in [(1, 5, False), (2, 5, True), (3, 1, True), (4, 7, False)]:
        futures.append(submit(queue, [request(file, offset, write=write)], priority))
    file.gate.set()
    for future in futures:
        future.result(10)
    assert [offset for _, offset in file.log] == [0, 3, 1, 2, 4]


def test_one_future_for_a_group_with_the_result_of_finish(queue):
    file = Fake()
    file.gate.set()
    order = []
    hooks = [request(file, i, write=True, before=lambda i=i: order.append(i)) for i in range(3)]
    assert submit(queue, hooks, finish=lambda: order.append("finish") or "sum").result(10) == "sum"
    assert order == [0, 1, 2, "finish"]
    assert submit(queue, [], finish=lambda: 5).result(10) == 5


def test_the_first_failure_wins_and_the_rest_of_the_group_is_dropped(queue):
    file = Fake()
    file.gate.set()

    def fail():
        raise OSError("broken")

    future = submit(
        queue, [request(file, 0), request(file, 1, after=fail), request(file, 2)], finish=lambda: 1
    )
    with pytest.raises(OSError, match="broken"):
        future.result(10)
    assert file.log == [("read", 0), ("read", 1)]
    assert submit(queue, [request(file, 3)]).result(10) is None


def test_a_failed_group_ends_only_when_none_of_its_transfers_is_under_way():
    queue = IOQueue(threads=4)
    file, failed = Fake(), threading.Event()

    def fail():
        failed.set()
        raise OSError("broken")

    future = submit(queue, [request(file, 0)])
    file.entered.wait(10)
    future = submit(queue, [request(Slow(file), 1), request(file, 2, after=fail)])
    assert failed.wait(10)
    time.sleep(0.05)
    assert not future.done()
    file.gate.set()
    with pytest.raises(OSError, match="broken"):
        future.result(10)
    queue.close()


class Slow:
    """Moves when the gate of another file opens."""

    def __init__(self, file):
        self.file = file

    def read(self, view, offset):
        assert self.file.gate.wait(10)

    write = read


def test_what_has_not_begun_can_be_cancelled(queue):
    file = Fake()
    first = submit(queue, [request(file, 0)])
    file.entered.wait(10)
    second = submit(queue, [request(file, 1)])
    assert second.cancel()
    file.gate.set()
    first.result(10)
    assert submit(queue, [request(file, 2)]).result(10) is None
    assert file.log == [("read", 0), ("read", 2)]


def test_close_ends_every_wait(queue):
    file = Fake()
    running = submit(queue, [request(file, 0), request(file, 1)])
    file.entered.wait(10)
    waiting = submit(queue, [request(file, 2)])
    threading.Timer(0.05, file.gate.set).start()
    queue.close()
    queue.close()
    for future in running, waiting:
        with pytest.raises(QueueClosed):
            future.result(0)
    with pytest.raises(QueueClosed):
        submit(queue, [])
    assert not any(thread.is_alive() for thread in queue._threads)


def test_reads_go_on_while_writes_hold_all_threads_they_may():
    queue = IOQueue(threads=2)
    file, other = Fake(), Fake()
    other.gate.set()
    writes = [submit(queue, [request(Slow(file), i, write=True)]) for i in range(3)]
    assert submit(queue, [request(other, 0)], priority=9).result(10) is None
    file.gate.set()
    for future in writes:
        future.result(10)
    queue.close()


def test_bytes_are_counted_by_direction_kind_and_phase_once_they_moved(queue):
    file = Fake()
    file.gate.set()
    submit(queue, [request(file, 0, nbytes=7), request(file, 1, nbytes=8)]).result(10)
    submit(queue, [request(file, 0, write=True, nbytes=5)]).result(10)
    assert queue.counters() == {("read", "state", "forward"): 15, ("write", "state", "forward"): 5}


def test_a_group_of_reads_and_writes_is_refused(queue):
    with pytest.raises(ValueError, match="all reads or all writes"):
        submit(queue, [request(Fake(), 0), request(Fake(), 0, write=True)])


def test_a_throttled_device_takes_bytes_over_rate_seconds():
    now = [0.0]
    throttle = Throttle(
        100, burst_bytes=50, clock=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    for _ in range(4):
        throttle.wait(throttle.reserve(100))
    assert now[0] == pytest.approx(4.0)
    now[0] = 100.0
    throttle.wait(throttle.reserve(100))
    assert now[0] == pytest.approx(100.5)  # an idle device catches up by one burst, no more


def test_a_throttle_without_a_limit_never_waits():
    Throttle(None, sleep=lambda _: pytest.fail("slept")).wait(0.0)


def test_every_future_ends_whatever_is_submitted_cancelled_failed_or_closed():
    """Three submitters, random groups, some failing, some cancelled, the queue closed under them."""

    class Memory:
        def read(self, view, offset):
            if offset == 13:
                raise OSError("thirteen")

        write = read

    queue, futures = IOQueue(threads=3), []

    def submitter(seed):
        rng = random.Random(seed)
        for number in range(300):
            requests = [
                request(Memory(), rng.randrange(14), write=number % 2 == 0) for _ in range(rng.randrange(4))
            ]
            try:
                future = submit(queue, requests, rng.randrange(3), finish=lambda: "done")
            except QueueClosed:
                return
            futures.append((future, any(item.offset == 13 for item in requests)))
            if rng.random() < 0.2:
                future.cancel()

    threads = [threading.Thread(target=submitter, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.03)
    queue.close()
    for thread in threads:
        thread.join(10)
    assert futures
    for future, fails in futures:
        assert future.done()
        if not future.cancelled():
            error = future.exception(0)
            assert (
                error is None
                or isinstance(error, OSError if fails else QueueClosed)
                or type(error) is QueueClosed
            )
            assert error is not None or future.result(0) == "done"
