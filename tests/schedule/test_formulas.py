"""What the linear program believes a step moves is what its operation list moves."""

from dataclasses import replace
from itertools import product

import pytest

from holdfast.profiles import load_machine, load_model
from holdfast.schedule import work
from holdfast.schedule.operation_lists import host_bytes, placement_of, shape_of, work_of
from holdfast.schedule.operations import DOWNLOAD, SSD_READ, SSD_WRITE, UPLOAD, as_guessed, lane_bytes
from holdfast.schedule.planner import formulas
from holdfast.schedule.planner.training_setting import Duplex, Method, Setting
from holdfast.schedule.vertical import vertical
from holdfast.schedule.work import MemorySaving

HALVES = [
    {"params": p, "optimizer": o, "activations": a, "gradients": g, "recycled": 0.0}
    for p, o, a, g in product((0.0, 0.5, 1.0), (0.0, 0.5), (0.0, 0.5, 1.0), (0.0, 1.0))
]


NO_STATE_WITHOUT_COPY = [kept for kept in HALVES if kept["optimizer"] <= kept["params"]]
"""With masters in parts the state of a block stays in memory only where its compute copy does."""


def setting(clipping="none", micro_batches=5, blocks=80, machine="a100-80g", **method) -> Setting:
    return Setting(
        machine=load_machine(machine),
        model=replace(load_model("gpt-65b"), blocks=blocks),
        method=Method(clipping=clipping, **method),
        micro_batches=micro_batches,
        delayed_fraction=1.0 if clipping == "defer" else 0.0,
    )


@pytest.fixture
def large_tiles(monkeypatch):
    """Let a block's state be 10 tiles instead of 73, so that lists are shorter; the formulas take either number."""
    monkeypatch.setattr(work, "TILE_BYTES", 2**30)


