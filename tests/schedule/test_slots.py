"""Slots become dependencies that bound what is held."""

import pytest

from holdfast.schedule import operations
from holdfast.schedule.operations import Hold, Key, Op
from holdfast.schedule.step_builder import AS_LISTED, with_slots
from support.schedules import check_schedule


def cycle(number: int, slots: int) -> list[Op]:
    """Read and write, ``number`` times, each through a buffer of its own."""
    made = []
    for i in range(number):
        made.append(Op(Key("read", i), operations.SSD_READ, takes=(Hold(("x", i), 1, slots=slots),)))
        made.append(Op(Key("write", i), operations.SSD_WRITE, needs=(Key("read", i),), gives=(("x", i),)))
    return made


def waits(made: list[Op]) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each read, the writes that it waits for: of this step, and of the one before."""
    return {
        op.key.block: (tuple(k.block for k in op.needs), tuple(k.block for k in op.needs_previous))
        for op in made
        if op.key.kind == "read"
    }


def test_a_buffer_waits_for_the_one_whose_slot_it_takes():
    made = with_slots(cycle(5, slots=2))
    check_schedule(made)
    assert waits(made) == {0: ((), (3,)), 1: ((), (4,)), 2: ((0,), ()), 3: ((1,), ()), 4: ((2,), ())}


def test_fewer_buffers_than_slots_still_wait_for_the_step_before():
    assert waits(with_slots(cycle(2, slots=3))) == {0: ((), (0,)), 1: ((), (1,))}


def test_no_slots_is_no_limit():
    made = cycle(5, slots=0)
    assert with_slots(made) == made


def test_buffers_that_come_back_in_another_order_are_matched_in_the_order_in_which_they_do():
    def take(i):
        return Op(Key("read", i), operations.SSD_READ, takes=(Hold(("x", i), 1, slots=2),))

    def give(i):
        return Op(Key("write", i), operations.SSD_WRITE, needs=(Key("read", i),), gives=(("x", i),))

    made = with_slots([take(0), take(1), give(1), take(2), give(0), give(2)])
    assert waits(made)[2] == ((1,), ())


def test_a_schedule_that_needs_more_slots_is_refused():
    made = [Op(Key("read", i), operations.SSD_READ, takes=(Hold(("x", i), 1, slots=2),)) for i in range(3)]
    made += [Op(Key("write", i), operations.SSD_WRITE, gives=(("x", i),)) for i in range(3)]
    with pytest.raises(AssertionError, match="needs more than 2 slots of x"):
        with_slots(made)


def test_a_class_has_one_number_of_slots():
    made = [
        Op(Key("a"), operations.UPLOAD, takes=(Hold(("x", 0), 1, slots=1),), gives=(("x", 0),)),
        Op(Key("b"), operations.UPLOAD, takes=(Hold(("x", 1), 1, slots=2),), gives=(("x", 1),)),
    ]
    with pytest.raises(AssertionError, match="both 1 and 2 slots"):
        with_slots(made)


def test_as_many_slots_as_listed_is_the_most_that_are_held_in_list_order():
    def take(i):
        return Op(Key("read", i), operations.SSD_READ, takes=(Hold(("x", i), 1, slots=AS_LISTED),))

    def give(i):
        return Op(Key("write", i), operations.SSD_WRITE, needs=(Key("read", i),), gives=(("x", i),))

    made = with_slots([take(0), take(1), give(0), take(2), give(1), give(2), take(3), give(3)])
    assert {hold.slots for op in made for hold in op.takes} == {2}
    assert waits(made) == {0: ((), (2,)), 1: ((), (3,)), 2: ((0,), ()), 3: ((1,), ())}
