"""The Checkpointer beside training on a separate device that is played in pure Python (``played_device.py``)."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import played_device
from checkpoint.copy_order import Order
from checkpoint.loops import cut_small
from holdfast import accelerators
from holdfast.checkpoint.capture import device_staging, staging_buffers
from holdfast.checkpoint.compression import comm_hook
from holdfast.checkpoint.compression.lossy import Int8, TopK
from holdfast.checkpoint.recovery import model_description
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.checkpoint.replica import replica_process
from holdfast.checkpoint.snapshot import frozen_chunks, snapshot_writer
from holdfast.checkpoint.snapshot.snapshot_image import SnapshotImage
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput
from holdfast.events import read_events
from holdfast.state.progress import draw_again, drawn_since, generator_states
from holdfast.store.commit.retention import Keep
from played_device import HERE, PLAYED, Module, Played, Silent, played  # noqa: F401
from replica_run import Forked

pytestmark = pytest.mark.usefixtures("played")

STEPS = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 70), nn.Linear(70, 3, bias=False)
        self.norm, self.dropout = nn.BatchNorm1d(70), nn.Dropout(0.2)

    def forward(self, x):
        return self.second(self.dropout(torch.relu(self.norm(self.first(x)))))


class Script:
    """A loop on ``device``; each step has its own batch and zeroes the gradients that were recorded."""

    def __init__(self, device=HERE):
        torch.manual_seed(0)
        self.device = device
        self.model = Net().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)

    def step(self, i):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(i)).to(self.device)
        self.model(x).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def state(self):
        held = {
            f"{n}/{s}": v
            for n, p in self.model.named_parameters()
            for s, v in self.optimizer.state[p].items()
        }
        return {name: t.detach().cpu().clone() for name, t in {**self.model.state_dict(), **held}.items()}


def plain_loop(steps=STEPS):
    script, states = Script(torch.device("cpu")), {}
    for i in range(steps):
        script.step(i)
        states[i + 1] = script.state()
    return states


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def train(root, steps=STEPS, stop=None, **options):
    """Go on to ``steps``. Returns the script, and its state after each step."""
    script, states = Script(), {}
    checkpointer = Checkpointer(
        root, model=script.model, optimizer=script.optimizer, **{"base_every": 3, "keep": Keep(9), **options}
    )
    for i in range(checkpointer.resume(), steps):
        script.step(i)
        checkpointer.step()
        states[i + 1] = script.state()
    checkpointer.close(save=stop is None)
    return script, states


def test_records_there_equal_the_plain_loop(tmp_path):
    """Killed after step 5, resumed, and looked at step by step."""
    states = plain_loop()
    train(tmp_path, steps=5, stop=5)
    _, later = train(tmp_path)
    assert later.keys() == {6, 7, 8} and all(same(later[i], states[i]) for i in later)
    for step in (8, 7, 4, 1):
        script = Script()
        with Checkpointer(tmp_path, model=script.model, optimizer=script.optimizer, keep=Keep(9)) as again:
            assert again.resume(step=step) == step
            assert same(script.state(), states[step]), step
    assert PLAYED.runtime.pins > 0 and PLAYED.runtime.pinned == {}
    assert all(PLAYED.events)


def test_replay_without_the_script_is_there(tmp_path):
    """``holdfast compact`` makes a base of the newest step."""
    states = plain_loop(5)
    train(tmp_path, steps=5, stop=5, base_every=100)
    assert compact(tmp_path, None).base.step == 5
    script = Script()
    with Checkpointer(tmp_path, model=script.model, optimizer=script.optimizer) as again:
        assert again.resume() == 5 and same(script.state(), states[5])


@pytest.mark.parametrize("codec", [TopK(0.2), Int8(16)], ids=str)
def test_compressed_records_come_back_there(tmp_path, codec):
    """The gradients of a step are compressed together, and each is expanded by itself."""
    _, states = train(tmp_path, codec=codec, base_every=100)
    for step in (7, 5, 2):
        script = Script()
        again = Checkpointer(
            tmp_path, model=script.model, optimizer=script.optimizer, codec=codec, keep=Keep(9)
        )
        with again, pytest.warns(UserWarning, match="state-exact"):
            assert again.resume(step=step) == step
            assert same(script.state(), states[step]), step


def forked(monkeypatch, tmp_path):
    """A replica is a fork of this process, so that it has the device too, and keeps its state in ``tmp_path``."""
    monkeypatch.setattr(replica_process, "start_process", Forked)
    memory = tmp_path / "memory"
    memory.mkdir()
    return memory


def test_replica_keeps_its_state_on_the_device(tmp_path, monkeypatch):
    """Every step is the trainer's, and comes back from the snapshots that the replica made."""
    script, states = Script(), {}
    monkeypatch.setattr(device_staging, "StagedOnDevice", None)  # nothing is moved for an update
    checkpointer = Checkpointer(
        tmp_path / "run", model=script.model, optimizer=script.optimizer, keep=Keep(9),
        replica=forked(monkeypatch, tmp_path),
    )  # fmt: skip
    with checkpointer:
        checkpointer.resume()
        for i in range(4):
            script.step(i)
            checkpointer.step()
            checkpointer.save()
            states[i + 1] = script.state()
    assert not [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "drift"]
    expected = plain_loop(4)
    for step in reversed(states):
        again = Script()
        with Checkpointer(
            tmp_path / "run", model=again.model, optimizer=again.optimizer, keep=Keep(9)
        ) as resumed:
            assert resumed.resume(step=step) == step
            assert same(again.state(), states[step]) and same(states[step], expected[step]), step


