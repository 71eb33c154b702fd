"""Schedules that are moved beside steps: what a base has of them, and what is told."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import holdfast
from support.live_copy import copy_of_live_run
from test_checkpointer_unseen import Loop, same


class Scheduled(Loop):
    """The rate is halved after every second step, or ``often``; ``rates`` are those that steps had."""

    def __init__(self, often=False):
        super().__init__()
        self.often, self.rates = often, []
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def go(self, checkpointer, until, then=lambda: None):
        for i in range(checkpointer.steps_done, until):
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.iterate(i)
            checkpointer.step()
            if self.often or i % 2:
                self.schedule.step()
                then()


@pytest.mark.slow
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("base_every", [1, 1000])
def test_a_schedule_that_is_moved_after_an_epoch_is_in_what_save_and_close_make(
    tmp_path, save, base_every, recwarn
):
    """Of the epoch's last step there may be a base already, that was made beside training."""
    whole, rates = Scheduled(), []
    other, _ = whole.checkpointer(tmp_path / "whole", scheduler=whole.schedule)
    with other:
        whole.go(other, 6)
    for until in (2, 4, 6):
        loop = Scheduled()
        checkpointer, done = loop.checkpointer(
            tmp_path / "run", scheduler=loop.schedule, base_every=base_every
        )
        with checkpointer:
            assert done == until - 2
            if save:
                loop.go(checkpointer, until, lambda at=checkpointer: (at.wait(), at.save()))
                shutil.rmtree(tmp_path / "killed", ignore_errors=True)
                copy_of_live_run(tmp_path / "run", tmp_path / "killed")
            else:
                loop.go(checkpointer, until)
        rates += loop.rates
        if save:  # without what close() would make
            shutil.rmtree(tmp_path / "run")
            shutil.copytree(tmp_path / "killed", tmp_path / "run")
    assert rates == whole.rates == [0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125]
    assert same(loop.state(), whole.state()) and not recwarn


def test_what_save_finds_moved_is_saved_with_the_random_numbers_and_the_place_of_the_step(tmp_path):
    class Counting:
        def __init__(self):
            self.count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    class Places(Counting):
        def __iter__(self):
            return iter(())

    loop, given = Loop(), {"one": Counting(), "place": Places()}
    loader = holdfast.loader(list(torch.arange(64)), batch_size=1)
    checkpointer, _ = loop.checkpointer(tmp_path, also=given, loader=loader)
    with checkpointer:
        batches = iter(loader)
        next(batches)
        loop.go(checkpointer, 1)
        at, shown = loader.state_dict(), torch.get_rng_state()
        next(batches)  # and the batch of the next step is there
        torch.rand(3)
        given["one"].count = given["place"].count = 7
        checkpointer.save()
    again, fresh = Loop(), {"one": Counting(), "place": Places()}
    place = holdfast.loader(list(torch.arange(64)), batch_size=1)
    other, done = again.checkpointer(tmp_path, also=fresh, loader=place)
    other.close()
    assert done == 1 and (fresh["one"].count, fresh["place"].count) == (7, 0)
    assert place.state_dict() == at and torch.equal(torch.get_rng_state(), shown)


def test_a_schedule_that_is_moved_after_every_step_is_told_once(tmp_path):
    loop = Scheduled(often=True)
    checkpointer, _ = loop.checkpointer(tmp_path, scheduler=loop.schedule)
    with checkpointer:
        with pytest.warns(
            UserWarning, match=r"moved between every step\(\).*call step\(\) last in it"
        ) as told:
            loop.go(checkpointer, 5)
        assert len(told) == 1


# Wrappers


class Epochs:
    """Three batches an epoch; who resumes after the last of them comes to the epoch's end again."""

    def __init__(self):
        self.epoch = self.count = 0

    def __iter__(self):
        while self.count < 3:
            self.count += 1
            yield torch.ones(1, 3)
        self.epoch, self.count = self.epoch + 1, 0

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


@pytest.mark.slow
@pytest.mark.parametrize("save", [False, True])
def test_beside_a_place_in_epochs_a_schedule_is_not_moved_twice_at_the_end_of_one(tmp_path, save):
    rates = []
    for root, epochs in (("whole", 4), ("cut", 2), ("cut", 4)):
        model, data = nn.Linear(3, 2), Epochs()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        things = {"model": model, "optimizer": optimizer, "scheduler": schedule, "loader": data}
        with holdfast.Checkpointer(tmp_path / root, **things) as checkpointer:
            checkpointer.resume()
            while data.epoch < epochs:
                for batch in data:
                    model(batch).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    checkpointer.step()
                schedule.step()
                if save:
                    checkpointer.save()
        rates.append((optimizer.param_groups[0]["lr"], checkpointer.steps_done))
    assert rates == [(0.0625, 12), (0.25, 6), (0.0625, 12)]


@pytest.mark.slow
def test_a_schedule_that_is_moved_before_step_in_each_micro_batch_is_not_told(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with holdfast.Checkpointer(
        tmp_path, model=model, optimizer=optimizer, scheduler=schedule
    ) as checkpointer:
        checkpointer.resume()
        for i in range(13):
            model(torch.ones(1, 3)).sum().backward()
            if i % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            checkpointer.step()
        assert checkpointer.steps_done == 5
