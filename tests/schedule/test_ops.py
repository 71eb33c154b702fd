"""Operation lists: what ``check_schedule`` refuses, and how bytes are counted."""

import pytest

from holdfast.schedule import operations
from holdfast.schedule.operations import Hold, Key, Op
from support.schedules import check_schedule

A, B, C = Key("a"), Key("b"), Key("c")


def test_a_sound_list_passes():
    check_schedule(
        [
            Op(A, operations.SSD_READ, needs_previous=(C,), takes=(Hold(("x", 1), 5),)),
            Op(B, operations.COMPUTE, needs=(A,)),
            Op(C, operations.COMPUTE, needs=(B,), gives=(("x", 1),)),
        ]
    )


@pytest.mark.parametrize(
    "wrong, says",
    [
        ([Op(A, operations.UPLOAD), Op(A, operations.UPLOAD)], "twice"),
        ([Op(A, operations.UPLOAD, needs=(B,)), Op(B, operations.UPLOAD)], "later or never"),
        ([Op(A, operations.UPLOAD), Op(B, operations.UPLOAD, needs_previous=(A,))], "earlier step's"),
        ([Op(A, operations.COMPUTE), Op(B, operations.COMPUTE)], "does not need"),
        (
            [
                Op(A, operations.UPLOAD, takes=(Hold(("x",), 1),)),
                Op(B, operations.UPLOAD, takes=(Hold(("x",), 1),)),
            ],
            "again",
        ),
        ([Op(A, operations.UPLOAD, gives=(("x",),))], "nobody holds"),
        ([Op(A, operations.UPLOAD, takes=(Hold(("x",), 1),))], "never given back"),
    ],
)
def test_an_unsound_list_is_refused(wrong, says):
    with pytest.raises(AssertionError, match=says):
        check_schedule(wrong)


def test_bytes_are_counted_by_lane_and_kind():
    moved = [
        Op(Key("load", 0), operations.SSD_READ, nbytes=3),
        Op(Key("load", 1), operations.SSD_READ, nbytes=4),
        Op(Key("read", 1), operations.SSD_READ, nbytes=10),
        Op(Key("update", 1), operations.UPDATE, work=99.0),
    ]
    assert operations.traffic(moved) == {(operations.SSD_READ, "load"): 7, (operations.SSD_READ, "read"): 10}
    assert operations.lane_bytes(moved) == {operations.SSD_READ: 17}
