"""Whatever works beside the model's computations computes with one thread; the model keeps its own."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import holdfast
from holdfast.checkpoint.log.recorder import Recorder
from holdfast.offload import engine
from holdfast.offload.executor import Executor
from holdfast.offload.setup import drive_setup
from holdfast.optim import MeZO
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
