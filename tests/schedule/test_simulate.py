"""The simulator: small cases by hand, laws for all, and what the schedules promise on a saturated machine."""

import time
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.schedule import operations
from holdfast.schedule.operations import Hold, Key, Op
from holdfast.schedule.planner.machine_rates import Machine
from holdfast.schedule.simulate import Simulation, simulate
from holdfast.schedule.vertical import commit_only, vertical
from holdfast.schedule.work import BlockPlacement, StepShape
from plan_steps import LISTS, SCHEDULES, equal_blocks, machines, steps, uneven

UNIT = Machine(
    ssd_read_bytes_per_second=1.0,
    ssd_write_bytes_per_second=1.0,
    compute_flop_per_second=1.0,
    update_elements_per_second=1.0,
)


def timeline(simulation: Simulation, step: int = -1) -> dict[str, tuple[float, float]]:
    return {span.op.key.kind: (span.start, span.end) for span in simulation.of_step(step)}


def test_lanes_run_side_by_side_and_operations_wait_for_what_they_need():
    found = simulate(
        [
            [
                Op(Key("read"), operations.SSD_READ, nbytes=3),
                Op(Key("read again"), operations.SSD_READ, nbytes=2),
                Op(Key("compute"), operations.COMPUTE, work=4.0, needs=(Key("read"),)),
                Op(Key("write"), operations.SSD_WRITE, nbytes=1, needs=(Key("compute"),)),
            ]
        ],
        UNIT,
    )
    assert timeline(found) == {"read": (0, 3), "read again": (3, 5), "compute": (3, 7), "write": (7, 8)}
    assert found.seconds_per_step == 7
    assert found.busy_seconds() == dict.fromkeys(operations.LANES, 0.0) | {
        "ssd_read": 5,
        "compute": 4,
        "ssd_write": 1,
    }
    assert found.busiest() == ("ssd_read", 5)
    assert found.speed_of_light == 5 / 7
    assert found.traffic() == {
        ("ssd_read", "read"): 3,
        ("ssd_read", "read again"): 2,
        ("ssd_write", "write"): 1,
    }


def test_no_step_is_beyond_the_speed_of_light():
    """Writes of 5 s pile up behind steps of 1 s."""
    write = Op(Key("write"), operations.SSD_WRITE, nbytes=5, needs=(Key("compute"),))
    found = simulate([[Op(Key("compute"), operations.COMPUTE, work=1.0), write]] * 4, UNIT)
    assert (found.seconds_per_step, found.busiest()) == (1, ("ssd_write", 5))
    assert found.speed_of_light == 1


def test_of_what_is_ready_the_first_in_the_list_is_served():
    late = Op(Key("late"), operations.UPDATE, work=1.0, needs=(Key("read"),))
    found = simulate(
        [
            [
                Op(Key("read"), operations.SSD_READ, nbytes=2),
                Op(Key("long"), operations.UPDATE, work=3.0),
                late,
                Op(Key("later"), operations.UPDATE, work=1.0),
            ]
        ],
        UNIT,
    )
    assert timeline(found) == {"read": (0, 2), "long": (0, 3), "late": (3, 4), "later": (4, 5)}


def test_a_more_urgent_transfer_overtakes_and_the_other_goes_on_after_it():
    found = simulate(
        [
            [
                Op(Key("compute"), operations.COMPUTE, work=2.0),
                Op(
                    Key("state"),
                    operations.SSD_READ,
                    nbytes=5,
                    priority=operations.SOON,
                    takes=(Hold(("x",), 7),),
                ),
                Op(Key("params"), operations.SSD_READ, nbytes=3, needs=(Key("compute"),)),
                Op(Key("update"), operations.UPDATE, work=0.0, needs=(Key("state"),), gives=(("x",),)),
            ]
        ],
        UNIT,
    )
    assert timeline(found) == {"compute": (0, 2), "state": (0, 8), "params": (2, 5), "update": (8, 8)}
    assert found.busy_seconds()["ssd_read"] == 8
    assert found.peak == {"host": 7}


