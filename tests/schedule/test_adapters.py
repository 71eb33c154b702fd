"""Plans of adapters on a frozen base: bytes and memory of the operation list, and what fits."""

from dataclasses import replace

import pytest

from holdfast.profiles import BASES, AdaptedModel, load_machine, load_model
from holdfast.schedule.memory_use import predict
from holdfast.schedule.operation_lists import (
    EVALUATION_BATCHES,
    fit,
    host_bytes,
    placement_of,
    shape_of,
    work_of,
)
from holdfast.schedule.operations import SSD_READ, SSD_WRITE, as_guessed, lane_bytes
from holdfast.schedule.planner import formulas
from holdfast.schedule.planner.plan_search import Case, search
from holdfast.schedule.planner.training_setting import Method, Setting
from holdfast.schedule.vertical import vertical

ALL_ON_SSD = {"params": 0.0, "optimizer": 0.0, "activations": 0.0, "gradients": 0.0, "recycled": 0.0}
PLACEMENTS = [ALL_ON_SSD, {**ALL_ON_SSD, "params": 1.0}, {**dict.fromkeys(ALL_ON_SSD, 1.0), "recycled": 0.0}]


def llama(base="nf4", tokens=2048) -> AdaptedModel:
    profile = replace(load_model("llama-3-70b"), sequence=tokens, micro_batch=1)
    return AdaptedModel(profile=profile, rank=16, base=BASES[base])


def setting(base, machine="rtx-4090", **method) -> Setting:
    return Setting(
        machine=load_machine(machine),
        model=llama(base),
        method=Method(**method),
        micro_batches=3,
    )


