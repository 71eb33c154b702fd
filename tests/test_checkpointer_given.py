"""Hyper-parameters that the script has otherwise than when the run was made: kept as the run has them, and told."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from holdfast.checkpointer import Checkpointer
from holdfast.errors import RunMismatch


def resumed(root, steps, schedule=None, by_hand=None, **options):
    """What was warned of when a script with an optimizer of ``options`` resumed, and its parameter group after it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    scheduler = None if schedule is None else schedule(optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checkpointer = Checkpointer(root, model=model, optimizer=optimizer, scheduler=scheduler)
        with checkpointer:
            done = checkpointer.resume()
            found = dict(optimizer.param_groups[0])
            for step in range(done, steps):
                if by_hand is not None:
                    optimizer.param_groups[0]["lr"] = by_hand(step)
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
                checkpointer.step()
    return [str(each.message) for each in told], found


def falling(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def test_another_learning_rate_of_the_script_is_told_with_the_way_to_it(tmp_path):
    resumed(tmp_path, 3, lr=0.001, weight_decay=0.1)
    [told], group = resumed(tmp_path, 5, lr=0.1, weight_decay=0.1)
    assert "param_groups[0]['lr'] is 0.001 and not 0.1, as the optimizer was given" in told
    assert "set it after resume()" in told and "weight_decay" not in told
    assert group["lr"] == 0.001


@pytest.mark.slow
def test_another_beginning_of_a_schedule_is_told(tmp_path):
    resumed(tmp_path, 3, falling, lr=0.001)
    [told], _ = resumed(tmp_path, 5, falling, lr=0.1)
    assert "param_groups[0]['initial_lr'] is 0.001 and not 0.1" in told


@pytest.mark.slow
def test_another_length_of_a_schedule_is_told_until_it_is_given_as_before(tmp_path):
    def cosine(steps):
        return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    resumed(tmp_path, 3, cosine(10), lr=0.1)
    [told], _ = resumed(tmp_path, 5, cosine(20), lr=0.1)
    assert "the run's own schedule is kept: T_max is 10 and not 20, as the scheduler was given." in told
    assert "set it after resume()" in told
    assert resumed(tmp_path, 7, cosine(10), lr=0.1)[0] == []


def in_turn(optimizer, warm_up=5, length=10, gamma=0.9):
    """Three schedules, one after the other, of which the last is of two at once."""
    last = torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        ]
    )
    parts = [
        torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=warm_up),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=length),
        last,
    ]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[warm_up, warm_up + length])


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "given, expected",
    [
        ({"length": 20}, ["_schedulers[1].T_max is 10 and not 20", "_milestones is [5, 15] and not [5, 25]"]),
        ({"gamma": 0.5}, ["_schedulers[2]._schedulers[0].gamma is 0.9 and not 0.5"]),
    ],
)
def test_another_schedule_within_a_schedule_is_told_until_it_is_given_as_before(tmp_path, given, expected):
    assert resumed(tmp_path, 3, in_turn, lr=0.1)[0] == []
    [told], _ = resumed(tmp_path, 5, lambda optimizer: in_turn(optimizer, **given), lr=0.1)
    for text in expected:
        assert text in told
    assert told.count(" and not ") == len(expected)
    assert resumed(tmp_path, 7, in_turn, lr=0.1)[0] == []


@pytest.mark.slow
def test_other_milestones_are_told(tmp_path):
    def at(*steps):
        return lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, steps)

    resumed(tmp_path, 3, at(2, 9), lr=0.1)
    [told], _ = resumed(tmp_path, 5, at(2, 7), lr=0.1)
    assert "milestones is Counter({2: 1, 9: 1}) and not Counter({2: 1, 7: 1})" in told


