"""Any history of steps, skipped steps, resumes, goings-back and kills keeps the promise, power cut or not."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast import failpoints
from holdfast.io.queue import IOQueue
from holdfast.store.run_store import LocalStore
from killed import Killed, kill
from support.simdisk import SimDisk
from tiny_run import TinyRun, check_content

TENSORS = {"block_0": [("a/param", "F32", (3, 5))], "block_1": [("b/param", "BF16", (701,))]}
FROZEN = {"frozen": [("c/param", "U8", (11,))]}


class Store(RuleBasedStateMachine):
    """One directory on a simulated disk, written by one process after another."""

    @initialize(retain=st.sampled_from([1, 2, 3]), more=st.sampled_from([1, 2]))
    def start(self, retain, more):
        self.disk = SimDisk()
        self.retain, self.copies = retain, retain + more
        self.queue = IOQueue(1)
        self.acked = (0, 0)
        self.run = None
        self.resume()

    def resume(self, fork=None):
        self.run = TinyRun("/sim", disk=self.disk, tensors=TENSORS, frozen=FROZEN, threads=1, fork=fork,
                           retain=self.retain, copies=self.copies)  # fmt: skip
        assert self.run.step >= (self.acked[1] if fork is None else fork)
        self.acknowledge()

    def acknowledge(self):
        self.acked = (self.run.timeline, self.run.step)
        self.disk.ack(self.acked)

    @rule(count=st.integers(1, 3))
    def take_steps(self, count):
        for _ in range(count):
            self.run.take_step()
            self.acknowledge()

    @rule()
    def skip_a_step(self):
        """A step whose loss is not a number: written, never published."""
        unit = self.run.units["block_0"]
        generation = unit.acquire()
        self.run.write(unit, generation, 999, 999)
        unit.release(generation)

    @rule()
    def restart(self):
        self.run.close()
        self.resume()

    @rule(choice=st.randoms(use_true_random=False))
    def go_back(self, choice):
        steps = [ref.step for ref in self.run.store.line()]
        self.run.close()
        step = choice.choice(steps) if steps else None
        if step is not None:
            self.acked = (0, step)
            self.disk.ack(self.acked)
        self.resume(step)

    @rule(name=st.sampled_from(failpoints.NAMES))
    def killed(self, name):
        kept = failpoints.armed, failpoints.action
        failpoints.armed, failpoints.action = name, kill
        failpoints._arrivals.clear()
        try:
            if name == "after_timeline_opened":
                self.run.close()
                self.resume()
            for _ in range(3):
                self.run.take_step()
                self.acknowledge()
        except Killed:
            pass
        finally:
            failpoints.armed, failpoints.action = kept
        self.run.close()
        self.disk.end_process()
        self.resume()

    @invariant()
    def every_unit_has_a_free_generation(self):
        if self.run is not None:
            for unit in self.run.units.values():
                unit.release(unit.acquire())

    @invariant()
    def what_is_listed_is_whole_and_within_what_is_kept(self):
        if self.run is not None:
            self.check(self.disk)
            assert len(self.run.store.commits()) < self.copies

    def check(self, disk):
        reader = LocalStore.read("/sim", disk=disk, queue=self.queue) if disk.exists("commits") else None
        for ref in reader.commits() if reader else []:
            manifest = reader.load(ref)
            assert reader.verify(manifest) == []
            check_content(reader, manifest)
        return reader

    def teardown(self):
        """Power cuts at random moments of the whole history."""
        if self.run is None:
            return
        self.run.close()
        start = max(0, len(self.disk.log) - 60)
        images = list(self.disk.images(random.Random(0), samples=2, start=start))
        for image in random.Random(1).sample(images, min(25, len(images))):
            reader = self.check(image.disk)
            if image.acked and image.acked[1]:
                assert reader is not None
                assert reader.newest_whole()[0].step >= image.acked[1]
        self.queue.close()


Store.TestCase.settings = settings(max_examples=15, stateful_step_count=10, deadline=None)
test_store_machine = Store.TestCase
