"""Several optimizers as one do what each would do by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from holdfast.errors import OptimizerNotSupported
from holdfast.optim import AdamW8bit, Joined


def made():
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(300))
    return matrix, vector, torch.optim.Muon([matrix], lr=0.1), AdamW8bit([vector], lr=0.01)


def step(matrix, vector, seed, *optimizers):
    generator = torch.Generator().manual_seed(seed)
    matrix.grad, vector.grad = torch.randn(4, 6, generator=generator), torch.randn(300, generator=generator)
    for optimizer in optimizers:
        optimizer.step()


def test_it_does_what_each_would_do_under_one_schedule():
    matrix, vector, *alone = made()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in alone]
    for seed in range(4):
        step(matrix, vector, seed, *alone)
        for schedule in schedules:
            schedule.step()
    other, rest, *members = made()
    joined = Joined(*members)
    schedule = torch.optim.lr_scheduler.ExponentialLR(joined, 0.5)
    for seed in range(4):
        step(other, rest, seed, joined)
        schedule.step()
    assert torch.equal(matrix, other) and torch.equal(vector, rest)
    assert joined.state[rest]["exp_avg"].dtype == torch.uint8


def test_its_state_dict_goes_on_where_it_was_taken():
    matrix, vector, *members = made()
    joined = Joined(*members)
    for seed in range(3):
        step(matrix, vector, seed, joined)
    joined.param_groups[0]["lr"] = 0.5
    saved = copy.deepcopy(joined.state_dict())
    other, rest, *members = made()
    again = Joined(*members)
    other.data.copy_(matrix.data)
    rest.data.copy_(vector.data)
    again.load_state_dict(saved)
    assert again.param_groups[0]["lr"] == members[0].param_groups[0]["lr"] == 0.5
    step(matrix, vector, 9, joined)
    step(other, rest, 9, again)
    for name, value in joined.state[vector].items():
        assert torch.equal(again.state[rest][name], value)
    assert again.state.keys() == {other, rest}
    assert torch.equal(matrix, other) and torch.equal(vector, rest)


def test_what_cannot_be_joined_is_refused():
    _, vector, muon, adamw = made()
    joined = Joined(muon, adamw)
    for wrong in ((), (joined,)):
        with pytest.raises(ValueError, match="one optimizer or more"):
            Joined(*wrong)
    with pytest.raises(ValueError, match="more than one parameter group"):
        Joined(torch.optim.SGD([vector]), torch.optim.SGD([vector]))
    with pytest.raises(ValueError, match="before they are"):
        joined.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(OptimizerNotSupported, match=r"optimizer=\[one, other\]"):
        copy.deepcopy(joined)