@pytest.mark.parametrize("free, there", [(6 * 4 * 8 * 100, True), (6 * 4 * 8 * 100 - 1, False)])
def test_replica_takes_an_eighth_of_what_is_free(monkeypatch, free, there):
    """Six times the parameters: with gradients, optimizer state and an update's temporaries."""
    monkeypatch.setattr(Module, "mem_get_info", lambda module, device=None: (free, 1 << 40))
    items = [{"name": "weight", "shape": [10, 10], "dtype": "F32"}]
    assert model_description._fits_on_devices(items, {"weight": HERE}) == there
    assert not model_description._fits_on_devices(items, {"weight": torch.device("cpu")})


def test_threads_say_which_device_is_theirs(tmp_path):
    """Waiting for an event or pinning memory on a thread of device 0 makes a context there."""
    train(tmp_path)
    assert set(PLAYED.syncs) == {"holdfast-recorder"} and PLAYED.runtime.pins
    assert PLAYED.without_device == []


def test_training_waits_for_no_comparison_of_frozen_parameters(tmp_path, monkeypatch):
    """However small they are: what is on its way to the device would be waited for with them."""
    compared, real = [], SnapshotImage.first_difference

    def note(*arguments):
        compared.append(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(SnapshotImage, "first_difference", note)
    for steps in (1, 7):
        script = Script()
        script.model.first.requires_grad_(False)
        script.optimizer = torch.optim.SGD([p for p in script.model.parameters() if p.requires_grad], lr=0.1)
        with Checkpointer(
            tmp_path, model=script.model, optimizer=script.optimizer, base_every=2
        ) as checkpointer:
            for i in range(checkpointer.resume(), steps):
                script.step(i)
                checkpointer.step()
                checkpointer._backend.drain()
    assert set(compared) == {"holdfast-recorder"} == set(PLAYED.syncs)


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_gradients_are_staged_where_there_is_room(tmp_path, monkeypatch, free):
    states, streams = plain_loop(4), []
    monkeypatch.setattr(Module, "mem_get_info", lambda module, device=None: (free, 1 << 40))
    monkeypatch.setattr(Played, "record_stream", lambda tensor, stream: streams.append(stream))
    _, found = train(tmp_path, steps=4, base_every=100)
    assert bool(streams) == bool(free) and all(same(found[i], states[i]) for i in states)


def test_staging_ends_when_memory_runs_out(tmp_path, monkeypatch):
    tries = []

    def full(sources):
        tries.append(len(sources))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(staging_buffers, "_joined", full)
    states = plain_loop(4)
    _, found = train(tmp_path, steps=4, base_every=100)
    assert tries == [5] and all(same(found[i], states[i]) for i in states)


def test_random_numbers_of_the_device_go_on(tmp_path):
    """What the device's generator was after the step that is resumed."""
    for steps in (4, 6):
        script = Script()
        with Checkpointer(tmp_path, model=script.model, optimizer=script.optimizer) as checkpointer:
            for i in range(checkpointer.resume(), steps):
                assert i < 4 or PLAYED.state[0] == i
                script.step(i)
                PLAYED.state[0] = i + 1
                checkpointer.step()
        PLAYED.state[0] = 99


def test_random_numbers_an_update_draws_there_are_replayed(monkeypatch):
    before = generator_states()
    PLAYED.state[3] = 7
    drawn = drawn_since(before)
    draw_again(drawn)
    assert PLAYED.state[3] == 0 and drawn_since(before) is None


def test_unrecorded_random_numbers_are_refused(tmp_path, monkeypatch):
    monkeypatch.delattr(Module, "get_rng_state_all")
    script = Script()
    with pytest.raises(BadInput, match="random numbers of played is not recorded"):
        Checkpointer(tmp_path / "run", model=script.model, optimizer=script.optimizer)
    assert not (tmp_path / "run").exists()


def test_a_step_captured_as_a_graph_is_refused(tmp_path, monkeypatch):
    """Its replays run no hook, so that training would go on without a record of it."""
    script = Script()
    with Checkpointer(tmp_path / "run", model=script.model, optimizer=script.optimizer) as checkpointer:
        checkpointer.resume()
        script.step(0)
        checkpointer.step()
        monkeypatch.setattr(PLAYED, "captures", True)
        with pytest.raises(BadInput, match="captured as a graph"):
            script.step(1)


# Copies that somebody waits for


def ordered_run(root, monkeypatch, mutate=None, base_every=1):
    """What is in no order in a run of some steps, with bases of several units; ``mutate`` puts a fault in."""
    cut_small(monkeypatch)
    order = Order(monkeypatch)
    order.hand_back(monkeypatch)
    PLAYED.listener = order
    if mutate is not None:
        mutate(monkeypatch)
    script = Script()
    checkpointer = Checkpointer(
        root, model=script.model, optimizer=script.optimizer, base_every=base_every, memory="200 MiB"
    )
    checkpointer.resume()
    for i in range(5):
        script.step(i)
        checkpointer.step()
        if i > 1:
            checkpointer._backend.recorder.drain()
    checkpointer.close()
    PLAYED.listener = Silent()
    return order.problems


def test_all_copies_are_waited_for(tmp_path, monkeypatch):
    assert ordered_run(tmp_path, monkeypatch) == []


def no_wait_for_computing(patch):
    patch.setattr(played_device.Stream, "wait_event", lambda stream, event: None)


def no_record_stream(patch):
    patch.setattr(Played, "record_stream", lambda tensor, stream: None)


def gradients_themselves_leave(patch):
    patch.setattr(staging_buffers._Departure, "_staged", lambda departure, sources: (sources, sources))


def mark_of_another_stream(patch):
    patch.setattr(staging_buffers, "record_event", lambda stream: accelerators.record_event(PLAYED.default))


def slots_that_nobody_waits_for(patch):
    patch.setattr(staging_buffers.StagingBuffer, "wait_for_copies", lambda slot: slot._marks.clear())


def buffers_that_nobody_waits_for(patch):
    patch.setattr(staging_buffers.AsyncHostCopy, "arrived", lambda this: this._copies)


def bases_that_nobody_waits_for(patch):
    real = snapshot_writer.SnapshotWriter._write
    patch.setattr(
        snapshot_writer.SnapshotWriter,
        "_write",
        lambda maker, staged, buffer, marks: real(maker, staged, buffer, ()),
    )


def one_buffer_for_all_bases(patch):
    real = snapshot_writer.PinnedChunks.give

    def give(landing, buffer):
        landing._free = [each for each in landing._free if each is not buffer]
        real(landing, buffer)

    patch.setattr(
        snapshot_writer.PinnedChunks,
        "take",
        lambda landing, nbytes: landing._free[-1] if landing._free else None,
    )
    patch.setattr(snapshot_writer.PinnedChunks, "give", give)


MUTANTS = {
    no_wait_for_computing: "_foreach_copy_ [stream",
    no_record_stream: "memory of compute goes beside aten::_foreach_copy_ [stream",
    gradients_themselves_leave: "[compute] beside aten::_foreach_copy_ [stream",
    mark_of_another_stream: "a record [holdfast-recorder] beside aten::_foreach_copy_ [stream",
    slots_that_nobody_waits_for: "a record [holdfast-recorder] beside aten::_foreach_copy_ [stream",
    buffers_that_nobody_waits_for: "sealing [holdfast-recorder] beside aten::_to_copy [compute]",
    bases_that_nobody_waits_for: "a base [write",
    one_buffer_for_all_bases: "aten::_foreach_copy_ [stream",
}  # fmt: skip
"""Faults, and what the order of accesses says of each."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_missing_wait_is_found(tmp_path, monkeypatch, mutant):
    beside_bases = mutant in (bases_that_nobody_waits_for, one_buffer_for_all_bases)
    problems = ordered_run(tmp_path, monkeypatch, mutant, 1 if beside_bases else 100)
    assert any(MUTANTS[mutant] in problem for problem in problems), problems


# Updates of a replica


class Parameter:
    """In place of one: torch lets no parameter of the host take the data of a device that Python plays."""

    def __init__(self, data):
        self.data, self.device = data, data.device

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)
        if name == "data":
            object.__setattr__(self, "device", value.device)


def visits(monkeypatch, mutate=None, rounds=3):
    """Parameters go to the device, one after the other, are updated there and come home. Returns them, and what is in
    no order."""
    order = Order(monkeypatch)
    PLAYED.listener = order
    if mutate is not None:
        mutate(monkeypatch)
    torch.manual_seed(0)
    held = [Parameter(torch.randn(70, 5).t()), Parameter(torch.randn(3)), Parameter(torch.randn(0))]
    optimizer, homes = (
        SimpleNamespace(state={p: {"step": torch.zeros(())} for p in held}),
        device_staging.PinnedHomes(HERE),
    )
    for _ in range(rounds):
        for p in held:
            homes.make_room()
            visit = device_staging.StagedOnDevice(p, optimizer, HERE, {"step"}, homes)
            assert p.device == HERE
            optimizer.state[p].setdefault("m", torch.zeros_like(p.data)).add_(p.data)
            p.data.mul_(0.5)
            assert visit.end() == {"step"}
        homes.wait_for_copies()
        for p in held:
            order.reads(p.data, "the host")
            order.reads(optimizer.state[p]["m"], "the host")
    PLAYED.listener = Silent()
    return held, optimizer, homes, order.problems


def test_a_visit_is_pinned_once_and_waited_for(monkeypatch):
    held, optimizer, homes, problems = visits(monkeypatch)
    assert problems == [] and PLAYED.runtime.pins == 1
    torch.manual_seed(0)
    for p, first in zip(held, (torch.randn(70, 5).t(), torch.randn(3), torch.randn(0)), strict=True):
        assert torch.equal(p.data, first / 8) and torch.equal(
            optimizer.state[p]["m"], first + first / 2 + first / 4
        )
        assert p.data.stride() == first.stride() == optimizer.state[p]["m"].stride()
    homes.free()
    assert PLAYED.runtime.pinned == {}


def homes_that_nobody_waits_for(patch):
    patch.setattr(device_staging.PinnedHomes, "wait_for_copies", lambda homes: None)


def updates_that_do_not_wait_for_their_data(patch):
    patch.setattr(
        played_device.Stream,
        "wait_event",
        lambda stream, event: stream is PLAYED.default or wait(stream, event),
    )


def data_that_does_not_wait_for_its_update(patch):
    patch.setattr(
        played_device.Stream,
        "wait_event",
        lambda stream, event: stream is not PLAYED.default or wait(stream, event),
    )


wait = played_device.Stream.wait_event
VISITS = {
    homes_that_nobody_waits_for: "the host [MainThread] beside aten::_foreach_copy_ [stream",
    updates_that_do_not_wait_for_their_data: "[compute] beside aten::copy_ [stream",
    data_that_does_not_wait_for_its_update: "aten::_foreach_copy_ [stream",
    no_record_stream: "memory of stream",
}


@pytest.mark.parametrize("mutant", VISITS, ids=lambda mutant: mutant.__name__)
def test_a_missing_wait_of_a_visit_is_found(monkeypatch, mutant):
    *_, problems = visits(monkeypatch, mutant)
    assert any(VISITS[mutant] in problem for problem in problems), problems


# Ranks that exchange what they kept


class Gathered:
    """The other rank sent the same; what follows is on a stream of its own, as with NCCL."""

    def get_future(self):
        return self

    def then(self, join):
        beside, event = played_device.Stream(), accelerators.record_event(PLAYED.default)
        beside.wait_event(event)
        for one in self.received:
            one.record_stream(beside)  # as torch's futures do for what they hold
        with PLAYED.stream(beside):
            self.found = join(self)
        return self

    def all_gather(self, received, sent, group, async_op):
        for one in received:
            one.copy_(sent)
        self.received = received
        return self


def test_exchanged_elements_are_in_order(monkeypatch):
    """What the callback's stream reads is its own, or known to it: memory of backward's stream goes back to that."""
    codec, order, gathered = TopK(0.2), Order(monkeypatch), Gathered()
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(3000, device=HERE))
    buffer = torch.randn(3000).to(HERE)
    expected, largest = torch.zeros(3000), buffer.cpu()
    bucket = SimpleNamespace(
        index=lambda: 0, parameters=lambda: [parameter], gradients=lambda: [buffer], buffer=lambda: buffer
    )
    monkeypatch.setattr(comm_hook.dist, "all_gather", gathered.all_gather)
    PLAYED.listener = order
    comm_hook.topk_hook(comm_hook.HookState(codec, SimpleNamespace(size=lambda: 1)), bucket)
    assert order.problems == []
    PLAYED.listener = Silent()
    for block in largest.split(1024):
        order_of = block.abs().argsort(descending=True)[: codec.kept(len(block))]
        expected[block.storage_offset() :][order_of] = block[order_of]
    assert torch.equal(buffer.cpu(), expected)


def test_a_hidden_change_there_is_found_within_eight_bases(tmp_path, monkeypatch):
    """A part of what is frozen is compared at each base, by the recorder's thread on a stream of its own."""
    monkeypatch.setattr(frozen_chunks, "COMPARED_AT_ONCE", 0)
    compared = []
    real = snapshot_writer.SnapshotImage.first_difference
    monkeypatch.setattr(
        snapshot_writer.SnapshotImage,
        "first_difference",
        lambda image, checksums, blocks, beat: (
            compared.append((threading.current_thread().name, len(blocks))),
            real(image, checksums, blocks, beat),
        )[1],
    )
    script = Script()
    script.model.first.requires_grad_(False)
    checkpointer = Checkpointer(tmp_path, model=script.model, optimizer=script.optimizer, base_every=1)
    with warnings.catch_warnings(record=True) as told, checkpointer:
        warnings.simplefilter("always")
        checkpointer.resume()
        for i in range(60):
            if i == 20:
                script.model.first.weight.data[0, 0] += 1
                before, bases = len(compared), checkpointer._backend.pace.bases._chunks._turn
            script.step(i)
            checkpointer.step()
            checkpointer._backend.recorder.drain()
            if told and i >= 20:
                break
        turns = checkpointer._backend.pace.bases._chunks._turn - bases
        checkpointer.save()
        state = script.state()
    assert any("changed in a way that nothing counts" in str(each.message) for each in told)
    assert turns <= frozen_chunks.DEVICE_TURNS + 1
    assert {name for name, _ in compared} == {"holdfast-recorder"}
    assert (
        0 < sum(count for _, count in compared[:before]) < before
    )  # a file of one block, at each eighth base
    again = Script()
    again.model.first.requires_grad_(False)
    with Checkpointer(tmp_path, model=again.model, optimizer=again.optimizer) as checkpointer:
        checkpointer.resume()
        assert same(again.state(), state)


@pytest.mark.parametrize(
    "options",
    [{"base_every": 99}, {"every": 2}, {"every": "auto"}, {"codec": Int8(16)}, {"codec": TopK(0.2)}],
    ids=str,
)
def test_training_waits_for_events_alone(tmp_path, options):
    script = Script()
    with Checkpointer(tmp_path, model=script.model, optimizer=script.optimizer, **options) as checkpointer:
        checkpointer.resume()
        for i in range(3):
            script.step(i)
            checkpointer.step()
        checkpointer.wait()
        PLAYED.hidden_waits.clear()
        for _ in range(2):
            script.optimizer.step()
            script.optimizer.zero_grad(set_to_none=False)
            checkpointer.step()
        here = threading.current_thread().name
        assert [wait for wait in PLAYED.hidden_waits if wait.endswith(here)] == []


class CountsThere(torch.optim.SGD):
    """Has a step count on the device, as ASGD, and a product on the host, as NAdam."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            slots = self.state[parameter]
            if not slots:
                slots["step"] = torch.zeros((), device=parameter.device)
                slots["mu_product"] = torch.ones(())
            slots["step"] += 1
            slots["mu_product"] *= 0.9
        super().step(closure)


@pytest.mark.parametrize("replica", [False, True])
def test_state_of_an_optimizer_comes_back_to_where_it_was(tmp_path, monkeypatch, replica):
    def script():
        made = Script()
        made.optimizer = CountsThere(made.model.parameters(), lr=0.01, foreach=False)
        return made

    def places(made):
        slots = made.optimizer.state.values()
        return [{name: value.device.type for name, value in each.items()} for each in slots]

    first, root = script(), tmp_path / "run"
    beside = {"replica": forked(monkeypatch, tmp_path)} if replica else {}
    with Checkpointer(root, model=first.model, optimizer=first.optimizer, **beside) as checkpointer:
        checkpointer.resume()
        for i in range(3):
            first.step(i)
            checkpointer.step()
            if i == 1:
                checkpointer.save()
    assert places(first)[0] == {"step": HERE.type, "mu_product": "cpu"}
    for step in (3, 2):
        again = script()
        with Checkpointer(root, model=again.model, optimizer=again.optimizer) as checkpointer:
            assert checkpointer.resume(step=step) == step
            assert places(again) == places(first)
