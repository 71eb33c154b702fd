"""What scripts do beside the optimizer's step, and keep beside its state: it is in the run, or it is told."""

from __future__ import annotations

import copy
import os
import random
import threading
from collections import Counter, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint.capture import mutation_check, optimizer_hooks
from holdfast.errors import BadInput, EngineFailed, ModelNotSupported, OptimizerNotSupported
from holdfast.events import read_events
from holdfast.state import module_places
from holdfast.state.encoding import decode, encode
from support.live_copy import copy_of_live_run


class Loop:
    """A model, its optimizer, and an iteration by number; ``then`` is done after the optimizer's step."""

    def __init__(self, model=None, optimizer=None, then=lambda loop, i: None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) if model is None else model()
        kind = (lambda p: torch.optim.AdamW(p, lr=0.05)) if optimizer is None else optimizer
        self.optimizer = kind(self.model.parameters())
        self.then = then

    def iterate(self, i):
        data = torch.randn(4, 4, generator=torch.Generator().manual_seed(i))
        self.model(data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.then(self, i)

    def go(self, checkpointer, until):
        while checkpointer.steps_done < until:
            self.iterate(checkpointer.steps_done)
            checkpointer.step()

    def checkpointer(self, run, **options):
        made = holdfast.Checkpointer(run, model=self.model, optimizer=self.optimizer, **options)
        return made, made.resume()

    def state(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()["state"]))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return all(map(same, a, b)) if isinstance(a, tuple) else a == b


def recovered(tmp_path, make, steps, options=lambda loop: {}):
    """The loop after ``steps``, and one that resumed from what a kill at that moment leaves."""
    loop = make()
    checkpointer, _ = loop.checkpointer(tmp_path / "run", **options(loop))
    with checkpointer:
        loop.go(checkpointer, steps)
        checkpointer.wait()
        assert checkpointer.durable_step == steps
        copy_of_live_run(tmp_path / "run", tmp_path / "killed")
    again = make()
    other, done = again.checkpointer(tmp_path / "killed", **options(again))
    other.close()
    assert done == steps
    return loop, again


# When a base may be made


def test_no_base_is_made_inside_of_step(tmp_path):
    told = []

    def update():
        with pytest.raises(BadInput, match=r"Wait until step\(\) has returned"):
            checkpointer.save()
        told.append(checkpointer.steps_done)

    loop = Loop()
    checkpointer, _ = loop.checkpointer(tmp_path, after_update=update)
    with checkpointer:
        loop.go(checkpointer, 3)
    assert told == [0, 1, 2]


def test_no_base_is_made_by_another_thread_than_the_one_that_trains(tmp_path):
    loop, told = Loop(), []

    def save():
        try:
            checkpointer.save()
        except BadInput as error:
            told.append(str(error))

    checkpointer, _ = loop.checkpointer(tmp_path)
    with checkpointer:
        loop.go(checkpointer, 2)
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        checkpointer.save()
    assert len(told) == 1 and "by the thread that called resume()" in told[0]


def test_an_optimizer_has_one_checkpointer(tmp_path):
    loop = Loop()
    first, _ = loop.checkpointer(tmp_path / "one")
    with first, pytest.raises(BadInput, match="recorded by another Checkpointer"):
        loop.checkpointer(tmp_path / "two")
    second, _ = loop.checkpointer(tmp_path / "three")
    second.close()


