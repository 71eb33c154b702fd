"""As which optimizer of torch an Adam of DeepSpeed is shown. With its kernels: ``tests/peers/test_live_adam.py``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.integrations.zero_state import number_for, optimizer_beside, shown_number, unsupported_messages

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}


def fused(mode, **options):
    name = {"__module__": "deepspeed.ops.adam.fused_adam", "__init__": torch.optim.Optimizer.__init__}
    made = type("FusedAdam", (torch.optim.Optimizer,), name)([nn.Parameter(torch.ones(3))], OPTIONS | options)
    made.adam_w_mode = mode
    return made


@pytest.mark.parametrize(("mode", "kind"), [(1, torch.optim.AdamW), (0, torch.optim.Adam)])
def test_it_is_shown_as_torchs_without_what_it_has_not(mode, kind):
    beside = optimizer_beside(fused(mode, step=7, amsgrad=False), [])
    [group] = beside.param_groups
    assert type(beside) is kind and group["decoupled_weight_decay"] == bool(mode)
    assert not group.keys() & {"step", "amsgrad"}


def test_its_counts_are_plain_numbers_and_shown_as_tensors():
    base = fused(1)
    assert torch.equal(shown_number(base, 3), torch.tensor(3.0))
    put = [number_for(base, "step", value, 0, torch.ones(3)) for value in (torch.tensor(3.0), 3, 3.0)]
    assert put == [3, 3, 3] and {type(value) for value in put} == {int}


def test_what_it_does_not_take_is_told():
    base = fused(1)
    beside = optimizer_beside(base, [])
    assert unsupported_messages(base, beside) == []
    beside.param_groups[0] |= {"maximize": True, "decoupled_weight_decay": False}
    assert unsupported_messages(base, beside) == [
        "FusedAdam goes on without its decoupled_weight_decay=False, maximize=True"
    ]
