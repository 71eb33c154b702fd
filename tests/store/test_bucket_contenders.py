"""Many processes want the lock of a bucket at the same time: one at a time has it, and all go on.

They are threads that take turns by a simulated clock, so seconds of requests take no time and each case is repeatable.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from types import SimpleNamespace

import pytest

from holdfast.errors import DiskFailed
from holdfast.store import bucket_lock
from holdfast.store.bucket_lock import BucketLock
from holdfast.store.object_store import ObjectFacts, Url


class Simulation:
    """A clock, and functions that run at the same time by it: one of them at a time until it sleeps."""

    def __init__(self, seed):
        self.random, self.now = random.Random(seed), 0.0
        self._sleeping, self._numbers = [], itertools.count()
        self._stopped, self._errors = threading.Semaphore(0), []

    def sleep(self, seconds):
        turn = threading.Event()
        heapq.heappush(self._sleeping, (self.now + seconds, next(self._numbers), turn))
        self._stopped.release()
        turn.wait()

    def run(self, *functions):
        for function in functions:
            threading.Thread(target=self._until_end, args=(function,), daemon=True).start()
            self._stopped.acquire()
        while self._sleeping:
            self.now, _, turn = heapq.heappop(self._sleeping)
            turn.set()
            self._stopped.acquire()
        if self._errors:
            raise self._errors[0]

    def _until_end(self, function):
        try:
            self.sleep(0.2 * self.random.random())
            function()
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._stopped.release()


class SimulatedBucket:
    """Objects that each request reaches after about ``latency_seconds``, with times of whole seconds."""

    root = Url("s3://bucket/run")

    def __init__(self, simulation, latency_seconds):
        self._simulation, self._latency_seconds = simulation, latency_seconds
        self.objects, self.may_remove = {}, True

    def _pass(self):
        self._simulation.sleep(self._latency_seconds * self._simulation.random.uniform(0.2, 0.8))

    def _request(self, effect):
        self._pass()
        found = effect()
        self._pass()
        return found

    def put(self, path, data):
        self._request(lambda: self.objects.update({path: (data, int(self._simulation.now))}))

    def facts(self, folder):
        return self._request(
            lambda: {path: ObjectFacts(len(data), at) for path, (data, at) in self.objects.items()}
        )

    def read_bytes(self, path):
        found = self._request(lambda: self.objects.get(path))
        if found is None:
            raise FileNotFoundError(path)
        return found[0]

    def unlink(self, path):
        if not self.may_remove:
            raise DiskFailed("403")
        self._request(lambda: self.objects.pop(path, None))


@pytest.fixture
def begin(monkeypatch):
    """Return a function that begins a simulation, by which the clock and the random numbers of the lock go."""

    def begin(seed, latency_seconds=0.1):
        simulation = Simulation(seed)
        monkeypatch.setattr(
            bucket_lock,
            "time",
            SimpleNamespace(
                monotonic=lambda: simulation.now,
                sleep=simulation.sleep,
                clock_gettime=lambda _: simulation.now,
                CLOCK_MONOTONIC=time.CLOCK_MONOTONIC,
            ),
        )
        monkeypatch.setattr(bucket_lock, "random", simulation.random)
        names = SimpleNamespace(token_hex=lambda n: f"{simulation.random.getrandbits(8 * n):x}")
        monkeypatch.setattr(bucket_lock, "secrets", names)
        return simulation, SimulatedBucket(simulation, latency_seconds)

    return begin


@pytest.mark.parametrize("may_remove", [True, False])
@pytest.mark.parametrize("seed, latency_seconds", [(1, 0.1), (2, 0.02), (3, 1.5)])
def test_all_of_many_contenders_have_the_lock_one_by_one(begin, seed, latency_seconds, may_remove):
    simulation, bucket = begin(seed, latency_seconds)
    bucket.may_remove = may_remove
    inside, turns = [], []

    def contender():
        lock = BucketLock(bucket)
        with lock.acquired(1000.0) as is_acquired:
            assert is_acquired and not inside
            inside.append(lock)
            simulation.sleep(0.5)
            inside.remove(lock)
            lock.check()
            turns.append(simulation.now)

    simulation.run(*[contender] * 16)
    assert len(turns) == 16 and max(turns) < 16 * (0.5 + 12 * latency_seconds) + 10


@pytest.mark.parametrize("seed", range(3))
def test_many_nodes_publish_every_commit_soon(begin, seed):
    """A commit every five seconds, which every node wants to publish at once, and one of them has to."""
    simulation, bucket = begin(seed)
    published, failed, end = {}, [], 60.0

    def node():
        lock = BucketLock(bucket)
        while simulation.now < end:
            simulation.sleep(1.0)
            commit = int(simulation.now // 5)
            if commit in published:
                continue
            with lock.acquired(30.0, lambda: commit in published) as is_acquired:  # noqa: B023
                if is_acquired:
                    simulation.sleep(0.5)
                    published.setdefault(commit, simulation.now - 5 * commit)
                elif commit not in published:
                    failed.append(commit)

    simulation.run(*[node] * 16)
    assert failed == [] and published.keys() >= {*range(12)} and max(published.values()) < 6, published


def test_one_holder_is_waited_for_once_and_named(begin):
    """A process elsewhere was killed: the last push of a run, after one that was under way, waits no second time."""
    simulation, bucket = begin(0)
    bucket.objects["lock/left"] = b'{"pid": 7, "host": "there"}', 0
    lock, ends = BucketLock(bucket), []

    def waiting():
        for _ in range(2):
            assert not lock.acquire(30.0)
            ends.append(simulation.now)

    simulation.run(waiting)
    assert 30 < ends[0] < 32 and ends[1] - ends[0] < 2
    left = "s3://bucket/run/lock/left, which counts until 1970-01-01 00:10:00 UTC"
    assert lock.holder == f"process 7 on there ({left})" and [*bucket.objects] == ["lock/left"]
