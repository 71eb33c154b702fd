"""The checkpointer where something goes wrong half way, or is called at another moment than was meant: no step that it
calls durable is lost, none comes back otherwise, and nothing hangs."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import holdfast
from checkpoint.loops import cut_small, make, same
from holdfast.checkpoint.compression.codecs import Exact
from holdfast.checkpoint.compression.lossy import TopK
from holdfast.checkpointer import Checkpointer
from holdfast.cli.diff import diff
from holdfast.errors import BadInput, DiskFull, EngineFailed, RunMismatch, WriterHung
from holdfast.io.queue import Throttle
from holdfast.store.run_store import LocalStore
from support.live_copy import copy_of_live_run
from support.warm_python import environment_of, run_python
from test_checkpointer import ADAMW, go_on, reference, start


def of(root, model, optimizer, **options):
    """A checkpointer of ``model``, resumed, and the steps that it has."""
    checkpointer = Checkpointer(root, model=model, optimizer=optimizer, **options)
    return checkpointer, checkpointer.resume()


def killed(root):
    """What a process that is killed now leaves, elsewhere."""
    copy = root.with_name(root.name + "-killed")
    shutil.rmtree(copy, ignore_errors=True)
    return copy_of_live_run(root, copy)


def iterate(model, optimizer, checkpointer):
    model(torch.randn(2, 3)).pow(2).mean().backward()
    optimizer.step()
    model.zero_grad()
    checkpointer.step()


# Steps that are called durable


@pytest.mark.parametrize("retain", [1, 2])
def test_the_segment_that_is_appended_to_is_not_pruned(tmp_path, retain):
    states, _ = reference(9, "")
    loop, checkpointer = start(tmp_path / "run", "", keep=holdfast.Keep(retain))
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 5)
        for _ in range(2):  # bases of steps of which there are no records
            checkpointer.wait()
            checkpointer._backend.pace.gap = True
            loop.iteration(checkpointer.steps_done, checkpointer.step)
        go_on(loop, checkpointer, 9)
        checkpointer.wait()
        assert checkpointer.durable_step == 9
        other, again = start(killed(tmp_path / "run"), "")
        with again:
            assert again.resume() == 9
            assert same(other.state(), states[9])


class Unstorable:
    """A schedule that cannot be stored while ``bad``."""

    bad = False

    def state_dict(self):
        return {"x": object() if self.bad else 1}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("how", ["schedule", "interrupt", "full"])
def test_after_an_error_in_a_step_nothing_later_is_called_durable(tmp_path, monkeypatch, how):
    schedule, interrupt = Unstorable(), []
    loop = make(ADAMW)
    checkpointer, _ = of(
        tmp_path, loop.model, loop.optimizers, scheduler=schedule,
        after_update=lambda: signal.raise_signal(signal.SIGINT) if interrupt else None,
    )  # fmt: skip
    go_on(loop, checkpointer, 4)
    if how == "schedule":
        schedule.bad = True
    elif how == "interrupt":
        interrupt.append(True)
    else:
        monkeypatch.setattr(checkpointer._optimizer_hooks, "changed", True)
        monkeypatch.setattr(checkpointer._backend.pace.bases, "begin", full)
    with pytest.raises((BadInput, KeyboardInterrupt, DiskFull)):
        loop.iteration(4, checkpointer.step)
    schedule.bad, interrupt[:] = False, []
    monkeypatch.undo()
    with pytest.raises((BadInput, EngineFailed, DiskFull)):
        loop.iteration(5, checkpointer.step)
    assert checkpointer.durable_step <= 4
    checkpointer.close()
    other = make(ADAMW)
    again, steps = of(
        tmp_path, other.model, other.optimizers, scheduler=Unstorable(), after_update=lambda: None
    )
    again.close()
    assert steps == 4


def full(*_, **__):
    raise DiskFull("no space left")


def test_an_update_that_failed_half_way_is_followed_by_a_base(tmp_path):
    loop, checkpointer = start(tmp_path / "run", "")
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        state = loop.optimizers[0].state[loop.model.first.weight]
        kept = state.pop("exp_avg")
        with pytest.raises(KeyError), pytest.warns(UserWarning, match="the state of AdamW changed otherwise"):
            loop.iteration(3, checkpointer.step)
        state["exp_avg"] = kept
        for i in range(4, 7):
            loop.iteration(i, checkpointer.step)
        checkpointer.wait()
        other, again = start(killed(tmp_path / "run"), "")
        with again:
            assert again.resume() == checkpointer.durable_step == 6
            assert same(other.model.state_dict(), loop.model.state_dict())


class Derived(torch.optim.AdamW):
    """As people derive: its step calls the one that it overrides, which has hooks too."""

    def step(self, closure=None):
        return super().step(closure)


def test_an_optimizer_whose_step_calls_that_of_its_class_steps_once(tmp_path):
    ADAMW([nn.Parameter(torch.ones(1))])  # hooks the class
    loop = make(partial(Derived, lr=0.01))
    with Checkpointer(tmp_path, model=loop.model, optimizer=loop.optimizers) as checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 5)
    other = make(partial(Derived, lr=0.01), seed=1)
    again, steps = of(tmp_path, other.model, other.optimizers)
    again.close()
    assert steps == 5 and same(other.model.state_dict(), loop.model.state_dict())


def raises(loop, i, step):
    """An iteration whose update raises."""
    state = loop.optimizers[0].state[loop.model.first.weight]
    kept = state.pop("exp_avg")
    with pytest.raises(KeyError):
        loop.iteration(i, step)
    state["exp_avg"] = kept


@pytest.mark.filterwarnings("ignore:the state of .* changed otherwise")
@pytest.mark.parametrize("times", [1, 20])  # less and more than there are slots
@pytest.mark.parametrize("optimizer", [ADAMW, partial(Derived, lr=0.01)])
def test_an_update_that_raised_and_is_tried_again_clips_as_any_other(tmp_path, optimizer, times):
    ADAMW([nn.Parameter(torch.ones(1))])  # hooks the class
    plain = make(optimizer, "clip")  # to a norm of 0.1
    states = []
    for i in range(8):
        for _ in range(times if i == 4 else 0):
            raises(plain, i, lambda: None)
        plain.iteration(i, lambda: None)
        states.append(plain.state())
    loop = make(optimizer)
    with Checkpointer(
        tmp_path / "run", model=loop.model, optimizer=loop.optimizers, clip_norm=0.1
    ) as checkpointer:
        checkpointer.resume()
        for i in range(8):
            for _ in range(times if i == 4 else 0):
                raises(loop, i, checkpointer.step)
            loop.iteration(i, checkpointer.step)
            assert same(loop.state(), states[i])
        checkpointer.wait()
        other = make(optimizer, seed=1)
        again, steps = of(killed(tmp_path / "run"), other.model, other.optimizers)
        again.close()
    assert steps == 8 and same(other.state()["slots"], loop.state()["slots"])
    assert same(other.model.state_dict(), loop.model.state_dict())


@pytest.mark.filterwarnings("ignore:the state of .* changed otherwise")
def test_an_update_that_raised_and_is_tried_again_selects_as_any_other(tmp_path):
    loop = make(ADAMW)
    taken = []
    hook = loop.optimizers[0].register_step_post_hook(
        lambda *_: taken.append(int((loop.model.first.weight.grad != 0).sum()))
    )
    with Checkpointer(tmp_path, model=loop.model, optimizer=loop.optimizers, codec=TopK(0.2)) as checkpointer:
        checkpointer.resume()
        for i in range(4):
            loop.iteration(i, checkpointer.step)
        raises(loop, 4, checkpointer.step)
        loop.iteration(5, checkpointer.step)
    hook.remove()
    assert taken[-1] == taken[0] < loop.model.first.weight.numel()


# Numbers


def test_a_base_made_in_mid_accumulation_has_the_position_of_its_step(tmp_path):
    loop = make(ADAMW)
    loader = holdfast.loader(list(torch.arange(64)), batch_size=1)
    checkpointer, _ = of(tmp_path, loop.model, loop.optimizers, loader=loader)
    next(iter(loader))
    loop.iteration(0, checkpointer.step)
    position = loader.state_dict()
    next(iter(loader))
    checkpointer.step()  # nothing was updated
    checkpointer.save()
    checkpointer.close()
    other, fresh = make(ADAMW), holdfast.loader(list(torch.arange(64)), batch_size=1)
    again, steps = of(tmp_path, other.model, other.optimizers, loader=fresh)
    again.close()
    assert steps == 1 and fresh.state_dict() == position


def normed(root, **options):
    """A model with buffers that its forward pass changes, and a checkpointer of it after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer, _ = of(root, model, optimizer, **options)
    for _ in range(2):
        iterate(model, optimizer, checkpointer)
    return model, optimizer, checkpointer