@pytest.mark.parametrize("base", BASES)
def test_bytes_are_those_of_the_operation_list(base):
    s = setting(base)
    for kept in PLACEMENTS:
        moved = lane_bytes(as_guessed(vertical(work_of(s), placement_of(kept, s.blocks), shape_of(s))))
        assert formulas.read_bytes(s)(kept) == pytest.approx(moved[SSD_READ], rel=0.003)
        assert formulas.written_bytes(s)(kept) == pytest.approx(moved[SSD_WRITE], rel=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("machine", ["rtx-4090", "cpu-2-core"])
def test_memory_is_that_of_the_operation_list(base, machine):
    s = setting(base, machine)
    for kept in PLACEMENTS:
        placement = placement_of(kept, s.blocks)
        assert formulas.host_bytes(s)(kept) == pytest.approx(host_bytes(s, placement), rel=0.05)
        listed = predict(work_of(s), placement, shape_of(s), evaluation_batches=EVALUATION_BATCHES)
        if not s.machine.device_shares_host:
            assert formulas.device_bytes(s) == pytest.approx(listed.device_bytes, rel=0.05)


def test_embedding_and_head_stay_on_the_device_and_on_the_host():
    s, tables = setting("nf4"), 2 * llama().profile.resident_parameters
    without = replace(s, model=replace(llama(), profile=replace(llama().profile, tied=True)))
    one = 2 * 128256 * 8192
    assert s.model.frozen_resident_bytes == tables
    assert formulas.device_bytes(s) - formulas.device_bytes(without) == one
    assert formulas.host_bytes(s).constant - formulas.host_bytes(without).constant == one


def test_a_base_lies_on_the_ssd_once_wherever_it_is_kept():
    """As the device computes with it and as commits hold it are one file."""
    s = setting("nf4")
    base = 80 * s.model.frozen_block_bytes + s.model.frozen_resident_bytes
    adapters, inputs = 80 * s.elements, 80 * 3 * s.input_bytes
    taken = [formulas.ssd_bytes(s)({**ALL_ON_SSD, "params": part}) for part in (0.0, 1.0)]
    assert taken[0] == pytest.approx(base + (3 * 12 + 2) * adapters + inputs)
    assert taken[0] - taken[1] == pytest.approx(2 * adapters)


def test_a_step_writes_nothing_of_the_base():
    packed, whole = (formulas.written_bytes(setting(base))(ALL_ON_SSD) for base in ("nf4", "bf16"))
    assert packed == whole
    inputs = 79 * 3 * setting("nf4").input_bytes
    assert packed == pytest.approx(14 * 80 * setting("nf4").elements + inputs)


@pytest.mark.parametrize("base, least, most", [("nf4", 1.0, 1.1), ("int8", 1.95, 2.05), ("bf16", 3.9, 4.0)])
def test_a_step_reads_the_base_twice(base, least, most):
    """The last block has no forward pass of its own, so it is read once."""
    s = setting(base)
    parameters = 80 * s.model.profile.block_parameters
    read = formulas.frozen_read_bytes(s)(ALL_ON_SSD)
    assert read == pytest.approx((80 + 79) * s.model.frozen_block_bytes)
    assert least < read / parameters < most
    assert formulas.frozen_read_bytes(s)({**ALL_ON_SSD, "params": 0.25}) == pytest.approx(0.75 * read)
    assert formulas.frozen_moved_bytes(s) == read


def test_of_a_4_bit_base_a_step_reads_1_1_bytes_a_parameter_with_adapters_and_their_state():
    s = setting("nf4")
    kept = {**ALL_ON_SSD, "activations": 1.0}  # otherwise block inputs are read as well
    assert formulas.read_bytes(s)(kept) <= 1.1 * 80 * s.model.profile.block_parameters


def test_llama_3_70b_in_nf4_trains_in_24_gb_of_device_and_32_gb_of_host_memory():
    """At 2,048 tokens, planned by the formulas and by the operation list that an engine runs."""
    machine = replace(load_machine("rtx-4090"), device_memory_bytes=24 * 10**9, host_memory_bytes=32 * 10**9)
    case = Case(machine=machine, model=llama("nf4"), method=Method(clipping="speculate"))
    best = search(case, 4, delayed=0.0).best
    assert best.of(formulas.device_bytes) <= 24e9
    assert best.of(formulas.host_bytes) <= 32e9 * (1 + 1e-6)
    assert best.of(formulas.frozen_read_bytes) <= 1.1 * case.model.blocks * llama().profile.block_parameters
    solution, placement = fit(case, 4)
    s = solution.setting
    assert host_bytes(s, placement) <= 32e9
    listed = predict(work_of(s), placement, shape_of(s), evaluation_batches=EVALUATION_BATCHES)
    assert listed.device_bytes <= 24e9


# Experts that are read one by one


def mixture(slots, tokens=2048) -> AdaptedModel:
    profile = replace(load_model("qwen3-30b-a3b"), sequence=tokens, micro_batch=1)
    return AdaptedModel(profile=profile, rank=16, expert_slots=slots)


def test_a_mixture_has_the_parameters_of_its_name():
    for name, count, used in (("qwen3-30b-a3b", 30.5e9, 3.3e9), ("qwen3-235b-a22b", 235e9, 22e9)):
        model = load_model(name)
        assert model.parameters == pytest.approx(count, rel=0.01)
        tables = model.resident_parameters
        assert model.blocks * model.used_block_parameters + tables == pytest.approx(used, rel=0.03)


@pytest.mark.parametrize("machine", ["rtx-4090", "cpu-2-core"])
@pytest.mark.parametrize("slots", [0, 16, 128])
def test_experts_are_planned_as_the_operation_list_counts_them(machine, slots):
    s = replace(setting("bf16", machine), model=mixture(slots))
    for kept in PLACEMENTS:
        placement = placement_of(kept, s.blocks)
        moved = lane_bytes(as_guessed(vertical(work_of(s), placement, shape_of(s))))
        assert formulas.read_bytes(s)(kept) == pytest.approx(moved[SSD_READ], rel=0.003)
        listed = predict(work_of(s), placement, shape_of(s))
        if not s.machine.device_shares_host:
            assert formulas.device_bytes(s) == pytest.approx(listed.device_bytes, rel=0.05)
    expert = 2 * 3 * 2048 * 768
    assert s.slot_bytes == slots * expert


def test_slots_bound_the_device_and_few_of_them_read_again():
    s = [replace(setting("bf16"), model=mixture(slots)) for slots in (0, 16, 128)]
    block, expert = 2 * 128 * 3 * 2048 * 768, 2 * 3 * 2048 * 768
    assert formulas.device_bytes(s[0]) - formulas.device_bytes(s[1]) == 2 * block - 16 * expert
    reads = [formulas.frozen_read_bytes(each)(ALL_ON_SSD) for each in s]
    assert reads[2] == pytest.approx(reads[0])  # each pass reads each expert once
    assert reads[1] - reads[2] == pytest.approx(
        (47 * (3 - 1) * 128 + 48 * (2 * 3 * 112 + 16 - 128)) * expert, rel=1e-6
    )
    kept = {**ALL_ON_SSD, "params": 1.0}
    assert formulas.frozen_read_bytes(s[2])(kept) == (47 + 48) * block
