"""From a plan to what the engine runs: whole blocks that fit, and a simulation that takes what the plan says."""

from dataclasses import replace

import pytest

from holdfast.errors import DoesNotFit
from holdfast.profiles import load_machine, load_model
from holdfast.schedule import operation_lists
from holdfast.schedule.operation_lists import (
    fit,
    host_bytes,
    machine_of,
    placement_of,
    play,
    shape_of,
    work_of,
)
from holdfast.schedule.operations import as_guessed
from holdfast.schedule.planner import formulas
from holdfast.schedule.planner.plan_search import Case, best_at
from holdfast.schedule.planner.training_setting import Method
from holdfast.schedule.simulate import simulate
from holdfast.schedule.vertical import vertical
from holdfast.schedule.work import BlockPlacement


def case(model, machine, blocks=None, host=None, **method) -> Case:
    profile, machine = load_model(model), load_machine(machine)
    return Case(
        machine=machine if host is None else replace(machine, host_memory_bytes=int(host * 10**9)),
        model=profile if blocks is None else replace(profile, blocks=blocks),
        method=Method(**method),
    )


CASES = [
    (case("gpt-65b", "a100-80g"), 4),
    (case("gpt-65b", "a100-80g"), 8),
    (case("gpt-65b", "a100-80g", host=400), 8),
    (case("gpt-65b", "a100-80g", clipping="defer", host=400), 6),
    (case("llama-7b", "rtx-4090"), 4),
    (case("llama-13b", "h100-80g", commit_every=0), 8),
    (case("gpt-65b", "a100-80g", clipping="speculate", host=400), 6),
    (case("llama-7b", "rtx-4090", clipping="per_block"), 4),
    (case("gpt-319m", "cpu-2-core"), 2),
    (case("gpt-319m", "cpu-2-core", host=2.4), 8),
]
NAMED = pytest.mark.parametrize("chosen, count", CASES, ids=lambda value: getattr(value, "name", None))


@NAMED
def test_whole_blocks_fit_as_the_operation_list_counts_them(chosen, count):
    solution, placement = fit(chosen, count)
    assert host_bytes(solution.setting, placement) <= chosen.machine.host_memory_bytes
    for name in ("params", "optimizer", "activations"):
        stays = getattr(placement, name)
        assert sum(stays) / len(stays) <= solution.fractions[name] + 1 / len(stays) + 1e-6


@pytest.mark.campaign(keep=4)
@NAMED
def test_a_simulated_step_takes_what_the_plan_says(chosen, count):
    """The plan knows no waits between steps or for the first block, so it is the faster."""
    solution, placement = fit(chosen, count)
    s = solution.setting
    operations = as_guessed(vertical(work_of(s), placement, shape_of(s)))
    found = simulate([operations] * 4, machine_of(s.machine, operations))
    assert 0.93 < found.seconds_per_step / solution.step_seconds < 1.15


SMALL_BATCHES = case("llama-3-8b", "rtx-4090")
SMALL_BATCHES = replace(SMALL_BATCHES, model=replace(SMALL_BATCHES.model, micro_batch=1, sequence=2048))


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "chosen, count, delayed",
    [
        (SMALL_BATCHES, 64, 0.0),
        (case("llama-3-8b", "h200", host=117.3), 4, 0.0),
        (case("gpt-319m", "cpu-2-core", host=5.53), 3, 0.2),
    ],
)
def test_where_whole_blocks_take_more_than_fractions_only_as_much_leaves_memory(chosen, count, delayed):
    """However little is too much, it does not take everything out of memory."""
    solution, placement = fit(chosen, count, delayed)
    assert host_bytes(solution.setting, placement) <= chosen.machine.host_memory_bytes
    free = best_at(chosen, count, solution.setting.delayed_fraction)
    assert free is not None
    assert solution.tokens_per_second > 0.9 * free.tokens_per_second


def test_of_few_blocks_what_fits_stays_where_less_by_all_that_is_too_much_has_no_plan():
    few = case("gpt-46m", "rtx-4090", host=0.922)
    few = replace(few, model=replace(few.model, blocks=4, micro_batch=1, sequence=2048))
    solution, placement = fit(few, 2, 0.5)
    assert host_bytes(solution.setting, placement) <= few.machine.host_memory_bytes
    assert placement.shares == {"params": 1.0, "optimizer": 0.0, "activations": 1.0, "gradients": 1.0}


@pytest.mark.slow
def test_the_placement_that_a_user_set_by_hand_is_not_faster_in_the_simulator():
    solution, placement = fit(SMALL_BATCHES, 64)
    s = solution.setting
    by_hand = BlockPlacement.fractions(s.blocks, params=1.0, optimizer=0.0, activations=0.28)
    assert host_bytes(s, by_hand) <= s.machine.host_memory_bytes
    assert play(s, placement, steps=2).seconds_per_step <= play(s, by_hand, steps=2).seconds_per_step


@pytest.mark.slow
def test_memory_that_gradients_wait_in_where_inputs_were_is_not_left_empty():
    chosen = case("llama-70b", "a100-80g")
    solution, placement = fit(chosen, 8, 0.2)
    allowed = chosen.machine.host_memory_bytes
    assert 0.97 * allowed < host_bytes(solution.setting, placement) <= allowed
    s = solution.setting
    assert s.tokens / play(s, placement, steps=2).seconds_per_step > 291  # 287 with memory of their own


def test_the_fractions_are_of_whole_blocks_and_inputs_of_those_before_the_last():
    solution, placement = fit(SMALL_BATCHES, 8)
    assert solution.fractions.items() >= placement.shares.items()
    assert placement_of({**placement.shares, "activations": 0.32}, 32).shares["activations"] == 9 / 31


def test_a_plan_with_everything_on_the_ssd_is_one_like_others(monkeypatch):
    monkeypatch.setattr(operation_lists, "TRIES", 0)
    solution, placement = fit(case("gpt-319m", "cpu-2-core"), 2)
    assert not any(placement.params) and solution.tokens_per_second > 0
    assert solution.of(formulas.host_bytes) > 0


def test_buffers_that_do_not_fit_are_refused_with_numbers():
    with pytest.raises(
        DoesNotFit, match=r"take \d+\.\d GiB of host memory with everything on the SSD, and there are 9.3"
    ):
        fit(case("gpt-65b", "a100-80g", host=10), 4)


def test_the_simulated_ssd_has_the_rate_of_the_plans_mixture():
    chosen = case("llama-7b", "rtx-4090")
    mixing = replace(chosen, machine=replace(chosen.machine, ssd_mixed_bytes_per_second=7 * 10**9))
    for each, slower in ((chosen, True), (mixing, False)):
        s = each.setting(4)
        operations = vertical(
            work_of(s),
            placement_of(dict.fromkeys(("params", "optimizer", "activations", "gradients"), 0.0), s.blocks),
            shape_of(s),
        )
        found = simulate([operations], machine_of(s.machine, operations)).busy_seconds()
        moved = found["ssd_read"] + found["ssd_write"]
        read = sum(op.nbytes for op in operations if op.lane == "ssd_read")
        written = sum(op.nbytes for op in operations if op.lane == "ssd_write")
        assert moved == pytest.approx(s.ssd.seconds(read, written))
        assert (moved == pytest.approx(read / 6.5e9 + written / 2e9)) == slower