@pytest.mark.slow
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "clipping, commit_every",
    [("none", 0), ("none", 1), ("defer", 0), ("defer", 1), ("speculate", 1), ("per_block", 1)],
)
@pytest.mark.parametrize("is_split", [False, True])
def test_bytes_are_those_of_the_operation_list(clipping, commit_every, is_split):
    """What the engine runs; the list's last block has no forward pass and its input stays, spread over all blocks."""
    s = setting(clipping, commit_every=commit_every, is_split=is_split)
    for kept in (NO_STATE_WITHOUT_COPY if is_split else HALVES)[::5]:
        moved = lane_bytes(as_guessed(vertical(work_of(s), placement_of(kept, s.blocks), shape_of(s))))
        assert formulas.read_bytes(s)(kept) == pytest.approx(moved[SSD_READ], rel=0.003)
        assert formulas.written_bytes(s)(kept) == pytest.approx(moved[SSD_WRITE], rel=0.003)
        ups = s.blocks * (formulas.forward(s).up + formulas.backward(s).up).constant
        downs = s.blocks * (formulas.forward(s).down + formulas.backward(s).down).constant
        resident = s.resident_elements
        assert ups + 2 * resident == pytest.approx(moved[UPLOAD], rel=0.01)
        assert downs + 4 * resident == pytest.approx(moved[DOWNLOAD], rel=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("clipping", ["none", "defer", "speculate", "per_block"])
@pytest.mark.parametrize("machine", ["a100-80g", "cpu-2-core"])
@pytest.mark.parametrize("is_split", [False, True])
def test_host_memory_is_that_of_the_operation_list(clipping, machine, is_split):
    s = setting(clipping, machine=machine, is_split=is_split)
    for kept in (NO_STATE_WITHOUT_COPY if is_split else HALVES)[::5]:
        listed = host_bytes(s, placement_of(kept, s.blocks))
        assert formulas.host_bytes(s)(kept) == pytest.approx(listed, rel=0.12)


def test_a_commit_every_other_step_writes_state_of_the_host_half_as_often():
    kept = {"params": 1.0, "optimizer": 1.0, "activations": 1.0, "gradients": 1.0, "recycled": 0.0}
    never, each, other = (formulas.written_bytes(setting(commit_every=n))(kept) for n in (0, 1, 2))
    model = load_model("gpt-65b")
    assert never == 0
    assert each == pytest.approx(12 * model.parameters)  # durable state costs 12 bytes per parameter and step
    assert other == pytest.approx(each / 2)


@pytest.mark.parametrize("keeps_copies, read", [(True, 2 + 2 + 10.125), (False, 2 + 2 + 12.125)])
def test_masters_in_parts_are_read_and_written_once(keeps_copies, read):
    """The last of 80 blocks has no forward pass, and what lies outside the blocks has whole masters in memory."""
    nothing = dict.fromkeys(("params", "optimizer", "gradients", "recycled"), 0.0) | {"activations": 1.0}
    s = replace(setting(is_split=True), saving=MemorySaving(2, True, keeps_copies))
    of_blocks = 80 * s.elements
    assert formulas.read_bytes(s)(nothing) == pytest.approx(read * of_blocks - 2 * s.elements)
    written = formulas.written_bytes(s)(nothing)
    assert written == pytest.approx(12.125 * of_blocks + 12 * s.resident_elements)


def test_snake_order_saves_three_transfers_per_block():
    plain, snake = setting(), setting(order="snake")
    for phase, saved in ((formulas.forward, 1), (formulas.backward, 2)):
        one, other = phase(plain), phase(snake)
        crossing = (one.up + one.down).constant - (other.up + other.down).constant
        assert crossing == pytest.approx(saved * plain.input_bytes, rel=0.02)


def test_gradients_wait_in_dead_buffers_first():
    s = Setting(
        machine=load_machine("a100-80g"), model=load_model("gpt-65b"), micro_batches=8, delayed_fraction=0.5
    )
    kept = {"params": 1.0, "optimizer": 0.0, "activations": 1.0, "gradients": 1.0}
    paid = [formulas.host_bytes(s)({**kept, "recycled": r}) for r in (0.0, 1.0)]
    assert paid[0] - paid[1] == pytest.approx(0.5 * 80 * s.grad_bytes)
    assert formulas.dead_bytes(s)(kept) == pytest.approx(80 * 8 * s.input_bytes)


def test_block_inputs_alone_are_lent_and_to_delayed_updates_alone():
    kept = {"params": 1.0, "optimizer": 0.0, "activations": 1.0, "gradients": 1.0}
    s = setting()
    assert formulas.dead_bytes(s)(kept) == s.blocks * s.micro_batches * s.input_bytes
    for clipping in ("defer", "speculate"):
        assert formulas.dead_bytes(setting(clipping))(kept) == 0


def test_a_device_that_shares_the_cores_does_one_thing_after_another():
    s = setting(machine="cpu-2-core")
    phase = formulas.backward(s)
    [compute] = formulas.lanes(s, phase)[formulas.COMPUTE]
    update = phase.updated_elements / s.machine.update_elements_per_second
    assert compute.constant == pytest.approx(phase.compute_seconds + update)
    assert [row.constant for row in formulas.lanes(s, phase)[formulas.BUS]] == [0.0]


def test_an_ssd_takes_turns_unless_it_is_measured_otherwise():
    turns = Duplex(one=10.0, other=5.0)
    assert (turns.seconds(10, 0), turns.seconds(0, 10), turns.seconds(10, 10)) == pytest.approx((1, 2, 3))


def test_ways_that_gain_by_each_other_are_interpolated_between_what_was_measured():
    gains = Duplex(one=10.0, other=5.0, mixed=10.0)
    assert gains.seconds(10, 10) == pytest.approx(2)
    assert (gains.seconds(10, 0), gains.seconds(0, 10)) == pytest.approx((1, 2))
    assert gains.seconds(15, 5) == pytest.approx(1 + 1)  # 10 more of one way, and 10 mixed
    assert gains.slowdown(10, 10) == pytest.approx(2 / 3)


def test_ways_that_disturb_each_other_are_slowed_alike():
    loses = Duplex(one=10.0, other=5.0, mixed=5.0)
    assert loses.seconds(10, 10) == pytest.approx(4)
    assert loses.seconds(10, 0) == pytest.approx(4 / 3)  # careful