def with_frozen(root, steps, frozen, thaw_at=None, save=False, groups_without=False):
    """What was warned of when a script resumed that has the first layer ``frozen``, until a step if that is told."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(not frozen)
    trained = [p for p in model.parameters() if p.requires_grad or not groups_without]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    with (
        warnings.catch_warnings(record=True) as told,
        Checkpointer(root, model=model, optimizer=optimizer, base_every=1000) as checkpointer,
    ):
        warnings.simplefilter("always")
        for step in range(checkpointer.resume(), steps):
            if thaw_at is not None and step >= thaw_at:
                model[0].requires_grad_(True)
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
        if save:
            checkpointer.save()
    return [str(each.message) for each in told]


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("without", [False, True])
def test_what_was_frozen_and_trains_now_is_told_once(tmp_path, save, without):
    assert with_frozen(tmp_path, 4, True, save=save, groups_without=without) == []
    [told] = with_frozen(tmp_path, 7, False, save=save)
    assert told.startswith(
        "resuming after step 4: 0.weight, 0.bias: frozen when the script was started before"
    )
    assert with_frozen(tmp_path, 9, False) == []


def test_what_a_script_unfreezes_at_its_step_is_not_told(tmp_path):
    """Whether it did before the resume or does so after it."""
    for steps in (2, 4, 5, 8):
        assert with_frozen(tmp_path, steps, True, thaw_at=4) == []
    assert with_frozen(tmp_path, 10, False) == []


@pytest.mark.slow
def test_a_schedule_that_the_run_does_not_have_is_told_once(tmp_path):
    resumed(tmp_path, 3, lr=0.001)
    told, _ = resumed(tmp_path, 5, falling, lr=0.001)
    assert any(
        "the run has no scheduler: the one that was passed begins where it is" in text for text in told
    )
    assert resumed(tmp_path, 7, falling, lr=0.001)[0] == []


class Odd:
    """A schedule whose state is not a dictionary."""

    def __init__(self, optimizer, kind):
        self.optimizer, self.kind, self.count = optimizer, kind, 0

    def step(self):
        self.count += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.count)

    def state_dict(self):
        return self.kind((self.count,))

    def load_state_dict(self, state):
        self.count = int(state[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [tuple, list, bytes, torch.tensor])
def test_a_schedule_whose_state_is_no_dictionary_comes_back(tmp_path, kind):
    resumed(tmp_path, 3, lambda optimizer: Odd(optimizer, kind))
    told, group = resumed(tmp_path, 5, lambda optimizer: Odd(optimizer, kind))
    assert told == [] and group["lr"] == 0.1 / 4


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, falling])
def test_what_the_script_has_as_ever_is_not_told(tmp_path, schedule):
    for steps in (3, 5, 7):
        assert resumed(tmp_path, steps, schedule, lr=0.1, weight_decay=0.1)[0] == []


@pytest.mark.slow
def test_a_rate_that_the_loop_moves_by_itself_is_not_told(tmp_path):
    for steps in (3, 5, 7):
        assert resumed(tmp_path, steps, by_hand=lambda step: 0.1 / (step + 2), lr=0.1)[0] == []


@pytest.mark.parametrize("first", [True, False])
def test_records_are_not_replayed_with_another_after_update(tmp_path, first):
    """A base can be gone on from either way, and says from then on what its records were made with."""

    def live(updating, steps, save=False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def clamp():
            with torch.no_grad():
                model.weight.clamp_(-0.1, 0.1)

        options = {"after_update": clamp} if updating else {}
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, **options) as checkpointer:
            done = checkpointer.resume()
            for _ in range(done, steps):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
            if save:
                checkpointer.save()
        return done, model.weight.detach().clone()

    _, before = live(first, 4)
    with pytest.raises(RunMismatch, match="after_update="):
        live(not first, 4)
    done, now = live(first, 4, save=True)
    assert done == 4 and torch.equal(now, before)
    _, before = live(not first, 6)
    done, now = live(not first, 6)
    assert done == 6 and torch.equal(now, before)


def in_groups(root, moved, steps, save=False):
    """Resume a script whose bias is in the second group, or in the first if it was ``moved``, and train."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    first, second = ([*model.parameters()], []) if moved else ([model.weight], [model.bias])
    optimizer = torch.optim.SGD([{"params": first, "weight_decay": 0.5}, {"params": second}], lr=0.1)
    with Checkpointer(root, model=model, optimizer=optimizer, base_every=1000) as checkpointer:
        done = checkpointer.resume()
        found = model.bias.detach().clone()
        for _ in range(done, steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
        if save:
            checkpointer.save()
    return done, found, model.bias.detach().clone()


def test_records_are_not_replayed_with_a_parameter_in_another_group(tmp_path):
    """A base can be gone on from with other groups, and what follows is of those."""
    _, _, before = in_groups(tmp_path, False, 4)
    with pytest.raises(
        RunMismatch, match=r"bias was in parameter group 1 .*is in parameter group 0 .*save\(\)"
    ):
        in_groups(tmp_path, True, 4)
    done, found, _ = in_groups(tmp_path, False, 4, save=True)
    assert done == 4 and torch.equal(found, before)
    with pytest.warns(UserWarning, match="bias was in parameter group 1 of optimizer 0 of the run"):
        done, found, now = in_groups(tmp_path, True, 7)
    assert done == 4 and torch.equal(found, before)
    done, found, _ = in_groups(tmp_path, True, 7)
    assert done == 7 and torch.equal(found, now)


def test_a_learning_rate_that_is_a_tensor_of_the_script_stays_that_tensor(tmp_path):
    for steps in (3, 6):
        torch.manual_seed(0)
        model, rate = nn.Linear(3, 2), torch.tensor(0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, base_every=1000) as checkpointer:
            done = checkpointer.resume()
            assert optimizer.param_groups[0]["lr"] is rate and rate == torch.tensor(0.5 / max(done, 1))
            for step in range(done, steps):
                rate.fill_(0.5 / (step + 1))
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()


def test_groups_that_share_a_tensor_have_each_their_own_value_back(tmp_path):
    """torch gives the default of all groups to each of them; the script then gives one another."""
    for steps in (3, 6):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        groups = [{"params": list(layer.parameters())} for layer in model]
        optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.5))
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, base_every=1000) as checkpointer:
            if checkpointer.resume() == 0:
                optimizer.param_groups[1]["lr"] = torch.tensor(0.25)
            for _ in range(checkpointer.steps_done, steps):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
            assert [group["lr"].item() for group in optimizer.param_groups] == [0.5, 0.25]
            assert checkpointer.steps_done == steps