def accumulate(model, checkpointer):
    model(torch.randn(2, 3)).pow(2).mean().backward()
    checkpointer.step()


def has_steps(root):
    """Resumed from there: the steps, and how often the buffers were changed."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    checkpointer, steps = of(root, model, torch.optim.SGD(model.parameters(), lr=0.1))
    checkpointer.close()
    return steps, int(model[1].num_batches_tracked)


@pytest.mark.parametrize("act", ["save", "wait"])
def test_no_base_is_made_of_buffers_that_accumulation_has_changed(tmp_path, act):
    model, optimizer, checkpointer = normed(tmp_path)
    with checkpointer:
        checkpointer._backend.pace.gap = act == "wait"  # which only a base ends
        accumulate(model, checkpointer)
        with pytest.raises(
            BadInput, match="since step 2 have changed buffers, so a base would be of no step"
        ):
            getattr(checkpointer, act)()
        checkpointer._backend.pace.gap = False
        iterate(model, optimizer, checkpointer)
        checkpointer.save()
    assert has_steps(tmp_path) == (3, 4)


def test_closing_a_gap_where_accumulation_has_changed_buffers_tells_what_is_durable(tmp_path):
    model, _, checkpointer = normed(tmp_path)
    checkpointer.wait()
    accumulate(model, checkpointer)
    checkpointer._backend.pace.gap = True  # which only a base ends
    with pytest.warns(UserWarning, match="no base of it: step 2 is durable. Close after"):
        checkpointer.close()
    assert has_steps(tmp_path) == (2, 2)


def test_no_base_is_made_between_an_update_and_its_step(tmp_path):
    loop, checkpointer = start(tmp_path, "")
    checkpointer.resume()
    go_on(loop, checkpointer, 2)
    with pytest.raises(BadInput, match=r"has stepped since step 2, .* Call step\(\) first"):
        loop.iteration(2, checkpointer.save)
    checkpointer._backend.pace.gap = True
    with pytest.raises(BadInput, match=r"has stepped since step 2"):
        checkpointer.wait()
    checkpointer.close()
    states, _ = reference(2, "")
    other, again = start(tmp_path, "")
    with again:
        assert again.resume() == 2
        assert same(other.state(), states[2])


@pytest.mark.parametrize("make_optimizer", [ADAMW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_fused_state_lies_in_memory_as_its_parameter_does(tmp_path, make_optimizer):
    def built(seed):
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        return model, make_optimizer(model.parameters(), fused=True)

    model, optimizer = built(0)
    checkpointer, _ = of(tmp_path, model, optimizer)
    images = torch.randn(6, 2, 3, 5, 5)
    for i in range(3):
        model(images[i]).pow(2).mean().backward()
        optimizer.step()
        model.zero_grad()
        checkpointer.step()
        if i == 1:
            checkpointer.save()
    checkpointer.close()
    other, its = built(1)
    again, steps = of(tmp_path, other, its)
    assert steps == 3 and same(dict(other.state_dict()), dict(model.state_dict()))
    again.close()
    for net, each in ((model, optimizer), (other, its)):
        net(images[3]).pow(2).mean().backward()
        each.step()
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def with_flag(seed):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    model.register_buffer("flag", torch.zeros(2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_buffer_that_returns_to_what_was_recorded_before_a_base_is_recorded_again(tmp_path):
    model, optimizer = with_flag(0)
    checkpointer, _ = of(tmp_path, model, optimizer)
    iterate(model, optimizer, checkpointer)
    checkpointer.wait()
    model.flag.fill_(1)
    checkpointer._backend.pace.gap = True
    iterate(model, optimizer, checkpointer)
    model.flag.fill_(0)
    iterate(model, optimizer, checkpointer)
    checkpointer.close()
    other, its = with_flag(1)
    again, steps = of(tmp_path, other, its)
    again.close()
    assert steps == 3 and torch.equal(other.flag, torch.zeros(2))


def test_a_first_parameter_without_elements(tmp_path):
    model = nn.ParameterList([torch.zeros(0, 3), torch.ones(2)])
    optimizer = ADAMW(model.parameters())
    checkpointer, _ = of(tmp_path, model, optimizer)
    (model[0].sum() + model[1].sum()).backward()
    optimizer.step()
    checkpointer.step()
    checkpointer.close()
    other = nn.ParameterList([torch.zeros(0, 3), torch.zeros(2)])
    again, steps = of(tmp_path, other, ADAMW(other.parameters()))
    again.close()
    assert steps == 1 and torch.equal(other[1], model[1])


def test_a_buffer_of_another_shape_is_told_at_its_step(tmp_path):
    model, optimizer = with_flag(0)
    checkpointer, _ = of(tmp_path, model, optimizer)
    iterate(model, optimizer, checkpointer)
    model.flag = torch.zeros(5)
    with pytest.raises(BadInput, match=r"buffer flag was F32 \(2,\) and is F32 \(5,\) now"):
        iterate(model, optimizer, checkpointer)
    checkpointer.close()
    other, its = with_flag(1)
    again, steps = of(tmp_path, other, its)
    again.close()
    assert steps == 1


def test_a_group_added_without_gradients_is_followed_by_a_base(tmp_path):
    def built(seed, groups):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        if groups == 2:
            optimizer.add_param_group({"params": [*model[1].parameters()]})
        return model, optimizer

    model, optimizer = built(0, 1)
    checkpointer, _ = of(tmp_path / "run", model, optimizer)
    iterate(model, optimizer, checkpointer)
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    model[1].requires_grad_(False)
    iterate(model, optimizer, checkpointer)
    checkpointer.wait()
    other, its = built(1, 2)
    again, steps = of(killed(tmp_path / "run"), other, its)
    again.close()
    checkpointer.close()
    assert steps == 2 and same(dict(other.state_dict()), dict(model.state_dict()))


def test_parameters_of_another_dtype_are_followed_by_a_base(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer, _ = of(tmp_path, model, optimizer)
    iterate(model, optimizer, checkpointer)
    model.double()
    for i in range(2):
        model(torch.randn(2, 3).double()).pow(2).mean().backward()
        with nullcontext() if i else pytest.warns(UserWarning, match="weight and 1 others changed otherwise"):
            optimizer.step()
        model.zero_grad()
        checkpointer.step()
    checkpointer.close()
    other = nn.Linear(3, 2).double()
    again, steps = of(tmp_path, other, torch.optim.SGD(other.parameters(), lr=0.1))
    again.close()
    assert steps == 3 and same(dict(other.state_dict()), dict(model.state_dict()))


# Refused, with nothing changed


@pytest.mark.parametrize(
    "other", [make(ADAMW, "groups", seed=1), make(partial(torch.optim.SGD, lr=0.1), seed=1)]
)
def test_other_groups_or_optimizers_are_refused_with_nothing_changed(tmp_path, other):
    loop, checkpointer = start(tmp_path, "")
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
    before = other.state()
    with pytest.raises(RunMismatch, match=r"parameter groups?, this one has|was made with AdamW"):
        of(tmp_path, other.model, other.optimizers)
    assert same(other.state()["model"], before["model"])


def test_a_run_of_offload_is_refused(tmp_path):
    _loop, checkpointer = start(tmp_path, "")
    with pytest.raises(RunMismatch, match=r"not made by a Checkpointer.* holdfast\.offload"):
        checkpointer._training.script.check({"optimizer": "AdamW", "groups": []}, 1, 1)
    checkpointer.close()


def test_records_of_a_copy_that_went_on_by_itself_are_not_taken(tmp_path):
    loop, checkpointer = start(tmp_path / "a", "")
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name, steps in (("a", 4), ("b", 6)):
        loop, checkpointer = start(tmp_path / name, "")
        with checkpointer:
            checkpointer.resume()
            go_on(loop, checkpointer, steps)
    segment = "journal/rank-00000/step-000000000004.t0002.log"
    shutil.copy(tmp_path / "b" / segment, tmp_path / "a" / segment)
    _other, again = start(tmp_path / "a", "")
    with again, pytest.warns(UserWarning, match="is a segment of another run"):
        assert again.resume() == 3


def test_diff_compares_what_records_bring_to_one_step(tmp_path, monkeypatch, capsys):
    cut_small(monkeypatch)
    loop, checkpointer = start(tmp_path, "", base_every=2)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 9)
    with LocalStore.read(tmp_path) as reader:
        newest = reader.load(reader.line()[0])
    assert newest.oldest_step < newest.step
    assert diff(str(tmp_path), f"{tmp_path}@9", as_json=False)
    assert not diff(str(tmp_path), f"{tmp_path}@{newest.step}", as_json=False)
    assert "equal: " in capsys.readouterr().out


class Holding:
    """Something with ``held`` as its state."""

    def __init__(self, held):
        self.held = held

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state):
        self.held = state["held"]


def test_a_module_in_also_that_would_be_text_in_every_record_is_refused_by_name(tmp_path):
    model, average = nn.Linear(3, 3), nn.Linear(2100, 2100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        BadInput, match=r"also=\{'ema': ...\} has 16\.8 MiB .*averages=.*after_update=.*buffers"
    ):
        of(tmp_path, model, optimizer, also={"ema": average})
    assert not any(tmp_path.iterdir())


def test_tensors_in_also_that_every_record_has_are_told_once_and_counted_as_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.checkpoint.user_state.LOOK_EVERY", 1)
    model, large = nn.Linear(3, 3), Holding([{"ema": torch.randn(600_000)}])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"also=\{'large': ...\} has 2\.3 MiB of tensors.*averages=") as told:
        checkpointer, _ = of(tmp_path, model, optimizer, also={"large": large}, memory="80MiB")
    with checkpointer:
        assert len(told) == 1 and checkpointer._backend.pool.count == 2
        for _ in range(5):
            iterate(model, optimizer, checkpointer)
    held, large.held = large.held, None
    with pytest.warns(UserWarning, match="in every step"):
        checkpointer, done = of(tmp_path, model, optimizer, also={"large": large})
    with checkpointer:
        assert done == 5 and torch.equal(large.held[0]["ema"], held[0]["ema"])


@pytest.mark.slow
def test_text_in_a_state_and_tensors_of_a_loader_are_not_told_of(tmp_path):
    model, log, loader = nn.Linear(3, 3), Holding("x" * 20_000_000), Holding(torch.zeros(600_000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer, _ = of(tmp_path, model, optimizer, also={"log": log}, loader=loader)
    with checkpointer:
        iterate(model, optimizer, checkpointer)


# Nothing hangs, nothing is left


def test_more_updates_in_an_iteration_than_there_is_room_for_is_an_error_and_no_hang(tmp_path):
    loop, checkpointer = start(tmp_path, "")
    checkpointer.resume()
    with pytest.raises(BadInput, match=r"8 optimizer steps were done since step\(\) was called last"):
        for i in range(12):
            loop.iteration(i, lambda: None)
    checkpointer.close()


def test_waiting_for_a_step_that_was_not_done_is_an_error_and_no_hang(tmp_path):
    _loop, checkpointer = start(tmp_path, "")
    with checkpointer:
        checkpointer.resume()
        with pytest.raises(BadInput, match="step 5 has not been done yet: 0 have"):
            checkpointer.wait(5)


def test_closing_while_the_disk_hangs_returns_with_the_error(tmp_path, monkeypatch):
    loop, checkpointer = start(tmp_path, "")
    checkpointer.resume()
    checkpointer._backend.recorder._deadline = 0.3
    release, real = threading.Event(), checkpointer._store.disk.sync
    monkeypatch.setattr(checkpointer._store.disk, "sync", lambda *a, **k: (release.wait(10), real(*a, **k)))
    started = time.monotonic()
    with pytest.raises(WriterHung):
        go_on(loop, checkpointer, 40)
    with pytest.raises(WriterHung):
        checkpointer.close()
    assert time.monotonic() - started < 5
    release.set()
    checkpointer._backend.recorder._thread.join(0.1)
    checkpointer._backend.recorder._closing = True
    checkpointer._backend.recorder._want(0)
    checkpointer._backend.recorder._thread.join()
    checkpointer._let_go()


def test_no_file_is_left_open_also_when_another_thread_closes(tmp_path):
    loop, checkpointer = start(tmp_path, "")
    checkpointer.resume()
    go_on(loop, checkpointer, 3)
    thread = threading.Thread(target=checkpointer.close)
    thread.start()
    thread.join()
    held = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path)]
    assert not [path for path in held if path.startswith(str(tmp_path))]
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast")]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_forked_child_ends_on_sigterm(tmp_path):
    _loop, checkpointer = start(tmp_path, "")
    with checkpointer:
        checkpointer.resume()
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join(5)
        code = child.exitcode
        child.kill()
    assert code == -signal.SIGTERM


def closed_elsewhere_then_terminated(root):
    closed_elsewhere(root)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)


def closed_elsewhere(root):
    """A run whose Checkpointer was closed on another thread, which leaves its handler of SIGTERM."""
    _loop, checkpointer = start(root, "")
    checkpointer.resume()
    thread = threading.Thread(target=checkpointer.close)
    thread.start()
    thread.join()


def test_a_process_ends_on_sigterm_after_close_on_another_thread(tmp_path):
    """Only the main thread may take the handler away; Lightning sets it again after a fit."""
    child = multiprocessing.get_context("fork").Process(
        target=closed_elsewhere_then_terminated, args=(tmp_path,)
    )
    child.start()
    child.join(15)
    code = child.exitcode
    child.kill()
    assert code == -signal.SIGTERM


def test_the_handler_that_a_closed_checkpointer_left_does_not_keep_the_next_from_watching(tmp_path):
    closed_elsewhere(tmp_path)
    loop, checkpointer = start(tmp_path, "")
    checkpointer.resume()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        loop.iteration(0, checkpointer.step)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def no_memory(*_, **__):
    raise MemoryError("no memory for a copy")


def test_an_update_whose_gradients_could_not_be_taken_is_followed_by_a_base(tmp_path, monkeypatch):
    """The script goes on with the next batch, as one does where memory is short."""
    loop, checkpointer = start(tmp_path / "run", "")
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        monkeypatch.setattr(Exact, "consume", no_memory)
        with pytest.raises(MemoryError):
            loop.iteration(3, checkpointer.step)
        monkeypatch.undo()
        for i in range(4, 20):  # more than there are slots
            loop.iteration(i, checkpointer.step)
        checkpointer.wait()
        assert checkpointer.steps_done == 19
        other, again = start(killed(tmp_path / "run"), "")
        with again:
            assert again.resume() == 19
            assert same(other.model.state_dict(), loop.model.state_dict())


def asked(checkpointer):
    checkpointer.save()


def waited(checkpointer):
    checkpointer._backend.pace.gap = True
    checkpointer.wait()


@pytest.mark.parametrize("act", [asked, waited])
def test_after_a_base_was_interrupted_nothing_more_is_recorded(tmp_path, monkeypatch, act):
    """The writer may be reading parameters that training goes on to change."""
    loop, checkpointer = start(tmp_path, "")
    checkpointer.resume()
    go_on(loop, checkpointer, 3)
    checkpointer._backend.recorder.drain()
    monkeypatch.setattr(
        checkpointer._backend.pace.bases, "write_next", lambda step: signal.raise_signal(signal.SIGINT)
    )
    loop.optimizers[0].zero_grad()
    with pytest.raises(KeyboardInterrupt):
        if act is asked:
            act(checkpointer)
        else:
            loop.iteration(3, lambda: None)
            checkpointer._optimizer_hooks.take()
            checkpointer._training.steps_done += 1
            act(checkpointer)
    with pytest.raises(EngineFailed, match=r"a call was interrupted\. Step 3 is durable"):
        loop.iteration(4, checkpointer.step)
    checkpointer.close()
    other, again = start(tmp_path, "")
    with again:
        assert again.resume() == 3 and same(other.state(), reference(3, "")[0][3])


def test_a_sigterm_after_the_last_step_ends_the_process_when_all_is_durable(tmp_path):
    loop, checkpointer = start(tmp_path)
    checkpointer.resume()
    go_on(loop, checkpointer, 3)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        checkpointer.close()
    assert ended.value.code == 143 and checkpointer.durable_step == 3
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast")]


def accumulated(root, steps, sigterm_in=None):
    """A loop of two micro-batches in each step, with running statistics and residuals."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = ADAMW(model.parameters())
    with Checkpointer(root, model=model, optimizer=optimizer, codec=TopK(0.5)) as checkpointer:
        for i in range(checkpointer.resume(), steps):
            for micro in range(2):
                model(torch.randn(5, 3)).pow(2).mean().backward()
                if i == sigterm_in and micro == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                if micro == 1:
                    optimizer.step()
                    optimizer.zero_grad()
                checkpointer.step()
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_a_sigterm_in_mid_accumulation_ends_the_process_at_the_end_of_the_step(tmp_path):
    whole = accumulated(tmp_path / "whole", 6)
    with pytest.raises(SystemExit):
        accumulated(tmp_path / "run", 6, sigterm_in=2)
    with LocalStore.read(tmp_path / "run") as reader:
        assert reader.head().step == 3
    assert same(accumulated(tmp_path / "run", 6), whole)


