"""The search around the linear program: micro-batches, delayed fraction, and what would help."""

from dataclasses import replace

import pytest

from holdfast.errors import DoesNotFit
from holdfast.profiles import load_machine, load_model
from holdfast.schedule.planner import formulas, plan_search
from holdfast.schedule.planner.linear_program import solve
from holdfast.schedule.planner.plan_search import (
    Case,
    best_at,
    binding,
    life,
    memory_is_full,
    search,
    what_if,
)
from holdfast.schedule.planner.training_setting import Method


def case(host=256, model="gpt-65b", machine="a100-80g", **method) -> Case:
    profile = replace(load_machine(machine), host_memory_bytes=host * 10**9)
    return Case(machine=profile, model=load_model(model), method=Method(**method))


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "chosen", [case(), case(400), case(56, "llama-7b", "rtx-4090"), case(12, "gpt-46m", "cpu-2-core")]
)
@pytest.mark.parametrize("micro_batches", [2, 8])
def test_the_delayed_fraction_is_the_best_of_all_hundredths(chosen, micro_batches):
    every = [s for k in range(101) if (s := solve(chosen.setting(micro_batches, k / 100)))]
    fastest = min(s.step_seconds for s in every)
    assert best_at(chosen, micro_batches).step_seconds <= fastest * 1.002


@pytest.mark.slow
def test_the_fewest_micro_batches_that_come_within_a_hundredth_are_chosen():
    found = search(case(), most=40)
    highest = max(s.tokens_per_second for s in found.tried)
    assert found.best.tokens_per_second >= 0.99 * highest
    fewer = [s for s in found.tried if s.setting.micro_batches < found.best.setting.micro_batches]
    assert fewer and all(s.tokens_per_second < 0.99 * highest for s in fewer)


@pytest.mark.slow
def test_it_stops_where_nothing_grows_any_more():
    found = search(case(2000), most=1000)
    assert len(found.tried) < 60


def test_a_count_and_a_fraction_that_are_given_are_kept():
    found = search(case(), 6, delayed=0.3)
    setting = found.best.setting
    assert (setting.micro_batches, setting.delayed_fraction, len(found.tried)) == (6, 0.3, 1)


def test_clipping_that_defers_delays_everything():
    assert search(case(clipping="defer"), 6).best.setting.delayed_fraction == 1.0


def test_a_micro_batch_too_large_for_the_device_is_refused_with_numbers():
    large = case(56, "gpt-175b", "rtx-4090")
    with pytest.raises(
        DoesNotFit, match=r"take about \d+\.\d GiB of the device's memory, and it has 20.5 GiB"
    ):
        search(large, 4)


def test_nothing_that_fits_is_said_at_the_first_count():
    with pytest.raises(DoesNotFit, match="of host memory"):
        search(case(8))


def test_what_binds_is_what_the_passes_wait_for():
    computing, moving = best_at(case(2000), 40), best_at(case(128), 1)
    assert binding(computing) == {"forward_seconds": ["computing"], "backward_seconds": ["computing"]}
    assert formulas.SSD in binding(moving)["backward_seconds"]
    assert memory_is_full(moving)
    assert not memory_is_full(best_at(case(4000), 4))


def test_what_would_help_is_solved_again():
    chosen = case()
    best = best_at(chosen, 4)
    changes = {change.what: change for change in what_if(chosen, best)}
    more = replace(chosen, machine=chosen.machine.with_more(host_bytes=plan_search.MORE_HOST_BYTES))
    gain = best_at(more, 4).tokens_per_second / best.tokens_per_second - 1
    assert changes["64 GiB more host memory"].gain == pytest.approx(gain)
    assert gain > 0.02
    assert changes["one more SSD"].gain > 0.1
    assert changes["one more SSD"].solution.setting.machine.ssd_count == 3
    assert changes["clipping: defer"].gain < 0
    assert changes["no commits"].gain > 0


@pytest.mark.parametrize("clipping, commit_every", [("speculate", 1), ("none", 2), ("none", 0)])
def test_no_change_is_proposed_that_a_run_refuses(clipping, commit_every):
    """A guess is undone from the commit of the step before."""
    chosen = Case(
        machine=load_machine("cpu-2-core"), model=load_model("gpt-46m"),
        method=Method(clipping=clipping, commit_every=commit_every),
    )  # fmt: skip
    best = best_at(chosen, 2)
    assert best is not None
    for change in what_if(chosen, best):
        if change.solution is not None:
            method = change.solution.setting.method
            assert method.clipping != "speculate" or method.commit_every == 1, change.what


def test_the_life_of_the_ssds_is_their_rating_over_what_is_written():
    best = best_at(case(), 8)
    found = life(best)
    assert found.steps == pytest.approx(2 * 7008e12 / best.of(formulas.written_bytes))
    assert found.days == pytest.approx(found.steps * best.step_seconds / 86400)