@pytest.mark.parametrize("codec", [holdfast.Exact(), holdfast.TopK(0.1)])
def test_a_fork_of_the_process_neither_writes_nor_waits(tmp_path, codec):
    loop = Loop()
    checkpointer, _ = loop.checkpointer(tmp_path, codec=codec)
    with checkpointer:
        loop.go(checkpointer, 3)
        child = os.fork()
        if child == 0:
            try:
                checkpointer.close()
                checkpointer.step()
            except EngineFailed as error:
                os._exit(7 if "fork" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        loop.go(checkpointer, 5)
    again = Loop()
    other, done = again.checkpointer(tmp_path, codec=codec)
    other.close()
    assert done == 5 and same(again.state(), loop.state())


def test_what_a_forward_pass_left_that_was_broken_off_is_in_no_base(tmp_path):
    """With residuals closing makes one, and buffers have moved on since the step."""
    loop = Loop(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    checkpointer, _ = loop.checkpointer(tmp_path, codec=holdfast.TopK(0.1))
    loop.go(checkpointer, 4)
    state = loop.state()
    loop.model(torch.randn(4, 4))  # and here somebody pressed Ctrl-C
    checkpointer.close()
    again = Loop(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with pytest.warns(UserWarning, match="state-exact"):
        other, done = again.checkpointer(tmp_path, codec=holdfast.TopK(0.1))
    other.close()
    assert done == 4 and same(again.state(), state)


# What changes parameters


@pytest.mark.parametrize("codec", [holdfast.Exact(), holdfast.Exact(compress=True)])
def test_a_parameter_that_leaves_its_group(tmp_path, codec):
    def then(loop, i):
        if i == 3:
            loop.optimizer.param_groups[0]["params"] = loop.optimizer.param_groups[0]["params"][2:]

    loop, again = recovered(tmp_path, lambda: Loop(then=then), 9, lambda loop: {"codec": codec})
    assert same(again.model.state_dict(), loop.model.state_dict())


def test_what_a_script_does_to_parameters_after_the_step_is_kept_by_bases_and_told(tmp_path):
    def clamp(loop, i):
        with torch.no_grad():
            loop.model[0].weight.clamp_(-0.1, 0.1)

    with pytest.warns(UserWarning, match=r"0.weight changed otherwise than by a step.*after_update="):
        loop, again = recovered(tmp_path, lambda: Loop(then=clamp), 3)
    assert same(again.state(), loop.state())


def test_what_hooks_of_the_script_change_after_the_optimizer_is_kept_by_bases_and_told(tmp_path):
    """The script's hook was there first."""

    def make():
        loop = Loop()

        @torch.no_grad()
        def pin(*_):
            loop.model[0].weight[0, 0] = 5.0

        loop.optimizer.register_step_post_hook(pin)
        return loop

    with pytest.warns(UserWarning, match="0.weight changed otherwise than by a step"):
        loop, again = recovered(tmp_path, make, 3)
    assert loop.model[0].weight[0, 0] == 5.0 and same(again.state(), loop.state())


def test_what_changes_parameters_between_two_steps_is_kept_by_bases_and_told(tmp_path):
    """A pre-hook, or the script before the forward pass."""

    def make():
        loop = Loop()

        @torch.no_grad()
        def halve(*_):
            loop.model[0].weight[0].mul_(0.5)

        loop.optimizer.register_step_pre_hook(halve)
        return loop

    with pytest.warns(UserWarning, match="0.weight changed otherwise than by a step"):
        loop, again = recovered(tmp_path, make, 3)
    assert same(again.state(), loop.state())


def test_parameters_that_were_loaded_between_two_steps_and_saved_are_not_told(tmp_path, recwarn):
    loop = Loop()
    checkpointer, _ = loop.checkpointer(tmp_path)
    with checkpointer:
        loop.go(checkpointer, 3)
        loop.model.load_state_dict({k: v * 0.5 for k, v in loop.model.state_dict().items()})
        checkpointer.save()
        loop.go(checkpointer, 5)
    again = Loop()
    other, done = again.checkpointer(tmp_path)
    other.close()
    assert done == 5 and same(again.state(), loop.state()) and not recwarn
    assert len(list((tmp_path / "commits").iterdir())) == 2


def test_the_same_as_after_update_is_neither(tmp_path, recwarn):
    def clamping(loop):
        def clamp():
            with torch.no_grad():
                loop.model[0].weight.clamp_(-0.1, 0.1)

        return {"after_update": clamp}

    loop, again = recovered(tmp_path, Loop, 6, clamping)
    assert same(again.state(), loop.state()) and not recwarn
    assert len(list((tmp_path / "run" / "commits").iterdir())) == 1


def test_an_embedding_that_bounds_its_rows_in_the_forward_pass_is_refused(tmp_path):
    loop = Loop(lambda: nn.Sequential(nn.Embedding(3, 4, max_norm=1.0), nn.Linear(4, 4)))
    with pytest.raises(BadInput, match=r"0 has max_norm=1.0, by which its forward pass"):
        loop.checkpointer(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_optimizer_that_was_not_given_is_told_and_then_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(mutation_check, "PATIENCE", 20)
    loop = Loop()
    checkpointer, _ = loop.checkpointer(tmp_path)
    loop.go(checkpointer, 3)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    loop.iterate(3)
    with pytest.warns(UserWarning, match=r"0.weight and 3 others changed otherwise than by a step"):
        checkpointer.step()
    with pytest.raises(BadInput, match="in each of the last 20 iterations none of the optimizers"):
        for i in range(20):
            loop.iterate(4 + i)
            checkpointer.step()
    checkpointer.close(save=False)
    other, done = Loop().checkpointer(tmp_path)
    other.close()
    assert done == 3


def test_weights_that_are_changed_and_put_back_between_two_steps_are_no_error(tmp_path):
    """As where averaged ones are evaluated, in the midst of accumulation."""
    loop = Loop()
    checkpointer, _ = loop.checkpointer(tmp_path)
    with checkpointer:
        loop.go(checkpointer, 3)
        kept = copy.deepcopy(loop.model.state_dict())
        loop.model.load_state_dict({key: value * 0 for key, value in kept.items()})
        loop.model.load_state_dict(kept)
        with pytest.warns(UserWarning, match="changed otherwise"):
            checkpointer.step()
        loop.go(checkpointer, 6)
    again = Loop()
    other, done = again.checkpointer(tmp_path)
    other.close()
    assert done == 6 and same(again.state(), loop.state())


@torch.no_grad()
def reset_rows(loop):
    if loop.optimizer.state:
        loop.optimizer.state[loop.model[0].weight]["exp_avg"][1:3] = 0


def forget(loop):
    loop.optimizer.state.clear()


def load_older(loop):
    if not hasattr(loop, "older"):
        loop.older = copy.deepcopy(loop.optimizer.state_dict())
    loop.optimizer.load_state_dict(loop.older)


@torch.no_grad()
def replace_a_moment(loop):
    if loop.optimizer.state:
        loop.optimizer.state[loop.model[1].bias]["exp_avg"] = torch.ones(4)


STATE_OF_ADAMW = [reset_rows, forget, load_older, replace_a_moment]


@pytest.mark.parametrize("when", ["after", "between"])
@pytest.mark.parametrize("do", STATE_OF_ADAMW)
def test_what_a_script_does_to_an_optimizers_state_is_kept_by_a_base_and_told(tmp_path, do, when):
    """After the step that is the fourth, or between that one's step() and the next step."""

    class Doing(Loop):
        def iterate(self, i):
            if (i, when) == (4, "between"):
                do(self)
            super().iterate(i)
            if (i, when) == (3, "after"):
                do(self)
            elif i == 1 and do is load_older:
                self.older = copy.deepcopy(self.optimizer.state_dict())

    with pytest.warns(UserWarning, match="the state of AdamW changed otherwise than by a step.*save"):
        loop, again = recovered(tmp_path, Doing, 7)
    assert same(again.state(), loop.state())
    assert len(list((tmp_path / "run" / "commits").iterdir())) == 2  # the first, and one for it


def test_an_optimizers_state_that_is_loaded_before_the_first_step_is_in_the_run(tmp_path):
    """As in fine-tuning: what was there before comes from somewhere else than the run."""
    before = Loop()
    for i in range(3):
        before.iterate(i)

    class Loaded(Loop):
        def checkpointer(self, run, **options):
            made, done = super().checkpointer(run, **options)
            if done == 0:
                self.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
            return made, done

    with pytest.warns(UserWarning, match="the state of AdamW changed otherwise"):
        loop, again = recovered(tmp_path, Loaded, 5)
    assert same(again.state(), loop.state())


def swap(loop):
    loop.model[0].weight.data = loop.model[0].weight.data * 0.5


def from_vector(loop):
    vector = nn.utils.parameters_to_vector(loop.model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, loop.model.parameters())


@pytest.mark.parametrize("do", [swap, from_vector])
def test_parameters_that_are_given_other_memory_are_kept_by_a_base_and_told(tmp_path, do):
    class Doing(Loop):
        def iterate(self, i):
            super().iterate(i)
            if i == 3:
                do(self)

    with pytest.warns(UserWarning, match=r"0.weight .*changed otherwise than by a step"):
        loop, again = recovered(tmp_path, Doing, 6)
    assert same(again.state(), loop.state())


@pytest.mark.parametrize("do", [*STATE_OF_ADAMW, swap])
def test_what_was_changed_and_saved_where_there_is_a_base_of_the_step_is_in_another(tmp_path, do, recwarn):
    loop = Loop()
    checkpointer, _ = loop.checkpointer(tmp_path)
    with checkpointer:
        loop.go(checkpointer, 2)
        load_older(loop)
        loop.go(checkpointer, 3)
        checkpointer.save()
        do(loop)
        checkpointer.save()
        state = loop.state()
        bases = {path: path.stat().st_mtime_ns for path in (tmp_path / "commits").iterdir()}
        checkpointer.save()  # of which there is one now
        assert bases == {path: path.stat().st_mtime_ns for path in (tmp_path / "commits").iterdir()}
    again = Loop()
    other, done = again.checkpointer(tmp_path)
    other.close()
    assert done == 3 and same(again.state(), state)
    assert all("the state of AdamW" in str(w.message) for w in recwarn)  # what was not saved


def test_gradients_that_lie_otherwise_in_memory_do_so_in_replay(tmp_path):
    """As those of a backward pass by hand. Sums depend on it, and fused kernels."""

    class ByHand(Loop):
        def iterate(self, i):
            data = torch.randn(40, 30, generator=torch.Generator().manual_seed(i))
            self.model.weight.grad = data.t()
            self.optimizer.step()

    def make():
        model = lambda: nn.Linear(40, 30, bias=False)  # noqa: E731
        return ByHand(model, lambda p: torch.optim.Adafactor(p, lr=0.05))

    loop, again = recovered(tmp_path, make, 3)
    assert same(again.state(), loop.state())


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("updates_after", [False, True])
def test_what_is_multiplied_inside_of_autocast_is_so_in_replay(tmp_path, monkeypatch, updates_after, earlier):
    """Records of an ``earlier`` version do not say so: they are replayed under the autocast of the resume."""
    if earlier:
        known = {"autocast", "autocast_after"}
        monkeypatch.setattr(optimizer_hooks, "OPTIONAL", {*optimizer_hooks.OPTIONAL} - known)

    def cast(needed=True):
        return torch.autocast("cpu", torch.bfloat16, needed, cache_enabled=False)

    class Cast(Loop):
        def go(self, checkpointer, until):
            with cast():
                super().go(checkpointer, until)

        def checkpointer(self, run, **options):
            with cast(earlier):
                return super().checkpointer(run, **options)

        @torch.no_grad()
        def project(self):
            weight = self.model[0].weight
            weight.sub_(weight @ weight.T @ weight, alpha=0.01)

    def make():
        return Cast(optimizer=None if updates_after else lambda p: torch.optim.Adafactor(p, lr=0.05))

    options = (lambda loop: {"after_update": loop.project}) if updates_after else lambda loop: {}
    loop, again = recovered(tmp_path, make, 3, options)
    assert same(again.state(), loop.state())


def test_parameters_of_16_bits_are_replayed_with_the_threads_of_training(tmp_path):
    """Where the piece of a thread ends, an element is rounded otherwise than in a vector."""

    class Half(Loop):
        def __init__(self):
            super().__init__(lambda: nn.Linear(1, 100_003).bfloat16(), lambda p: torch.optim.SGD(p, lr=0.01))

        def iterate(self, i):
            for parameter in self.model.parameters():
                shape, chance = parameter.shape, torch.Generator().manual_seed(i)
                parameter.grad = torch.randn(shape, generator=chance).bfloat16()
            self.optimizer.step()

    def resume(run):
        loop = Half()
        other, done = loop.checkpointer(run)
        other.close()
        return loop, done

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        loop = Half()
        checkpointer, _ = loop.checkpointer(tmp_path)
        with checkpointer:
            loop.go(checkpointer, 8)
        torch.set_num_threads(1)
        with pytest.warns(UserWarning, match=r"trained with torch.set_num_threads\(3\)"):
            again, done = resume(tmp_path)
    finally:
        torch.set_num_threads(before)
    assert done == 8 and same(again.state(), loop.state())


class Rows(Loop):
    """Few rows of the first parameter have a gradient, so that a change of another may stay unseen by fingerprints."""

    def __init__(self):
        super().__init__(lambda: nn.Embedding(500, 16))

    def iterate(self, i):
        self.model(torch.arange(i, i + 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def change(self):
        """No counter shows it."""
        self.model.weight.data[300] = 7.0


def test_what_nothing_counts_is_saved_where_there_is_a_base_of_the_step(tmp_path):
    loop = Rows()
    checkpointer, _ = loop.checkpointer(tmp_path / "run")  # which makes a base of step 0
    with checkpointer:
        loop.change()
        checkpointer.save()
        loop.go(checkpointer, 2)
        checkpointer.wait()
        copy_of_live_run(tmp_path / "run", tmp_path / "killed")
    again = Rows()
    other, done = again.checkpointer(tmp_path / "killed")
    other.close()
    assert done == 2 and same(again.state(), loop.state())


@pytest.mark.parametrize("closes", [False, True])
def test_no_records_lead_past_a_change_whose_base_is_gone(tmp_path, closes):
    """The base that ``save`` made after it, and not the step before, is what further records follow."""
    loop = Rows()
    checkpointer, _ = loop.checkpointer(tmp_path, base_every=100)
    with checkpointer:
        loop.go(checkpointer, 3)
        before = loop.state()
        loop.change()
        checkpointer.save()
        loop.go(checkpointer, 3 if closes else 6)
    if closes:
        loop = Rows()
        checkpointer, _ = loop.checkpointer(tmp_path, base_every=100)
        with checkpointer:
            loop.go(checkpointer, 6)
    [manifest] = (tmp_path / "commits").glob("step-000000000003.*")
    again = Rows()
    other, done = again.checkpointer(tmp_path)
    other.close()
    assert done == 6 and same(again.state(), loop.state())
    manifest.unlink()
    again = Rows()
    with pytest.warns(UserWarning, match="not the one that step 4 was trained from"):
        other, done = again.checkpointer(tmp_path)
    other.close()
    assert done == 3 and same(again.state(), before)


def test_iterations_in_which_nobody_steps_are_told_and_then_refused(tmp_path, monkeypatch):
    """Descent by hand, through ``.data``."""
    monkeypatch.setattr(mutation_check, "HINT", 5)
    monkeypatch.setattr(mutation_check, "PATIENCE", 20)
    loop = Loop()
    checkpointer, _ = loop.checkpointer(tmp_path)
    loop.go(checkpointer, 2)
    with pytest.warns(
        UserWarning, match="in the last 5 iterations none of the optimizers .* Give it the one whose"
    ):
        for _ in range(5):
            loop.model[0].weight.data.mul_(0.99)
            checkpointer.step()
    with pytest.raises(BadInput, match="in each of the last 20 iterations none of the optimizers"):
        for _ in range(15):
            loop.model[0].weight.data.mul_(0.99)
            checkpointer.step()
    checkpointer.close(save=False)


class Falling:
    """A scaler that finds an overflow in every iteration, as of a model that has diverged."""

    scale = 2.0**100

    def get_scale(self):
        return self.scale

    def update(self):
        self.scale /= 2

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"]


def test_accumulation_and_steps_that_a_scaler_skips_are_no_iterations_without_a_step(
    tmp_path, monkeypatch, recwarn
):
    monkeypatch.setattr(mutation_check, "HINT", 5)
    monkeypatch.setattr(mutation_check, "PATIENCE", 20)
    loop, scaler = Loop(), Falling()
    checkpointer, _ = loop.checkpointer(tmp_path, scaler=scaler)
    with checkpointer:
        for _ in range(40):
            scaler.update()
            checkpointer.step()
        assert checkpointer.steps_done == 40
        for _ in range(19):
            loop.model(torch.ones(4, 4)).sum().backward()
            checkpointer.step()
        loop.go(checkpointer, 41)
    assert not recwarn


def test_steps_that_are_never_recorded_are_told(tmp_path):
    """A pre-hook that is registered in every iteration runs after what copies gradients."""

    def then(loop, i):
        loop.hook.remove()

    loop = Loop(then=then)
    checkpointer, _ = loop.checkpointer(tmp_path)
    with checkpointer, pytest.warns(UserWarning, match="none of the last 4 steps could be recorded"):
        for i in range(6):
            loop.hook = loop.optimizer.register_step_pre_hook(lambda *_: None)
            loop.iterate(i)
            checkpointer.step()


# Buffers


def test_buffers_of_averages_that_a_forward_pass_changes(tmp_path):
    def make():
        loop = Loop(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        loop.teacher = copy.deepcopy(loop.model).requires_grad_(False)
        loop.then = lambda loop, i: loop.teacher(torch.ones(4, 4) * i)
        return loop

    def averaging(loop):
        def update():
            for mean, now in zip(loop.teacher.parameters(), loop.model.parameters(), strict=True):
                mean.mul_(0.9).add_(now.detach(), alpha=0.1)

        return {"after_update": update, "averages": loop.teacher}

    loop, again = recovered(tmp_path, make, 7, averaging)
    assert same(again.state(), loop.state())
    assert same(again.teacher.state_dict(), loop.teacher.state_dict())


class Normed(nn.Module):
    """Makes its buffer in the first forward pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", None)

    def forward(self, x):
        mean = x.mean(0).detach()
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return self.linear(x - self.mean)


def half_trained():
    """Of which the second layer is frozen, and known to no optimizer that is given what trains."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    return model


def other_weight(model, layer):
    model[layer].weight = nn.Parameter(torch.full((4, 4), 2.0), requires_grad=not layer)


def other_layer(model, layer):
    model[layer] = nn.Linear(4, 4).requires_grad_(not layer)


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("change", [other_weight, other_layer])
def test_frozen_parameters_that_are_replaced_are_in_the_run(tmp_path, change, saves, every):
    """By another object, which is neither in a record nor known to the optimizer; at a step, or before save()."""

    def made():
        return Loop(half_trained, lambda p: torch.optim.AdamW([each for each in p if each.requires_grad]))

    loop = made()
    checkpointer, _ = loop.checkpointer(tmp_path, every=every)
    with checkpointer:
        loop.go(checkpointer, 3)
        if not saves:
            loop.iterate(3)
        change(loop.model, 1)
        with pytest.warns(UserWarning, match=r"parameters 1.weight.* became another object"):
            checkpointer.save() if saves else checkpointer.step()
        loop.go(checkpointer, 5)
    again = made()
    other, done = again.checkpointer(tmp_path)
    other.close()
    assert done == 5 and same(again.state(), loop.state())


def bases(run):
    return [event for event in read_events(run / "events.jsonl") if event["event"] == "base"]


def pooled(loop, i):
    loop.model.pool = nn.Identity()


def wrapped_anew(loop, i):
    """The frozen layer is in another module, whose parameters are the same objects."""
    anew = nn.Linear(4, 4)
    anew.weight, anew.bias = loop.model[1].weight, loop.model[1].bias
    loop.model[1] = anew


def weighted_loss(loop, i):
    """Its weights are a buffer, in another module at each step."""
    loop.model.loss = nn.CrossEntropyLoss(weight=torch.full((2,), float(i)))


@pytest.mark.parametrize("then", [pooled, wrapped_anew, weighted_loss])
def test_modules_that_are_set_anew_leave_every_step_a_record(tmp_path, then, recwarn):
    def made():
        loop = Loop(
            half_trained, lambda p: torch.optim.AdamW([each for each in p if each.requires_grad]), then
        )
        loop.model.forward = lambda x: loop.model[1](loop.model[0](x))
        then(loop, 0)
        return loop

    loop, again = recovered(tmp_path, made, 6)
    assert same(again.state(), loop.state()) and not recwarn
    assert len(bases(tmp_path / "run")) == 1


def test_parameters_that_are_replaced_at_every_step_are_told_once(tmp_path, recwarn):
    def then(loop, i):
        loop.model[1] = copy.deepcopy(loop.model[1])

    loop, again = recovered(
        tmp_path,
        lambda: Loop(
            half_trained, lambda p: torch.optim.AdamW([each for each in p if each.requires_grad]), then
        ),
        3,
    )
    assert same(again.state(), loop.state()) and len(bases(tmp_path / "run")) > 1
    assert [str(each.message)[:60] for each in recwarn] == [
        "of the model's parameters 1.weight, 1.bias became another object"[:60]
    ]


def test_modules_of_a_large_model_are_compared_every_few_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(module_places, "MODULES_EACH_STEP", 1)  # of a model of three
    loop = Loop(half_trained, lambda p: torch.optim.AdamW([each for each in p if each.requires_grad]))
    checkpointer, _ = loop.checkpointer(tmp_path)
    with checkpointer:
        loop.go(checkpointer, 1)
        other_weight(loop.model, 1)
        loop.go(checkpointer, 2)
        assert len(bases(tmp_path)) == 1
        with pytest.warns(UserWarning, match=r"parameters 1.weight became another object"):
            loop.go(checkpointer, 3)
        loop.go(checkpointer, 4)
        other_weight(loop.model, 1)
        checkpointer.save()  # which looks at once
    assert [event["step"] for event in bases(tmp_path)] == [0, 3, 4]


@pytest.mark.parametrize("change", [other_weight, other_layer])
def test_trained_parameters_that_are_replaced_are_an_error(tmp_path, change):
    """The optimizer goes on updating those that the model does not have any more."""
    loop = Loop(half_trained)
    checkpointer, _ = loop.checkpointer(tmp_path)
    with pytest.raises(OptimizerNotSupported, match="is not a parameter of the model"), checkpointer:
        loop.go(checkpointer, 2)
        change(loop.model, 0)
        loop.go(checkpointer, 3)


def test_a_buffer_that_comes_into_being_is_in_the_run_and_told(tmp_path):
    loop = Loop(Normed)
    checkpointer, _ = loop.checkpointer(tmp_path)
    with checkpointer, pytest.warns(UserWarning, match="mean came into being"):
        loop.go(checkpointer, 4)
    again = Loop(Normed)
    with pytest.raises(holdfast.HoldfastError, match="run a forward pass before the Checkpointer is made"):
        again.checkpointer(tmp_path)
    with torch.no_grad():
        again.model(torch.zeros(4, 4))
    other, done = again.checkpointer(tmp_path)
    other.close()
    assert done == 4 and same(again.state(), loop.state())


def test_a_buffer_that_goes_is_told(tmp_path):
    loop = Loop(lambda: Odd(torch.ones(4)), then=lambda loop, i: setattr(loop.model, "odd", None))
    checkpointer, _ = loop.checkpointer(tmp_path)
    with checkpointer, pytest.warns(UserWarning, match="odd went after the run began"):
        loop.go(checkpointer, 3)
    again = Loop(lambda: Odd(None))
    other, done = again.checkpointer(tmp_path)
    other.close()
    assert done == 3 and same(again.state(), loop.state())


class Odd(nn.Linear):
    def __init__(self, buffer):
        super().__init__(4, 4)
        self.register_buffer("odd", buffer)


@pytest.mark.parametrize(
    "model, match",
    [
        (lambda: nn.Sequential(nn.LazyLinear(4)), "0.weight has no shape yet"),
        (lambda: Odd(torch.zeros(1).expand(4)), "buffer odd is expanded"),
        (lambda: nn.Linear(3, 2, device="meta"), r"parameter weight is on meta.*model.to_empty"),
    ],
)
def test_models_that_cannot_be_put_back_are_refused(tmp_path, model, match):
    loop = Loop(model)
    with pytest.raises((ModelNotSupported, BadInput), match=match):
        loop.checkpointer(tmp_path / "run")
    assert not (tmp_path / "run").exists()


# State that is kept elsewhere


class Own(torch.optim.Optimizer):
    """Keeps a tensor under ``slot``."""

    def __init__(self, parameters, slot="mean"):
        super().__init__(parameters, {"lr": 0.1})
        self.slot = slot

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault(self.slot, torch.zeros_like(parameter))
            parameter.sub_(mean.mul_(0.9).add_(parameter.grad), alpha=0.1)


@pytest.mark.parametrize("slot", ["param", "buffer", "residual", "subspace", "a/b", 3])
def test_state_under_a_name_that_commits_need_is_refused(tmp_path, slot):
    loop = Loop(optimizer=lambda parameters: Own(parameters, slot))
    checkpointer, _ = loop.checkpointer(tmp_path)
    with pytest.raises(BadInput, match=f"Own keeps state under the name {slot!r}"), checkpointer:
        loop.go(checkpointer, 1)


def test_after_update_is_told_in_replay_how_many_steps_are_done(tmp_path):
    def counting(loop):
        def update():
            if loop.run.steps_done % 3 == 0:
                with torch.no_grad():
                    loop.model[1].bias.mul_(0.5)

        return {"after_update": update}

    class Told(Loop):
        def checkpointer(self, run, **options):
            self.run = holdfast.Checkpointer(run, model=self.model, optimizer=self.optimizer, **options)
            return self.run, self.run.resume()

    loop, again = recovered(tmp_path, Told, 7, counting)
    assert same(again.state(), loop.state())


@pytest.mark.slow
def test_a_schedule_by_milestones_goes_on(tmp_path):
    """Its state has a Counter."""

    def make():
        loop = Loop()
        loop.schedule = torch.optim.lr_scheduler.MultiStepLR(loop.optimizer, [2, 2, 5])
        loop.then = lambda loop, i: loop.schedule.step()
        return loop

    loop, again = recovered(tmp_path, make, 4, lambda loop: {"scheduler": loop.schedule})
    assert again.schedule.milestones == Counter({2: 2, 5: 1}) and type(again.schedule.milestones) is Counter
    assert again.optimizer.param_groups[0]["lr"] == loop.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "value",
    [np.array(5.0), np.array(3), np.float32(0.1), np.arange(3)[::-1], np.zeros((0, 3)), np.array([True])],
)
def test_numbers_of_numpy_come_back_as_they_were(value):
    found = decode(encode(value))
    assert type(found) is type(value) and found.dtype == value.dtype and found.shape == value.shape
    assert np.array_equal(found, value)


@pytest.mark.parametrize(
    "value",
    [namedtuple("Pair", "a b")(1, 2), np.array(["a"]), np.datetime64("2020"),
     torch.ones(1, dtype=torch.complex128)],
)  # fmt: skip
def test_what_would_come_back_as_something_else_is_refused(value):
    with pytest.raises(BadInput, match=r"loader holds a .*cannot be stored by value"):
        encode(value, "loader")


# Storage


class Large:
    """Something whose state is larger than the model's."""

    def __init__(self):
        self.held = list(range(50_000))

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state):
        self.held = state["held"]


@pytest.mark.slow
def test_storage_counts_what_a_script_keeps(tmp_path):
    loop = Loop()
    checkpointer, _ = loop.checkpointer(tmp_path, also={"large": Large()}, storage="4MiB", base_every=50)
    most = 0
    with checkpointer:
        for until in range(1, 60):
            loop.go(checkpointer, until)
            files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
            most = max(most, sum(path.stat().st_size for path in files if path.exists()))
    assert 3 << 19 < most <= 4 << 20


@pytest.mark.parametrize("kilobytes", [300, 380, 460])
def test_a_smaller_storage_than_the_run_takes_removes_bases_and_goes_on(tmp_path, kilobytes):
    def wide():
        return Loop(lambda: nn.Linear(64, 64))

    def iterate(loop, checkpointer):
        loop.model(torch.randn(2, 64)).square().mean().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        checkpointer.step()

    loop = wide()
    checkpointer, _ = loop.checkpointer(tmp_path, keep=holdfast.Keep(last=6), base_every=4)
    with checkpointer:
        for _ in range(30):
            iterate(loop, checkpointer)
    loop = wide()
    checkpointer, done = loop.checkpointer(
        tmp_path, keep=holdfast.Keep(last=6), base_every=4, storage=kilobytes << 10
    )
    with checkpointer:
        for _ in range(20):
            iterate(loop, checkpointer)
    assert done == 30 and checkpointer.steps_done == 50


# What a step is given, and what it draws


class Noisy(torch.optim.Optimizer):
    """Langevin dynamics: gradients ``bs`` times, and noise from a global generator."""

    def __init__(self, parameters, noise):
        super().__init__(parameters, {"lr": 0.1})
        self.noise = noise

    @torch.no_grad()
    def step(self, closure=None, bs=1.0):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad * bs + self.noise(parameter), alpha=0.1)


NOISE = {
    "torch": torch.randn_like,
    "numpy": lambda p: torch.from_numpy(np.random.standard_normal(p.shape)).to(p),
    "python": lambda p: torch.full_like(p, random.random()),
}


def drawing(loop, i):
    """As dropout does, which a replay does not."""
    torch.rand(3)


@pytest.mark.parametrize("noise", ["torch", "numpy", "python"])
def test_random_numbers_that_an_optimizer_draws_are_drawn_again_in_replay(tmp_path, noise):
    loop, again = recovered(tmp_path, lambda: Loop(None, lambda p: Noisy(p, NOISE[noise]), drawing), 6)
    assert len(list((tmp_path / "run" / "commits").iterdir())) == 1
    assert same(again.state(), loop.state())


def test_random_numbers_that_after_update_draws_are_drawn_again_in_replay(tmp_path):
    def noisy(loop):
        @torch.no_grad()
        def noise():
            loop.model[0].weight.add_(torch.randn(4, 4))

        return {"after_update": noise}

    loop, again = recovered(tmp_path, lambda: Loop(then=drawing), 6, noisy)
    assert same(again.state(), loop.state())


def test_after_a_replay_that_draws_the_run_draws_as_it_did(tmp_path):
    def make():
        return Loop(optimizer=lambda p: Noisy(p, torch.randn_like))

    loop = make()
    first, _ = loop.checkpointer(tmp_path)
    with first:
        loop.go(first, 4)
        shown = torch.get_rng_state()
    again = make()
    other, _ = again.checkpointer(tmp_path)
    other.close()
    assert torch.equal(torch.get_rng_state(), shown)


@pytest.mark.parametrize("given", [((), {"bs": 4.0}), ((None, 4), {}), ((None,), {"bs": 4})])
def test_what_a_step_is_given_it_is_given_in_replay(tmp_path, given):
    def make():
        loop = Loop(optimizer=lambda p: Noisy(p, torch.zeros_like))
        step, (args, named) = loop.optimizer.step, given
        loop.optimizer.step = lambda: step(*args, **named)
        return loop

    loop, again = recovered(tmp_path, make, 5)
    assert same(again.state(), loop.state())


def test_what_no_record_holds_of_what_a_step_is_given_is_refused(tmp_path):
    loop = Loop(optimizer=lambda p: Noisy(p, torch.zeros_like))
    checkpointer, _ = loop.checkpointer(tmp_path)
    loop.model(torch.ones(4, 4)).sum().backward()
    before = loop.state()
    with pytest.raises(BadInput, match=r"step\(\) was given a Tensor.*tensor.item\(\)"), checkpointer:
        loop.optimizer.step(bs=torch.ones(4, 4))
    assert same(loop.state(), before)


# Schedules


class Wrapping(torch.optim.Optimizer):
    """As Lookahead and SAM: what it wraps has the state."""

    def __init__(self, parameters, how):
        inner = torch.optim.AdamW(parameters)
        super().__init__(inner.param_groups, {})
        if how == "attribute":
            self.base_optimizer = inner
        elif how == "list":
            self.inner = [inner]
        else:
            self.inner = lambda: inner
        self.get = lambda: inner

    def step(self, closure=None):
        self.get().step()

    def state_dict(self):
        return self.get().state_dict()


@pytest.mark.parametrize("how", ["attribute", "list"])
def test_an_optimizer_around_another_that_has_the_state_is_refused(tmp_path, how):
    loop = Loop(optimizer=lambda parameters: Wrapping(parameters, how))
    with pytest.raises(BadInput, match=r"Wrapping wraps a AdamW .* Give the one inside"):
        loop.checkpointer(tmp_path / "run")
    assert not (tmp_path / "run").exists()


class InBackward(torch.optim.Optimizer):
    """Updates each parameter when its gradient is there, as LOMO does."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        for parameter in self.param_groups[0]["params"]:
            parameter.register_post_accumulate_grad_hook(self._update)

    @torch.no_grad()
    def _update(self, parameter):
        parameter.add_(parameter.grad, alpha=-0.1)


def test_an_optimizer_without_a_step_is_refused(tmp_path):
    """Every start would begin anew at step 0."""
    with pytest.raises(BadInput, match="InBackward has no step"):
        Loop(optimizer=InBackward).checkpointer(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_optimizer_whose_state_is_found_elsewhere_is_refused_after_the_first_step(tmp_path):
    loop = Loop(optimizer=lambda parameters: Wrapping(parameters, "hidden"))
    checkpointer, _ = loop.checkpointer(tmp_path)
    with pytest.raises(BadInput, match=r"Wrapping keeps its state elsewhere"), checkpointer:
        loop.go(checkpointer, 1)


def test_an_optimizer_around_others_whose_state_it_shares_is_taken(tmp_path, recwarn):
    def joined(parameters):
        one, *more = parameters
        return holdfast.optim.Joined(torch.optim.AdamW([one]), torch.optim.AdamW(more))

    loop, again = recovered(tmp_path, lambda: Loop(optimizer=joined), 4)
    assert same(again.state(), loop.state()) and not recwarn