@pytest.mark.slow
def test_a_disk_that_is_slow_and_gets_on_does_not_count_as_one_that_hangs(tmp_path):
    """A group of records takes longer than the deadline, no piece of it does."""
    torch.manual_seed(0)
    model = nn.Linear(2000, 2000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpointer, _ = of(tmp_path, model, optimizer, deadline_seconds=1.2)
    checkpointer._queue._throttles[True] = Throttle(20_000_000)
    with checkpointer:
        for _ in range(4):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            checkpointer.step()
        checkpointer.wait()
        assert checkpointer.durable_step == 4


def test_a_last_step_whose_gradient_ends_in_zeros_comes_back(tmp_path):
    """As that of an embedding does, of which few rows are used."""
    for done in (0, 3):
        torch.manual_seed(0)
        model = nn.Embedding(5000, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpointer, steps = of(tmp_path, model, optimizer)
        with checkpointer:
            assert steps == done
            for _ in range(done, 3):
                model(torch.tensor([0, 1])).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()


# A script that ends without close()

SCRIPT = """
import os, sys, time, torch
from holdfast.errors import DiskFailed
from holdfast.store.disk import Disk
from test_checkpointer import go_on, start

real, then = Disk.sync, []
torch.set_num_threads(1)

def sync(*args, **options):  # slow, so that steps are on their way at the end
    time.sleep(0.1 if not then else then[0])
    if then and then[0] == 0:
        raise DiskFailed("no disk")
    real(*args, **options)

Disk.sync = sync

def main():
    loop, checkpointer = start(sys.argv[1], deadline_seconds=1)
    checkpointer.resume()
    go_on(loop, checkpointer, checkpointer.steps_done + 20)
    {how}

main()
"""
ENDS = {
    "end": "pass",
    "error": "raise ValueError('of the script')",
    "exit": "sys.exit(0)",
    "fork": "os.fork() or sys.exit(0)",
    "closed": "checkpointer.close()",
}


def script_ended(root, how):
    """What a script said that ended so, on stderr."""
    script = root.parent / "script.py"
    script.write_text(SCRIPT.format(how=how))
    environment = environment_of(PYTHONPATH=os.pathsep.join(sys.path))
    return run_python(script, root, env=environment, modules=["test_checkpointer"], timeout=100).stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_script_that_ends_without_close_has_every_step(tmp_path, how):
    states, _ = reference(20)
    root = tmp_path / "run"
    told = script_ended(root, ENDS[how]).splitlines()
    if how == "error":  # and nothing but the traceback
        first, *frames, last = told
        assert (first, last) == ("Traceback (most recent call last):", "ValueError: of the script")
        assert all(line.startswith("  ") for line in frames)
    else:
        assert not told
    loop, checkpointer = start(root)
    with checkpointer:
        assert checkpointer.resume() == 20
        assert same(loop.state(), states[20])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "why"), [("then.append(0)", "no disk"), ("then.append(60)", "nothing has been written for 1 s")]
)
def test_a_script_that_cannot_write_its_last_steps_says_so_and_ends(tmp_path, how, why):
    told = script_ended(tmp_path / "run", how)
    assert "of its steps to 20 those after " in told and why in told
    assert told.startswith("holdfast: the script ended without close()")


