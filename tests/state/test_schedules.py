"""A scheduler that moves learning rates and was not given is told of, at the step that shows it."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, ReduceLROnPlateau, SequentialLR

from holdfast import Checkpointer
from holdfast.optim.joined import Joined
from holdfast.state.progress import MOST_LOOKED_AT, needs_arguments


def rising(optimizer):
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def resting(optimizer):
    return LambdaLR(optimizer, lambda step: 1.0)


class Held:
    """A scheduler of a script's own, with others in a dictionary and in a list."""

    def __init__(self, optimizer):
        self.parts = {"all": [rising(optimizer)]}

    def step(self):
        self.parts["all"][0].step()

    def state_dict(self):
        return self.parts["all"][0].state_dict()

    def load_state_dict(self, state):
        self.parts["all"][0].load_state_dict(state)


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)


def train(run, make, after_update=None, **options):
    """Four steps, with a schedule; ``options`` are given what was made by name."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make(optimizer)
    given = dict.fromkeys(options, scheduler)
    with Checkpointer(run, model=model, optimizer=optimizer, **given) as checkpointer:
        checkpointer.resume()
        for _ in range(4):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            scheduler.step(*[1.0] * needs_arguments(scheduler))
            checkpointer.step()


@pytest.mark.parametrize("make", [rising, resting, plateau])
def test_a_forgotten_scheduler_is_told_once(tmp_path, make):
    with pytest.warns(UserWarning, match="moves learning rates and was not given") as told:
        train(tmp_path / "run", make)
    assert len(told) == 1
    assert type(make(torch.optim.SGD([torch.ones(1)], lr=0.1))).__name__ in str(told[0].message)


@pytest.mark.parametrize("make", [rising, plateau])
def test_a_given_scheduler_is_not_told(tmp_path, make):
    train(tmp_path / "run", make, scheduler=True)


@pytest.mark.slow
def test_schedulers_in_a_given_one_are_known(tmp_path):
    def several(optimizer):
        return SequentialLR(optimizer, [ConstantLR(optimizer), rising(optimizer)], milestones=[2])

    train(tmp_path / "several", several, scheduler=True)
    train(tmp_path / "held", Held, scheduler=True)


class Loader:
    """A place in data, with many things in it."""

    def __init__(self):
        self.texts = [[str(number)] for number in range(2 * MOST_LOOKED_AT)]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert not state


@pytest.mark.slow
def test_a_scheduler_beside_large_data_is_known(tmp_path):
    """The schedulers in it as well."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SequentialLR(optimizer, [ConstantLR(optimizer), rising(optimizer)], milestones=[2])
    with Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizer, scheduler=scheduler, loader=Loader()
    ) as checkpointer:
        checkpointer.resume()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        scheduler.step()
        checkpointer.step()


def test_a_scheduler_of_a_joined_optimizer_is_told(tmp_path):
    model = torch.nn.Linear(3, 2)
    members = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    joined, scheduler = Joined(*members), resting(members[1])
    with Checkpointer(tmp_path / "run", model=model, optimizer=joined) as checkpointer:
        checkpointer.resume()
        model(torch.ones(3)).sum().backward()
        joined.step()
        scheduler.step()
        with pytest.warns(UserWarning, match="LambdaLR moves learning rates and was not given"):
            checkpointer.step()


def test_rates_that_a_script_sets_are_no_scheduler(tmp_path):
    class Sets:
        def __init__(self, optimizer):
            self.group, self.steps = optimizer.param_groups[0], 0

        def step(self):
            self.steps += 1
            self.group["lr"] = 0.1 / self.steps

    train(tmp_path / "run", Sets)


def test_a_forgotten_scaler_is_told(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for enabled in (False, True):  # one that is switched off scales nothing
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
        with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
            checkpointer.resume()
            scaler.scale(model(torch.ones(3)).sum()).backward()
            told = pytest.warns(UserWarning, match="a GradScaler steps the optimizer and was not given")
            with told if enabled else nullcontext():
                scaler.step(optimizer)
            scaler.update()
            checkpointer.step()


def test_which_steps_need_a_value():
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert needs_arguments(plateau(optimizer)) and not needs_arguments(rising(optimizer))
