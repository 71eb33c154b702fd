"""The bound on memory: never exceeded, whatever the speeds, and reached by a bad enough machine."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.offload.executor import _same_on_device
from holdfast.schedule import memory_use, operations
from holdfast.schedule.horizontal import horizontal
from holdfast.schedule.memory_use import buffers, predict, resident
from holdfast.schedule.operations import Hold, Key, Op
from holdfast.schedule.planner.machine_rates import Machine
from holdfast.schedule.simulate import simulate
from holdfast.schedule.vertical import forward_only, vertical
from holdfast.schedule.work import LEAST_MEMORY, BlockPlacement, StepShape
from plan_steps import LISTS, Order, equal_blocks, loud, machines, split, steps, tiled, uneven, whole


def worst(lists: Sequence[Sequence[Op]], kind: str) -> int:
    """The most bytes of ``kind`` that an executor holds which does everything else first: lanes are
    unlimited, and what gives such a buffer back ends only when nothing else can happen."""
    nodes = [(step, op) for step, made in enumerate(lists) for op in made]
    waits: list[set[int]] = []
    earlier: dict[Key, int] = {}
    for made in lists:
        here = {op.key: len(waits) + i for i, op in enumerate(made)}
        for op in made:
            previous = {earlier[key] for key in op.needs_previous if key in earlier}
            waits.append({here[key] for key in op.needs} | previous)
        earlier.update(here)
    over: set[int] = set()
    running: list[int] = []
    waiting = list(range(len(nodes)))
    held: Counter[tuple] = Counter()
    most = 0
    while waiting or running:
        ready = [i for i in waiting if waits[i] <= over]
        waiting = [i for i in waiting if not waits[i] <= over]
        running += ready
        for i in ready:
            held.update({(nodes[i][0], h.name): h.nbytes for h in nodes[i][1].takes if h.kind == kind})
        most = max(most, held.total())
        patient = [i for i in running if not any(name[0] == kind for name in nodes[i][1].gives)]
        for i in patient or running[:1]:
            running.remove(i)
            over.add(i)
            for name in nodes[i][1].gives:
                held.pop((nodes[i][0], name), None)
    return most


@given(step=steps(), schedule=st.sampled_from(sorted(LISTS)), machine=machines())
@settings(max_examples=60, deadline=None)
def test_no_machine_holds_more_than_the_bound(step, schedule, machine):
    made = LISTS[schedule](*step)
    found, bound = simulate([made] * 3, machine), buffers(made)
    assert set(found.peak_by_kind) == set(bound)
    for kind, most in found.peak_by_kind.items():
        assert most <= bound[kind], kind
    for place, most in found.peak.items():
        assert most <= sum(size for (where, _), size in bound.items() if where == place)


@given(step=steps(most_blocks=4), schedule=st.sampled_from(sorted(LISTS)), data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_executor_holds_more_than_the_bound(step, schedule, data):
    made = LISTS[schedule](*step)
    bound = buffers(made)
    place, kind = data.draw(st.sampled_from(sorted(bound)))
    assert worst([made, made], kind) <= bound[place, kind]


@given(step=steps(most_blocks=3), other=steps(), schedule=st.sampled_from(sorted(LISTS)), data=st.data())
@settings(max_examples=60, deadline=None)
def test_steps_of_different_shapes_hold_no_more_than_the_larger_bound(step, other, schedule, data):
    """Another number of micro-batches, a commit or none, and an evaluation between."""
    work, placement, shape = step
    commits = other[2].commit or shape.clipping == "speculate"
    changed = replace(shape, micro_batches=other[2].micro_batches, commit=commits)
    lists = [LISTS[schedule](work, placement, s) for s in (shape, changed, shape)]
    lists.insert(1, forward_only(work, placement, shape))
    bounds = [buffers(made) for made in lists]
    place, kind = data.draw(st.sampled_from(sorted(set().union(*bounds))))
    assert worst(_returning(lists), kind) <= max(bound.get((place, kind), 0) for bound in bounds)


@given(step=steps(most_blocks=3), waits=st.lists(st.booleans(), min_size=3, max_size=3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_steps_that_wait_or_guess_hold_no_more_than_guesses(step, waits, data):
    work, placement, shape = step
    guess = replace(shape, clipping="speculate", commit=True)
    wait = replace(guess, clipping="defer")
    lists = [vertical(work, placement, wait if each else guess) for each in waits]
    bound = buffers(vertical(work, placement, guess))
    place, kind = data.draw(st.sampled_from(sorted(set().union(*map(buffers, lists)))))
    assert worst(_returning(lists), kind) <= bound[place, kind]


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(
    "clipping, following", [("none", "evaluate"), ("speculate", "evaluate"), ("speculate", "defer")]
)
def test_copies_that_wait_for_updates_count_in_a_step_of_another_kind(clipping, following, unified):
    """What comes next loads none before those that wait are given back, in whatever order updates end."""
    work, placement = split(uneven(5, unified)), BlockPlacement.fractions(5)
    shape = StepShape(micro_batches=1, clipping=clipping, recomputed_fraction=0.5)
    made = vertical(work, placement, shape)
    other = replace(shape, clipping=following) if following == "defer" else None
    after = vertical(work, placement, other) if other else forward_only(work, placement, shape)
    givers = [
        op.key for op in made if op.key.kind == "update" and any(name[0] == "params" for name in op.gives)
    ]
    assert [key.block for key in givers] == [4, 2, 0]
    loads = [op.key for op in after if any(hold.kind == "params" for hold in op.takes)]
    before = Order(made, after).before
    assert all(before((0, giver), (1, load)) for giver in givers for load in loads)
    assert worst(_returning([made, after, made]), "params") <= buffers(made)["host", "params"]


def _returning(lists: Sequence[list[Op]]) -> list[list[Op]]:
    """The same steps, each known when the last computation of the one before is over, as in the engine. Its first
    computation also waits for the downloads of the one before, where the lists differ on the device."""
    made = [lists[0]]
    for before, following in pairwise(lists):
        last = next(op.key for op in reversed(before) if op.lane == operations.COMPUTE)
        made.append([op._replace(needs_previous=(*op.needs_previous, last)) for op in following])
        if _same_on_device(before, following):
            continue
        first = next(i for i, op in enumerate(following) if op.lane == operations.COMPUTE)
        downloads = [op.key for op in before if op.lane == operations.DOWNLOAD]
        op = made[-1][first]
        made[-1][first] = op._replace(needs_previous=(*op.needs_previous, *downloads))
    return made


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("clipping", ["defer", "none"])
def test_the_bound_is_reached(clipping, unified):
    """Everything on the SSD: what is predicted is what a slow SSD makes a run hold."""
    work, shape = (
        equal_blocks(6, 1000, tokens=1, unified=unified),
        StepShape(micro_batches=3, clipping=clipping),
    )
    made = vertical(work, BlockPlacement.fractions(6, activations=0.0, gradients=0.0), shape)
    for (_, kind), size in buffers(made).items():
        assert worst([made, made], kind) == size, kind


@given(step=steps(), schedule=st.sampled_from(sorted(LISTS)), machine=machines(), at_once=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_an_evaluation_between_steps_stays_within_the_prediction(step, schedule, machine, at_once):
    """It begins while the step before it still updates and writes."""
    work, placement, shape = replace(step[0], input_bytes=60_013), *step[1:]
    if schedule == "zeroth":
        work, placement, shape = whole((work, placement, shape))
    made = LISTS[schedule](work, placement, shape)
    evaluation = forward_only(work, placement, StepShape(micro_batches=at_once))
    found = simulate([made, evaluation, evaluation, made], machine)
    predicted = predict(work, placement, shape, LISTS[schedule], at_once)
    for place in ("host", "device"):
        stays = sum(size for (where, _), size in resident(work, placement).items() if where == place)
        assert found.peak.get(place, 0) <= sum(predicted.at(place).values()) - stays


def test_an_evaluation_beside_slow_updates_takes_more_than_one_alone():
    work, placement = uneven(5), BlockPlacement.fractions(5, activations=0.0, gradients=0.0)
    shape, alone = StepShape(micro_batches=1, clipping="defer"), StepShape(micro_batches=40)
    made, evaluation = vertical(work, placement, shape), forward_only(work, placement, alone)
    slow = Machine(update_elements_per_second=1e3, ssd_write_bytes_per_second=1e7)
    peak = simulate([made, evaluation], slow).peak["host"]
    assert peak > max(sum(buffers(made).values()), sum(buffers(evaluation).values()))
    predicted = predict(work, placement, shape, vertical, 40).host_bytes
    assert peak <= predicted - sum(resident(work, placement).values())


def test_an_evaluation_of_more_micro_batches_than_a_step_is_predicted_with_what_the_step_leaves():
    work, placement = uneven(5), BlockPlacement.fractions(5, activations=0.0)
    alone = predict(work, placement, StepShape(micro_batches=1)).at("host")
    found = predict(work, placement, StepShape(micro_batches=1), evaluation_batches=40).at("host")
    assert found["frames"] == 40 * work.input_bytes and found["inputs"] == 41 * work.input_bytes
    for left in ("state", "updated_params", "grads", "resident_state", "workspace"):
        assert found[left] == alone[left]
    assert "input_grads" in alone and "input_grads" not in found
    assert predict(work, placement, StepShape(micro_batches=40), evaluation_batches=1) == predict(
        work, placement, StepShape(micro_batches=40)
    )


def test_a_class_holds_its_largest_buffers_as_many_as_it_has_slots():
    made = [
        Op(Key("a", i), operations.UPLOAD, takes=(Hold(("x", i), size, slots=2),), gives=(("x", i),))
        for i, size in enumerate((5, 9, 7))
    ]
    made += [
        Op(Key("b", i), operations.UPLOAD, takes=(Hold(("y", i), 4, "device"),), gives=(("y", i),))
        for i in range(3)
    ]
    assert buffers(made) == {("host", "x"): 16, ("device", "y"): 12}


def test_what_stays_is_counted_where_it_lies():
    placement = BlockPlacement(
        params=(True, False, True),
        optimizer=(False, True, False),
        activations=(True,) * 3,
        gradients=(True,) * 3,
    )
    work = replace(uneven(3, unified=False), update_bytes=5003, expert_bytes=8009, expert_staging_bytes=4001)
    assert resident(work, placement) == {
        ("host", "updates"): 5003,
        ("host", "resident_state"): 66001,
        ("host", "params_on_host"): 20011 + 20211,
        ("host", "optimizer_on_host"): 120011 + 103,
        ("host", "expert_staging"): 4001,
        ("device", "experts"): 8009,
        ("device", "resident_working_copy"): 11003,
        ("device", "resident_sums"): 22003,
        ("device", "workspace"): 9001,
    }
    assert ("host", "workspace") in resident(uneven(3), placement)


def test_a_vertical_step_with_everything_on_the_ssd_by_hand():
    work, m = uneven(8), 3
    last = work.blocks[-3:]
    found = predict(work, BlockPlacement.fractions(8, activations=0.0), StepShape(micro_batches=m))
    assert found.at("device") == {}
    assert found.at("host") == {
        "state": sum(b.state_bytes for b in last),
        "params": sum(b.param_bytes for b in last[1:]),
        "updated_params": sum(b.trained_param_bytes for b in last[1:]),
        "grads": sum(b.grad_bytes for b in last[1:]),
        "inputs": (m + 4) * work.input_bytes,
        "staged_inputs": 4 * work.input_bytes,
        "input_grads": (m + 1) * work.input_bytes,
        "frames": m * work.input_bytes,
        "resident_state": work.resident_state_bytes,
        "resident_working_copy": work.resident_param_bytes,
        "resident_sums": work.resident_grad_bytes,
        "workspace": work.workspace_bytes,
    }
    assert found.host_bytes == sum(found.at("host").values())


@pytest.mark.parametrize("loads_ahead, slots", [(True, 3), (False, 2)])
def test_state_in_tiles_takes_the_memory_of_a_few_tiles_however_large_the_blocks_are(loads_ahead, slots):
    work = tiled(uneven(8))
    saving = replace(LEAST_MEMORY, loads_ahead=loads_ahead)
    placement = BlockPlacement.fractions(8, activations=0.0)
    found = predict(work, replace(placement, saving=saving), StepShape(micro_batches=3)).at("host")
    tiles = [tile for block in work.blocks for tile in block.tiles]
    assert found["state"] == sum(sorted(tile.state_bytes for tile in [*tiles, *work.resident_tiles])[-slots:])
    assert found["params"] == sum(block.param_bytes for block in work.blocks[1 - slots :])
    assert found["grads"] == max(block.grad_bytes for block in work.blocks)
    assert found["updated_params"] == sum(sorted(tile.trained_param_bytes for tile in tiles)[-2:])
    assert "resident_state" not in found


@given(step=steps(), schedule=st.sampled_from(sorted(LISTS)), at_once=st.sampled_from([0, 1, 20]))
@settings(max_examples=60, deadline=None)
def test_a_list_with_the_largest_tiles_alone_takes_the_same_memory(step, schedule, at_once):
    work, placement, shape = step
    work = split(tiled(work, (7, 5, 1))) if work.blocks[0].is_split else tiled(work, (7, 5, 1))
    found = predict(work, placement, shape, LISTS[schedule], at_once)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_use, "MOST_TILES", 99)
        assert predict(work, placement, shape, LISTS[schedule], at_once) == found


@pytest.mark.parametrize("schedule", [vertical, horizontal])
@pytest.mark.parametrize("clipping", ["none", "defer"])
def test_no_state_is_beside_a_large_computation_where_nothing_is_read_ahead(schedule, clipping):
    """What the head takes is counted in the place of states, which are written before and read after."""
    work, shape = loud(tiled(uneven(4))), StepShape(micro_batches=3, clipping=clipping)
    placement = BlockPlacement.fractions(4, activations=0.0)
    placement = replace(placement, saving=LEAST_MEMORY)
    made = schedule(work, placement, shape)
    evaluation = forward_only(work, placement, shape)
    lists = [made, evaluation, made]
    before, taken = Order(*_returning(lists)).before, []
    for step, ops in enumerate(lists):
        for op in ops:
            for hold in op.takes:
                giver = (
                    next(other.key for other in ops if hold.name in other.gives)
                    if hold.kind == "state"
                    else None
                )
                if giver is not None:
                    taken.append(((step, op.key), (step, giver), hold.name[1] == "workspace"))
    assert sum(large for *_, large in taken) == 2 * (2 * (3 + 3) + 3)
    for start, end, large in taken:
        for other_start, other_end, other_large in taken:
            if large and not other_large:
                assert before(end, other_start) or before(other_end, start), (start, other_start)
    louder = replace(work.blocks[-1], extra_workspace_bytes=500_001)
    work = replace(work, blocks=(*work.blocks[:-1], louder), workspace_bytes=509_001)
    found = predict(work, placement, shape, schedule, 3).at("host")
    assert (found["workspace"], found["state"]) == (9000, 500_002)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("schedule", [vertical, horizontal])
def test_more_blocks_take_no_more_memory_when_everything_is_on_the_ssd(schedule, unified):
    def predicted(count):
        work = equal_blocks(count, 1000, tokens=1, unified=unified)
        placement = BlockPlacement.fractions(count, activations=0.0, gradients=0.0)
        return predict(work, placement, StepShape(micro_batches=4, clipping="defer"), schedule)

    assert predicted(8) == predicted(32)


def test_what_stays_in_memory_is_bounded_by_what_there_is():
    """Every input and, with clipping, every gradient, once."""
    work, m = uneven(5), 3
    found = predict(work, BlockPlacement.fractions(5), StepShape(micro_batches=m, clipping="defer")).at(
        "host"
    )
    assert found["kept_inputs"] == 5 * m * work.input_bytes
    assert found["kept_grads"] == sum(b.grad_bytes for b in work.blocks)
    across = predict(work, BlockPlacement.fractions(5), StepShape(micro_batches=m), horizontal).at("host")
    assert across["kept_inputs"] == 4 * work.input_bytes
    assert across["kept_grads"] == found["kept_grads"]


def test_an_evaluation_holds_two_blocks_and_one_row_of_inputs():
    work = uneven(5)
    found = buffers(forward_only(work, BlockPlacement.fractions(5), StepShape(micro_batches=8)))
    assert found == {
        ("host", "params"): sum(b.param_bytes for b in work.blocks[-2:]),
        ("host", "inputs"): 9 * work.input_bytes,
        ("host", "frames"): 8 * work.input_bytes,
    }


@pytest.mark.parametrize("delayed_fraction", [0.25, 0.5, 1.0])
def test_delayed_gradients_take_no_memory_where_block_inputs_stay(delayed_fraction):
    """They lie where inputs were that the backward pass has used. The first sum begins before an input in host memory
    is used: one block's gradients more. On a separate device the last block's inputs are not in host memory."""
    n, m = 8, 4
    for unified in (False, True):
        work, placement = equal_blocks(n, 4000, tokens=1, unified=unified), BlockPlacement.fractions(n)
        without = predict(work, placement, StepShape(micro_batches=m)).at("host")
        shape = StepShape(micro_batches=m, delayed_fraction=delayed_fraction)
        found = predict(work, placement, shape).at("host")
        assert without["kept_inputs"] == (n - (not unified)) * m * work.input_bytes
        assert found["kept_inputs"] - without["kept_inputs"] == 16384  # of 4000 elements, in fours
        assert "kept_grads" not in found
        assert {
            k: v for k, v in found.items() if k not in ("kept_inputs", "grads")
        }.items() <= without.items()


def test_delayed_gradients_that_are_more_than_the_inputs_take_the_rest():
    n, m = 8, 1
    work = equal_blocks(n, 4000, tokens=1, unified=False)
    shape = StepShape(micro_batches=m, delayed_fraction=1.0)
    found = predict(work, BlockPlacement.fractions(n), shape).at("host")
    assert found["kept_inputs"] == n * 4 * work.input_bytes


@pytest.mark.parametrize("case", ["inputs on the SSD", "unmeasured", "too small"])
def test_delayed_gradients_have_memory_of_their_own_where_no_input_stays(case):
    n = 4
    work = equal_blocks(n, 40_000, tokens=1, input_bytes=0 if case == "unmeasured" else 4096)
    placement = BlockPlacement.fractions(n, activations=0.0 if case == "inputs on the SSD" else 1.0)
    found = buffers(vertical(work, placement, StepShape(micro_batches=2, delayed_fraction=0.5)))
    assert found["host", "kept_grads"] == 2 * work.blocks[0].grad_bytes


def test_delayed_gradients_wait_on_the_ssd_where_they_may_not_wait_in_memory():
    n = 4
    work, placement = equal_blocks(n, 4000, tokens=1), BlockPlacement.fractions(n, gradients=0.0)
    made = vertical(work, placement, StepShape(micro_batches=2, delayed_fraction=0.5))
    moved = operations.traffic(made)
    assert (
        moved["ssd_write", "store_grads"] == moved["ssd_read", "load_grads"] == 2 * work.blocks[0].grad_bytes
    )
    assert "kept_grads" not in {kind for _, kind in buffers(made)}
