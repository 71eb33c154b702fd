"""Where a live ZeRO engine holds what, against flat tensors that are built here in plain lines, without DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import ModelNotSupported
from holdfast.state.layout import zero
from holdfast.state.layout.regions import FlatRange, refuse_gaps

SHAPES = st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=6)


class DeepSpeedZeroOptimizer(SimpleNamespace):
    """As that of stages 1 and 2, as far as it is looked at."""


class DeepSpeedZeroOptimizer_Stage3(SimpleNamespace):
    """As that of stage 3."""

    def get_param_id(self, parameter):
        return id(parameter)


def numbered(shapes):
    """Parameters in which each element has a number of its own."""
    at, made = 1, []
    for shape in shapes:
        tensor = torch.arange(at, at + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        made.append(nn.Parameter(tensor))
        at += tensor.numel()
    return made


def stage_2(parameters, rank, ranks, *, dealt=False, aligned=False):
    """One group, joined and cut as DeepSpeed does it."""
    order = [p for turn in range(ranks) for p in parameters[turn::ranks]] if dealt else list(parameters)
    pieces, starts = [], {}
    for parameter in order:
        starts[id(parameter)] = sum(len(piece) for piece in pieces)
        pieces.append(parameter.detach().flatten().clone())
        end = sum(len(piece) for piece in pieces)
        if aligned and parameter is not order[-1]:
            pieces.append(torch.zeros(-end % 4))
    end = sum(len(piece) for piece in pieces)
    joined = torch.cat([*pieces, torch.zeros(-end % (2 * ranks))])
    for parameter in parameters:
        start = starts[id(parameter)]
        parameter.data = joined[start : start + parameter.numel()].view(parameter.shape)
    size = len(joined) // ranks
    master = joined[rank * size : (rank + 1) * size].clone()
    for parameter in parameters:
        start = starts[id(parameter)] - rank * size
        first, stop = max(start, 0), min(start + parameter.numel(), size)
        parameter._hp_mapping = None
        if first < stop:
            address = SimpleNamespace(start=first, numel=stop - first)
            parameter._hp_mapping = SimpleNamespace(
                hp_fragment_address=address, hp_fragment=master[first:stop]
            )
    return DeepSpeedZeroOptimizer(
        optimizer=SimpleNamespace(param_groups=[{"params": [master]}]),
        bit16_groups=[list(parameters)], bit16_groups_flat=[joined],
        parallel_partitioned_bit16_groups=[list(joined.split(size))], single_partition_of_fp32_groups=[master],
        real_dp_process_group=[None], round_robin_gradients=dealt, parameter_alignment=aligned,
    )  # fmt: skip


def stage_3(parameters, rank, ranks):
    """Two sub-groups of one group, and the last parameter, which is not trained."""
    whole = [parameter.detach().flatten().clone() for parameter in parameters]
    for parameter, values in zip(parameters, whole, strict=True):
        each = -(-len(values) // ranks)
        padded = torch.cat([values, torch.zeros(each * ranks - len(values))])
        parameter.ds_shape, parameter.ds_numel = tuple(parameter.shape), len(values)
        parameter.ds_tensor, parameter.ds_secondary_tensor = (
            padded[rank * each : (rank + 1) * each].clone(),
            None,
        )
    *trained, _ = parameters
    subs = [each for each in (trained[: len(trained) // 2], trained[len(trained) // 2 :]) if each]
    flats, places = [], {}
    for number, members in enumerate(subs):
        flats.append(torch.cat([p.ds_tensor for p in members]))
        at = 0
        for parameter in members:
            places[id(parameter)] = [number, at, len(parameter.ds_tensor)]
            parameter.ds_tensor = flats[-1][at : at + len(parameter.ds_tensor)]
            at += len(parameter.ds_tensor)
    for parameter in parameters:
        parameter.ds_tensor.ds_numel, parameter.ds_tensor.status = (
            len(parameter.ds_tensor),
            SimpleNamespace(name="AVAILABLE"),
        )
    return DeepSpeedZeroOptimizer_Stage3(
        fp16_groups=subs, fp16_partitioned_groups_flat=flats,
        fp32_partitioned_groups_flat=[flat.clone() for flat in flats], grad_position=places,
        sub_group_to_group_id=dict.fromkeys(range(len(subs)), 0), dp_process_group=None,
    )  # fmt: skip


def seen(monkeypatch, rank, ranks, optimizer, parameters):
    monkeypatch.setattr(zero, "_place_in", lambda group: (rank, ranks))
    return zero.partitions_of(optimizer, nn.ParameterList(parameters), "0")


def assert_each_element_once(shapes, found):
    """What all ranks hold of each parameter is its numbers, each once, where its stretches say."""
    expected = [p.detach().flatten() for p in numbered(shapes)]
    held = [torch.zeros_like(values) for values in expected]
    regions = []
    for rank in found:
        regions.append({})
        for partition, member, place in rank:
            stretch = member.stretch
            values = partition.master[member.offset : member.offset + stretch.elements]
            held[place][stretch.first : stretch.stop] += values
            assert stretch.whole == shapes[place]
            regions[-1][str(place)] = stretch
    for values, told in zip(expected, held, strict=True):
        assert torch.equal(values, told)
    for mine in regions:
        refuse_gaps(regions, mine)


def members(parameters, partitions):
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    return [(each, member, places[id(member.parameter)]) for each in partitions for member in each.members]


@settings(max_examples=150, deadline=None)
@given(shapes=SHAPES, ranks=st.integers(1, 9), dealt=st.booleans(), aligned=st.booleans())
def test_joined_groups_hold_each_element_once(shapes, ranks, dealt, aligned):
    found = []
    with pytest.MonkeyPatch.context() as patched:
        for rank in range(ranks):
            parameters = numbered(shapes)
            optimizer = stage_2(parameters, rank, ranks, dealt=dealt, aligned=aligned)
            found.append(members(parameters, seen(patched, rank, ranks, optimizer, parameters)))
    assert_each_element_once(shapes, found)


@settings(max_examples=150, deadline=None)
@given(shapes=SHAPES, ranks=st.integers(1, 9))
def test_sub_groups_and_what_is_not_trained_hold_each_element_once(shapes, ranks):
    found = []
    with pytest.MonkeyPatch.context() as patched:
        for rank in range(ranks):
            parameters = numbered(shapes)
            partitions = seen(patched, rank, ranks, stage_3(parameters, rank, ranks), parameters)
            assert [each.group for each in partitions][-1] is None
            found.append(members(parameters, partitions))
    assert_each_element_once(shapes, found)


def undealt(optimizer, parameters):
    """As 0.19.8 tells of dealt parameters: where they would be in their own order."""
    master, at = (
        optimizer.single_partition_of_fp32_groups[0],
        -len(optimizer.single_partition_of_fp32_groups[0]),
    )
    for parameter in parameters:
        first, stop = max(at, 0), min(at + parameter.numel(), len(master))
        parameter._hp_mapping = None
        if first < stop:
            address = SimpleNamespace(start=first, numel=stop - first)
            parameter._hp_mapping = SimpleNamespace(
                hp_fragment_address=address, hp_fragment=master[first:stop]
            )
        at += parameter.numel()


def test_dealt_parameters_are_where_they_are_and_not_where_they_are_told_to_be(monkeypatch):
    parameters = numbered([(3,), (5, 2), (4,)])
    optimizer = stage_2(parameters, 1, 2, dealt=True)
    undealt(optimizer, parameters)
    [partition] = seen(monkeypatch, 1, 2, optimizer, parameters)
    first, last, big = partition.members
    assert (first.stretch.elements, last.stretch.elements) == (0, 0)
    assert (big.offset, big.stretch) == (0, FlatRange((5, 2), 3, 10))
    assert partition.master[:7].tolist() == list(range(7, 14))


def broken_2(how, optimizer, parameters):
    mapping = next(p._hp_mapping for p in parameters if p._hp_mapping is not None)
    if how == "a fragment is elsewhere":
        mapping.hp_fragment_address.start += 1
    elif how == "a fragment is shorter":
        mapping.hp_fragment_address.numel -= 1
        mapping.hp_fragment = mapping.hp_fragment[:-1]
    elif how == "a fragment is not told":
        next(p for p in parameters if p._hp_mapping is not None)._hp_mapping = None
    elif how == "a parameter has other memory":
        parameters[0].data = parameters[0].data.clone()
    elif how == "two have changed places":
        optimizer.bit16_groups[0][:2] = optimizer.bit16_groups[0][1::-1]
    elif how == "the master is in 16 bits":
        optimizer.single_partition_of_fp32_groups[0] = optimizer.single_partition_of_fp32_groups[0].bfloat16()
        optimizer.optimizer.param_groups[0]["params"] = optimizer.single_partition_of_fp32_groups
    elif how == "the master is shorter":
        optimizer.single_partition_of_fp32_groups[0] = optimizer.single_partition_of_fp32_groups[0][:-1]
        optimizer.optimizer.param_groups[0]["params"] = optimizer.single_partition_of_fp32_groups
    elif how == "the optimizer updates something else":
        optimizer.optimizer.param_groups[0]["params"] = [optimizer.single_partition_of_fp32_groups[0].clone()]
    elif how == "shares lie elsewhere":
        optimizer.parallel_partitioned_bit16_groups[0].reverse()
    elif how == "another alignment":
        optimizer.parameter_alignment = True
    elif how == "another order":
        optimizer.round_robin_gradients = True
    elif how == "no such book":
        del optimizer.bit16_groups_flat
    else:
        optimizer.bit16_groups.append([])


@pytest.mark.parametrize(
    "how",
    ["a fragment is elsewhere", "a fragment is shorter", "a fragment is not told", "a parameter has other memory",
     "two have changed places", "the master is in 16 bits", "the master is shorter",
     "the optimizer updates something else", "shares lie elsewhere", "another alignment", "another order",
     "no such book", "another group"],
)  # fmt: skip
def test_books_of_joined_groups_that_say_something_else_are_refused(monkeypatch, how):
    parameters = numbered([(3,), (5, 2), (5,)])
    optimizer = stage_2(parameters, 0, 2)
    seen(monkeypatch, 0, 2, optimizer, parameters)
    broken_2(how, optimizer, parameters)
    with pytest.raises(ModelNotSupported, match="keeps the books of its DeepSpeedZeroOptimizer otherwise"):
        seen(monkeypatch, 0, 2, optimizer, parameters)


def broken_3(how, optimizer, parameters):
    held = parameters[1].ds_tensor
    if how == "a part is elsewhere":
        parameters[1].ds_tensor = held.clone()
        parameters[1].ds_tensor.ds_numel, parameters[1].ds_tensor.status = held.ds_numel, held.status
    elif how == "a part is away":
        held.status = SimpleNamespace(name="NOT_AVAILABLE")
    elif how == "there are second copies":
        parameters[0].ds_secondary_tensor = held
    elif how == "another size":
        parameters[2].ds_numel += 1
    elif how == "another place":
        optimizer.grad_position[id(parameters[0])][1] += 1
    elif how == "the master is longer":
        optimizer.fp32_partitioned_groups_flat[0] = torch.zeros(99)
    elif how == "no such sub-group":
        del optimizer.sub_group_to_group_id[0]
    else:
        optimizer.fp32_partitioned_groups_flat.pop()


@pytest.mark.parametrize(
    "how",
    ["a part is elsewhere", "a part is away", "there are second copies", "another size", "another place",
     "the master is longer", "no such sub-group", "a master is gone"],
)  # fmt: skip
def test_books_of_sub_groups_that_say_something_else_are_refused(monkeypatch, how):
    parameters = numbered([(3,), (5, 2), (5,), (2,)])
    optimizer = stage_3(parameters, 0, 2)
    seen(monkeypatch, 0, 2, optimizer, parameters)
    broken_3(how, optimizer, parameters)
    with pytest.raises(
        ModelNotSupported, match="keeps the books of its DeepSpeedZeroOptimizer_Stage3 otherwise"
    ):
        seen(monkeypatch, 0, 2, optimizer, parameters)
