"""Machines: what an operation costs where."""

import pytest

from holdfast.schedule import operations
from holdfast.schedule.operations import Key, Op
from holdfast.schedule.planner.machine_rates import Machine

MACHINE = Machine(
    ssd_read_bytes_per_second=2.0,
    ssd_write_bytes_per_second=4.0,
    upload_bytes_per_second=5.0,
    download_bytes_per_second=8.0,
    compute_flop_per_second=10.0,
    update_elements_per_second=20.0,
    commit_seconds=0.25,
)


@pytest.mark.parametrize(
    "lane, seconds",
    [
        (operations.SSD_READ, 20.0),
        (operations.SSD_WRITE, 10.0),
        (operations.UPLOAD, 8.0),
        (operations.DOWNLOAD, 5.0),
        (operations.COMPUTE, 6.0),
        (operations.UPDATE, 3.0),
        (operations.COMMIT, 0.25),
    ],
)
def test_each_lane_has_its_rate(lane, seconds):
    assert MACHINE.seconds(Op(Key("x"), lane, nbytes=40, work=60.0)) == seconds


def test_what_is_not_said_costs_nothing():
    assert all(
        Machine().seconds(Op(Key("x"), lane, nbytes=1 << 40, work=1e30)) == 0.0 for lane in operations.LANES
    )


def test_reads_and_writes_may_share_the_device():
    assert [Machine().server(lane) for lane in operations.LANES] == list(operations.LANES)
    shared = Machine(shared_ssd=True)
    assert shared.server(operations.SSD_READ) == shared.server(operations.SSD_WRITE) == "ssd"
    assert shared.server(operations.UPLOAD) == operations.UPLOAD
