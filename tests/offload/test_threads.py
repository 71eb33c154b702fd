"""Whatever works beside the model's computations computes with one thread; the model keeps its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time

import pytest
import torch

import holdfast
from holdfast.checkpoint.log.recorder import Recorder
from holdfast.offload import engine
from holdfast.offload.executor import Executor
from holdfast.offload.setup import drive_setup
from holdfast.optim import MeZO, torch_threads
from holdfast.optim.torch_threads import CpuTimes, SpinRule, cpu_times
from training import adamw, batches, decoder


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def watched(monkeypatch, kind, method):
    """By the name of each thread that calls ``method``, the numbers of threads that torch computes with on it."""
    found: dict[str, set[int]] = {}
    original = getattr(kind, method)

    def call(self, *args):
        found.setdefault(threading.current_thread().name, set()).add(torch.get_num_threads())
        return original(self, *args)

    monkeypatch.setattr(kind, method, call)
    return found


def test_operations_of_an_engine(tmp_path, two_threads, monkeypatch):
    found = watched(monkeypatch, Executor, "_start")
    model = decoder(blocks=3)
    with holdfast.offload(
        model, adamw(model), tmp_path, precision="fp32", placement=holdfast.Placement(activations_on_host=0.0)
    ) as engine:
        for step in range(3):
            engine.step(batches(step, 2))
    beside = {name: counts for name, counts in found.items() if name.startswith("holdfast-")}
    assert {name.split("-")[1] for name in beside} >= {"io", "update", "commit"}
    assert all(counts == {1} for counts in beside.values())
    assert found["MainThread"] == {2}


def test_who_calls_offload_keeps_its_threads_whenever_another_sets_its_own(
    tmp_path, two_threads, monkeypatch
):
    """A thread that is held up in the middle of that, which here all are, leaves 1 to who asks for the first time."""
    for module in (drive_setup, engine):
        monkeypatch.setattr(module, "one_torch_thread", lambda: torch.set_num_threads(1))
    model, found = decoder(blocks=2), []
    optimizer = MeZO(model.parameters())

    def run():
        holdfast.offload(model, optimizer, tmp_path, precision="fp32").close()
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [2]


def test_the_recorder_of_a_checkpointer(tmp_path, two_threads, monkeypatch):
    found = watched(monkeypatch, Recorder, "_do")
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        ckpt.resume()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        ckpt.step()
    assert found == {"holdfast-recorder": {1}}
    assert torch.get_num_threads() == 2


def cpu_seconds_of_loops() -> float:
    """Of the process, for parallel loops with pauses of a millisecond between them, in which threads may spin."""
    numbers = torch.zeros(1 << 17)
    before = time.process_time()
    for _ in range(100):
        numbers.add_(1)
        time.sleep(0.001)
    return time.process_time() - before


@pytest.mark.parametrize("chosen", [False, True])
def test_threads_spin_briefly_while_an_engine_is_open(tmp_path, two_threads, monkeypatch, chosen):
    for key in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):  # read long ago
        monkeypatch.delenv(key, raising=False)
    if chosen:
        monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    model = decoder(blocks=2)
    before = cpu_seconds_of_loops()
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        engine.step(batches(0, 2))
        engine.wait()
        names = [thread.name for thread in threading.enumerate()]
        inside = cpu_seconds_of_loops()
    after = cpu_seconds_of_loops()
    assert ("holdfast-spare-0" in names) is not chosen
    assert (inside < min(before, after) / 4) is not chosen, (before, inside, after)


@pytest.fixture
def played_times(monkeypatch):
    """Times that ``read(after, of_others)`` plays: so many seconds later, so many cores were used by others."""
    for key in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(key, raising=False)
    at, by_all = 100.0, 50.0

    def read(after, of_others):
        nonlocal at, by_all
        at += after
        own = 1.5 * after
        by_all += of_others * after + own
        monkeypatch.setattr(torch_threads, "cpu_times", lambda: CpuTimes(at, by_all, 1.5 * at))
        monkeypatch.setattr(time, "monotonic", lambda: at)

    return read


def spin_briefly() -> bool:
    return "holdfast-spare-0" in [thread.name for thread in threading.enumerate()]


def test_threads_spin_long_while_no_other_process_computes(two_threads, played_times):
    spins, found = SpinRule(), []
    for after, of_others in [(0, 0), (0.6, 0.02), (0.6, 0.2), (0.6, 0.9), (0.6, 0.2), (0.3, 0.0), (0.3, 0.0)]:
        played_times(after, of_others)
        spins.choose()
        found.append(spin_briefly())
    assert found == [True, False, False, True, True, True, False]
    played_times(0.6, 2.0)
    spins.choose()
    assert spin_briefly()
    spins.close()
    assert not spin_briefly()


def test_threads_spin_briefly_where_the_use_of_the_cpus_is_not_known(two_threads, played_times, monkeypatch):
    monkeypatch.setattr(torch_threads, "cpu_times", lambda: None)
    spins = SpinRule()
    for _ in range(2):
        spins.choose()
        assert spin_briefly()
    spins.close()


def test_cpus_that_the_system_does_not_show_are_not_known(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4094, 4095})
    assert cpu_times() is None


def test_what_another_process_computes_is_counted():
    """The kernel's counts are of 10 ms, and a busy machine leaves the other process less than a core."""
    loop = "import time\nwhile time.process_time() < 1: pass"
    before, children = cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-S", "-c", loop], check=True)
    after = cpu_times()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    computed = ended.ru_utime + ended.ru_stime - children.ru_utime - children.ru_stime
    assert computed > 1
    assert after.of_others_since(before) * (after.at - before.at) > 0.8 * computed


def test_what_this_process_computes_is_no_other_process():
    before = cpu_times()
    end = time.process_time() + 1
    while time.process_time() < end:
        pass
    after = cpu_times()
    of_all = after.by_all - before.by_all
    assert of_all > 0.8
    assert after.of_others_since(before) * (after.at - before.at) == pytest.approx(of_all - 1, abs=0.1)


def test_only_the_cpus_that_a_process_may_use_are_counted(monkeypatch):
    cpus = sorted(os.sched_getaffinity(0))
    by_each = []
    for cpu in cpus:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cpu=cpu: {cpu})
        by_each.append(cpu_times().by_all)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))
    assert cpu_times().by_all == pytest.approx(sum(by_each), abs=2 * len(cpus))
    assert min(by_each) > 0