@pytest.mark.parametrize("fused", [(True, False), (False, True)])
def test_a_loss_scaler_goes_on_with_an_optimizer_that_was_given_otherwise(tmp_path, fused):
    """Whether it is fused the run says, and who unscales follows that."""
    weights = []
    for now, first in ((fused[0], 0), (fused[1], 3), (fused[0], 0)):
        torch.manual_seed(0)
        model, scaler = nn.Linear(3, 2), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=now)
        root = tmp_path / str(len(weights) // 2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with Checkpointer(root, model=model, optimizer=optimizer, scaler=scaler) as checkpointer:
                assert checkpointer.resume() == first
                for step in range(first, 3 if not weights else 6):
                    scale = float("inf") if step == 4 else 1.0
                    scaler.scale(model(torch.ones(1, 3)).pow(2).sum() * scale).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    checkpointer.step()
        assert ["['fused']" in str(each.message) for each in told] == [True] * bool(first)
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights[1:])


def test_other_names_of_parameters_in_their_groups_are_not_told(tmp_path, recwarn):
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        model = torch.compile(model, backend="eager") if compiled else model
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        assert str(optimizer.param_groups[0]["param_names"]).count("_orig_mod") == 2 * compiled
        with Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
            for _ in range(checkpointer.resume(), 3):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
            assert checkpointer.steps_done == 3
    assert not recwarn.list


def test_a_parameter_that_trains_in_a_part_of_each_step_alone_is_not_told(tmp_path):
    """As a discriminator does, whose flag is off when the step ends."""
    for steps in (3, 6):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        with Checkpointer(tmp_path, model=model, optimizer=optimizers, base_every=1000) as checkpointer:
            for _ in range(checkpointer.resume(), steps):
                for layer, optimizer in zip(model, optimizers, strict=True):
                    model.requires_grad_(False)
                    layer.requires_grad_(True)
                    model(torch.ones(1, 3)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                checkpointer.step()
                model.requires_grad_(True)
            model[0].requires_grad_(False)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("by", ["at a step", "by the steps done"])
def test_a_parameter_that_trained_and_is_frozen_after_a_resume_is_told(tmp_path, by, save):
    for steps in (6, 9):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        model.weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
                for step in range(checkpointer.resume(), steps):
                    if step == 3 or (step > 3 and by == "by the steps done"):
                        model.weight.requires_grad_(True)
                    model(torch.ones(1, 3)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    checkpointer.step()
                if save:
                    checkpointer.save()
        expected = ["weight trained until the resume"] * (steps == 9 and by == "at a step")
        assert [str(each.message)[:31] for each in told] == expected
