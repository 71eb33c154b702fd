"""Operation lists: what ``check_schedule`` refuses, and how bytes are counted."""

import pytest

from holdfast.plan import ops
from holdfast.plan.ops import Hold, Key, Op
from support.schedules import check_schedule

A, B, C = Key("a"), Key("b"), Key("c")


def test_a_sound_list_passes():
    check_schedule(
        [
            Op(A, ops.SSD_READ, needs_previous=(C,), takes=(Hold(("x", 1), 5),)),
            Op(B, ops.COMPUTE, needs=(A,)),
            Op(C, ops.COMPUTE, needs=(B,), gives=(("x", 1),)),
        ]
    )


@pytest.mark.parametrize(
    "wrong, says",
    [
        ([Op(A, ops.UPLOAD), Op(A, ops.UPLOAD)], "twice"),
        ([Op(A, ops.UPLOAD, needs=(B,)), Op(B, ops.UPLOAD)], "later or never"),
        ([Op(A, ops.UPLOAD), Op(B, ops.UPLOAD, needs_previous=(A,))], "earlier step's"),
        ([Op(A, ops.COMPUTE), Op(B, ops.COMPUTE)], "does not need"),
        ([Op(A, ops.UPLOAD, takes=(Hold(("x",), 1),)), Op(B, ops.UPLOAD, takes=(Hold(("x",), 1),))], "again"),
        ([Op(A, ops.UPLOAD, gives=(("x",),))], "nobody holds"),
        ([Op(A, ops.UPLOAD, takes=(Hold(("x",), 1),))], "never given back"),
    ],
)
def test_an_unsound_list_is_refused(wrong, says):
    with pytest.raises(AssertionError, match=says):
        check_schedule(wrong)


def test_bytes_are_counted_by_lane_and_kind():
    moved = [
        Op(Key("load", 0), ops.SSD_READ, nbytes=3),
        Op(Key("load", 1), ops.SSD_READ, nbytes=4),
        Op(Key("read", 1), ops.SSD_READ, nbytes=10),
        Op(Key("update", 1), ops.UPDATE, work=99.0),
    ]
    assert ops.traffic(moved) == {(ops.SSD_READ, "load"): 7, (ops.SSD_READ, "read"): 10}
    assert ops.lane_bytes(moved) == {ops.SSD_READ: 17}