def test_nothing_else_is_overtaken():
    found = simulate(
        [
            [
                Op(Key("read"), operations.SSD_READ, nbytes=1),
                Op(Key("second"), operations.UPDATE, work=4.0, priority=operations.LATER),
                Op(Key("first"), operations.UPDATE, work=1.0, needs=(Key("read"),)),
            ]
        ],
        UNIT,
    )
    assert timeline(found)["first"] == (4, 5)


def test_reads_and_writes_that_share_the_device_take_turns():
    made = [Op(Key("write"), operations.SSD_WRITE, nbytes=2), Op(Key("read"), operations.SSD_READ, nbytes=3)]
    assert timeline(simulate([made], UNIT)) == {"write": (0, 2), "read": (0, 3)}
    shared = Machine(ssd_read_bytes_per_second=1.0, ssd_write_bytes_per_second=1.0, shared_ssd=True)
    found = simulate([made], shared)
    assert timeline(found) == {"write": (0, 2), "read": (2, 5)}
    assert found.busiest() == ("ssd", 5)


def test_the_next_step_is_known_when_the_last_computation_is_over_and_waits_for_what_it_needs():
    made = [
        Op(Key("read"), operations.SSD_READ, nbytes=1, needs_previous=(Key("write"),)),
        Op(Key("other read"), operations.SSD_READ, nbytes=1),
        Op(Key("compute"), operations.COMPUTE, work=4.0),
        Op(Key("write"), operations.SSD_WRITE, nbytes=5, needs=(Key("compute"), Key("read"))),
    ]
    found = simulate([made] * 3, UNIT)
    assert timeline(found, 1) == {"other read": (4, 5), "compute": (4, 8), "read": (9, 10), "write": (10, 15)}
    assert found.step_ends == (4, 8, 12)
    assert found.seconds_per_step == 4


def test_a_step_without_what_is_waited_for_is_passed_over():
    first = [Op(Key("commit"), operations.SSD_WRITE, nbytes=9), Op(Key("compute"), operations.COMPUTE)]
    quiet = [Op(Key("compute"), operations.COMPUTE, work=1.0)]
    third = [Op(Key("compute"), operations.COMPUTE, work=1.0, needs_previous=(Key("commit"),))]
    assert simulate([first, quiet, third], UNIT).step_ends == (0, 1, 10)


def test_buffers_are_counted_from_start_to_end_by_place_and_class():
    found = simulate(
        [
            [
                Op(
                    Key("a"),
                    operations.SSD_READ,
                    nbytes=2,
                    takes=(Hold(("x", 0), 10), Hold(("y", 0), 1, "device")),
                ),
                Op(Key("b"), operations.SSD_READ, nbytes=2, takes=(Hold(("x", 1), 20),)),
                Op(Key("c"), operations.UPDATE, work=1.0, needs=(Key("a"),), gives=(("x", 0), ("y", 0))),
                Op(Key("d"), operations.UPDATE, needs=(Key("b"),), gives=(("x", 1),)),
                Op(Key("e"), operations.SSD_WRITE, nbytes=1, needs=(Key("c"),), takes=(Hold(("z", 0), 5),)),
                Op(Key("f"), operations.SSD_WRITE, nbytes=1, needs=(Key("d"),), gives=(("z", 0),)),
            ]
        ],
        UNIT,
    )
    assert found.peak_by_kind == {("host", "x"): 30, ("device", "y"): 1, ("host", "z"): 5}
    assert found.peak == {"host": 30, "device": 1}


@given(step=steps(), machine=machines(), schedule=st.sampled_from(sorted(LISTS)))
@settings(max_examples=40, deadline=None)
def test_no_lane_works_more_than_there_is_time_and_every_operation_runs_once(step, machine, schedule):
    made = LISTS[schedule](*step)
    found = simulate([made] * 3, machine)
    assert len(found.spans) == 3 * len(made)
    end = max(span.end for span in found.spans)
    for server in {machine.server(lane) for lane in operations.LANES}:
        mine = [span for span in found.spans if machine.server(span.op.lane) == server]
        assert sum(machine.seconds(span.op) for span in mine) <= end * (1 + 1e-9)
    ends = {(span.step, span.op.key): span.end for span in found.spans}
    for span in found.spans:
        assert all(ends[span.step, key] <= span.start for key in span.op.needs)