def test_nothing_is_left_for_the_end_of_the_process(tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(
        "holdfast.checkpoint.log.recorder.atexit",
        SimpleNamespace(register=left.append, unregister=left.remove),
    )
    model = nn.Linear(3, 3)
    checkpointer, _ = of(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    [at_exit] = left
    assert not any(item is checkpointer._backend.recorder for item in at_exit.args)  # which it would keep
    checkpointer.close()
    assert not left


def test_each_step_is_durable_when_asked(tmp_path):
    """A kill right after ``step`` loses nothing."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizer, wait_each_step=True
    ) as checkpointer:
        checkpointer.resume()
        for step in range(1, 6):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            checkpointer.step()
            assert checkpointer.durable_step == step


def test_waiting_for_steps_of_a_replica_is_refused(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadInput, match="would make a base of every step"):
        Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, wait_each_step=True, replica=True)


def test_a_relative_directory_in_a_worker_of_ray_is_refused(tmp_path, monkeypatch):
    """Another session of Ray would have another directory, and begin anew."""
    session = tmp_path / "session_2026-11-28_21-28-40_520548_24899/artifacts/mine"
    session.mkdir(parents=True)
    monkeypatch.chdir(session)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadInput, match="Give an absolute path"):
        Checkpointer("runs/mine", model=model, optimizer=optimizer)
    assert not (session / "runs").exists()
    of(tmp_path / "run", model, optimizer)[0].close()
