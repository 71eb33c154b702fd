"""Plans in which embedding and head are streamed: bytes and memory of the operation list, and when it is planned."""

from dataclasses import replace

import pytest

from combined import one_in
from holdfast.profiles import BASES, AdaptedModel, load_machine, load_model
from holdfast.schedule.memory_use import predict
from holdfast.schedule.operation_lists import fit, host_bytes, placement_of, shape_of, work_of
from holdfast.schedule.operations import SSD_READ, SSD_WRITE, as_guessed, lane_bytes
from holdfast.schedule.planner import formulas
from holdfast.schedule.planner.plan_search import Case, streamed_where_needed
from holdfast.schedule.planner.training_setting import Method, Setting
from holdfast.schedule.vertical import vertical
from holdfast.schedule.work import FASTEST, LEAST_MEMORY

GB = 10**9
NOTHING = {"params": 0.0, "optimizer": 0.0, "activations": 0.0, "gradients": 0.0, "recycled": 0.0}
SOME = {"params": 0.5, "optimizer": 0.5, "activations": 1.0, "gradients": 1.0, "recycled": 0.0}


def setting(model="llama-3-70b", saving=FASTEST, micro_batches=1, tied=False, **method) -> Setting:
    model = replace(load_model(model), sequence=2048, micro_batch=1, tied=tied)
    method = Method(streams_all=True, **method)
    case = Case(machine=load_machine("rtx-4090"), model=model, method=method)
    return replace(case.setting(micro_batches), saving=saving)


MODELS, CLIPPING = ("llama-3-70b", "llama-3-8b"), ("none", "defer", "speculate")


@pytest.mark.parametrize("model, clipping, kept", one_in(2, MODELS, CLIPPING, ("nothing", "some")))
def test_bytes_and_memory_are_those_of_the_operation_list(model, clipping, kept):
    same_as_listed(setting(model, clipping=clipping, micro_batches=3), SOME if kept == "some" else NOTHING)


@pytest.mark.parametrize("model, clipping", one_in(2, MODELS, CLIPPING))
def test_those_of_a_tied_embedding_are_too(model, clipping):
    """Of units that stay in part, the embedding is one, of which the formulas take a fraction."""
    same_as_listed(setting(model, clipping=clipping, micro_batches=3, tied=True), NOTHING)


def same_as_listed(s, kept):
    placement = placement_of(kept, s.units)
    operations = vertical(work_of(s), placement, shape_of(s))
    moved = lane_bytes(as_guessed(operations))
    assert formulas.read_bytes(s)(kept) == pytest.approx(moved[SSD_READ], rel=0.03)
    assert formulas.written_bytes(s)(kept) == pytest.approx(moved[SSD_WRITE], rel=0.03)
    held = host_bytes(s, placement, lambda *_: operations)
    assert formulas.host_bytes(s)(kept) == pytest.approx(held, rel=0.05)
    listed = predict(work_of(s), placement, shape_of(s), lambda *_: operations)
    assert formulas.device_bytes(s) == pytest.approx(listed.device_bytes, rel=0.02)


def test_llama_3_70b_takes_10_gb_of_a_device_and_20_gb_of_the_host():
    s = setting(saving=LEAST_MEMORY)
    nothing = replace(placement_of(NOTHING, s.units), saving=LEAST_MEMORY)
    listed = predict(work_of(s), nothing, shape_of(s))
    assert 8 * GB < listed.device_bytes < 10 * GB
    assert 8 * GB < host_bytes(s, nothing) < 20 * GB
    resident = replace(s, method=replace(s.method, streams_all=False))
    assert formulas.device_bytes(resident) > 26 * GB


def case(model, machine="rtx-4090", **of_machine) -> Case:
    return Case(machine=replace(load_machine(machine), **of_machine), model=model, method=Method())


def test_they_are_streamed_only_where_a_device_could_not_hold_them():
    large = replace(load_model("llama-3-70b"), sequence=2048)
    assert streamed_where_needed(case(large)).method.streams_all
    assert streamed_where_needed(
        case(replace(large, tied=True), device_memory_bytes=21_200 * 10**6)
    ).method.streams_all
    for held in (
        case(large, "a100-80g"),
        case(replace(load_model("llama-3-8b"), sequence=2048)),
        replace(case(large), method=Method(order="snake")),  # would sum gradients in another order
        replace(case(large), method=Method(clipping="per_block")),
        case(large, device_memory_bytes=4 * GB),  # which would not hold them streamed either
        case(AdaptedModel(profile=large, rank=16, base=BASES["bf16"])),
    ):
        assert not streamed_where_needed(held).method.streams_all


def test_the_engines_placement_has_a_place_for_each_unit():
    large = replace(load_model("llama-3-70b"), sequence=2048)
    planned = streamed_where_needed(case(large, ssd_count=2))
    solution, placement = fit(planned, 8)
    assert len(placement.params) == len(work_of(solution.setting).blocks) == 82
    assert host_bytes(solution.setting, placement) <= planned.machine.host_memory_bytes