@pytest.mark.slow
def test_a_hundred_thousand_operations_take_a_few_seconds():
    work = equal_blocks(80, 1_000_000, tokens=8)
    made = vertical(work, BlockPlacement.fractions(80, activations=0.5), StepShape(micro_batches=32))
    began = time.process_time()
    found = simulate([made] * 5, UNIT)
    assert len(found.spans) > 100_000
    assert time.process_time() - began < 10  # 1 s on an idle core


# What the schedules promise


def saturated(
    schedule: str,
    m: int,
    *,
    compute: float,
    n: int = 12,
    shared: bool = True,
    clipping: str = "none",
    unified: bool = True,
) -> Simulation:
    """``n`` blocks with everything on the SSD, where computing takes ``compute`` times what the SSD takes for
    a vertical step, and updating a tenth of the longer. A separate device is ten times as far as the SSD."""
    params, tokens, rate = 1_000_000, 2000, 1e9
    work = equal_blocks(n, params, tokens, unified=unified, input_bytes=1_000_000)
    ssd_seconds = (30 if shared else 16) * params * n / rate
    machine = Machine(
        ssd_read_bytes_per_second=rate,
        ssd_write_bytes_per_second=rate,
        upload_bytes_per_second=inf if unified else 10 * rate,
        download_bytes_per_second=inf if unified else 10 * rate,
        compute_flop_per_second=8 * params * n * m * tokens / (ssd_seconds * compute),
        update_elements_per_second=params * n / (0.1 * ssd_seconds * max(compute, 1)),
        shared_ssd=shared,
    )
    made = SCHEDULES[schedule](
        work, BlockPlacement.fractions(n), StepShape(micro_batches=m, clipping=clipping)
    )
    return simulate([made] * 8, machine)


@pytest.mark.parametrize("m", [8, 16])
def test_io_bound_steps_differ_by_the_bytes_of_the_two_orders(m):
    """In bytes per parameter: vertical reads 4 + 12 and writes 2 + 12, horizontal reads 4M + 12."""
    fast, slow = (saturated(schedule, m, compute=0.05, n=24) for schedule in ("vertical", "horizontal"))
    ratio = slow.seconds_per_step / fast.seconds_per_step
    assert ratio == pytest.approx((4 * m + 26) / 30, rel=0.1)
    assert min(fast.speed_of_light, slow.speed_of_light) > 1 / 1.05


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("compute, most", [(0.25, 1.03), (0.5, 1.03), (1.0, 1.1), (2.0, 1.05), (4.0, 1.05)])
def test_a_vertical_step_takes_little_more_than_its_busiest_lane(compute, most, shared, unified):
    found = saturated("vertical", 8, compute=compute, shared=shared, unified=unified)
    assert 0.999 < found.seconds_per_step / found.busiest()[1] < most


@pytest.mark.parametrize("compute, most", [(0.25, 1.02), (4.0, 1.05)])
def test_so_does_one_with_clipping_where_one_lane_is_far_the_busiest(compute, most):
    assert saturated("vertical", 8, compute=compute, clipping="defer").speed_of_light > 1 / most


@pytest.mark.parametrize("shared", [True, False])
def test_an_io_bound_horizontal_step_takes_no_more_than_its_busiest_lane(shared):
    assert saturated("horizontal", 8, compute=0.5, shared=shared).speed_of_light > 1 / 1.02


def test_a_save_takes_what_its_writes_take():
    work, placement = uneven(3), BlockPlacement.fractions(3, optimizer=1.0)
    made = commit_only(work, placement)
    machine = Machine(ssd_write_bytes_per_second=1000.0, commit_seconds=0.5)
    assert simulate([made], machine).seconds_per_step == pytest.approx(
        operations.lane_bytes(made)["ssd_write"] / 1000 + 0.5
    )
