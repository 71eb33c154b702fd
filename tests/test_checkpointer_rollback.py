"""A living process goes back to a recorded step, bit for bit, and a guard of the loss does so by itself."""

from __future__ import annotations

import math
import shutil
from functools import partial

import pytest
import torch
from torch import nn

import holdfast
from checkpoint.loops import cut_small, make, manifests, same
from holdfast import failpoints
from holdfast.checkpoint.compression.lossy import TopK
from holdfast.checkpoint.loss_guard import GoodValues, loss_limit
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, Diverged, EngineFailed, NoCommit, RunMismatch
from holdfast.events import read_events
from holdfast.state.encoding import decode
from holdfast.store.commit.pruning import prune
from holdfast.store.log.segments import read_segment, segments
from holdfast.store.run_store import LocalStore
from test_checkpointer import go_on, reference, start

ADAMW = partial(torch.optim.AdamW, lr=0.01)


# Going back


@pytest.mark.parametrize("feature", ["batchnorm", "schedule", "scaler", "ema", "accumulate"])
def test_a_process_goes_back_and_ends_as_if_it_had_not(tmp_path, monkeypatch, feature):
    cut_small(monkeypatch)
    states, _ = reference(12, feature)
    loop, checkpointer = start(tmp_path / "run", feature, base_every=4)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 9)
        assert checkpointer.rollback(6) == checkpointer.steps_done == 6
        assert same(loop.state(), states[6])
        go_on(loop, checkpointer, 12)
        assert same(loop.state(), states[12])
    loop, checkpointer = start(tmp_path / "run", feature)
    with checkpointer:
        assert checkpointer.resume() == 12
        assert same(loop.state(), states[12])


def test_memory_stays_and_reserved_space_goes(tmp_path):
    """Staging buffers are most of the memory, and what a segment reserves is most of a small journal."""
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        before = [(id(p), p.data_ptr()) for p in loop.model.parameters()]
        pool = checkpointer._backend.pool
        checkpointer.rollback(1)
        assert [(id(p), p.data_ptr()) for p in loop.model.parameters()] == before
        assert checkpointer._backend.pool is pool
        with LocalStore.read(tmp_path) as reader:
            [ref] = segments(reader.disk, "rank-00000")
            assert reader.disk.size(ref.path) == read_segment(reader.disk, ref)[0][-1].end
        go_on(loop, checkpointer, 3)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_kill_after_a_rollback_resumes_what_the_process_had(tmp_path, monkeypatch, after):
    cut_small(monkeypatch)
    loop, checkpointer = start(tmp_path / "run", base_every=4)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 7)
        checkpointer.rollback(5)
        torch.manual_seed(77)  # the steps that follow are not those that were abandoned
        for i in range(after):
            loop.iteration(i, checkpointer.step)
        checkpointer.wait()
        lived = loop.state()
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    loop, checkpointer = start(tmp_path / "killed")
    with checkpointer:
        assert checkpointer.resume() == 5 + after
        if after:  # the seed was set after the last record otherwise
            assert same(loop.state(), lived)


def test_an_unfinished_iteration_is_undone(tmp_path):
    states, _ = reference(4, "batchnorm")
    loop, checkpointer = start(tmp_path)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        loop.iteration(3, lambda: None)  # an update that step() never ended
        loop.model(torch.randn(5, 7), spare=False).sum().backward()
        assert checkpointer.rollback() == 3
        assert same(loop.state(), states[3])
        assert all(p.grad is None for p in loop.model.parameters())
        go_on(loop, checkpointer, 4)
        assert same(loop.state(), states[4])


def test_an_update_that_raised_is_undone(tmp_path):
    states, _ = reference(4, "")
    loop, checkpointer = start(tmp_path, "")
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        fails = loop.optimizers[0].register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.iteration(3, checkpointer.step)
        fails.remove()
        checkpointer.rollback()
        assert same(loop.state(), states[3])
        go_on(loop, checkpointer, 4)
        assert same(loop.state(), states[4])


def test_a_buffer_that_changes_again_is_recorded_again(tmp_path):
    """The last record, of an abandoned step, has the very value."""

    class Log:
        text = "a" * 5000

        def state_dict(self):
            return {"text": self.text}

        def load_state_dict(self, state):
            self.text = state["text"]

    def begun(root):
        torch.manual_seed(0)
        model, log = nn.Linear(2, 1), Log()
        model.register_buffer("phase", torch.zeros(()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, log, optimizer, Checkpointer(root, model=model, optimizer=optimizer, also={"log": log})

    model, log, optimizer, checkpointer = begun(tmp_path / "run")
    with checkpointer:
        checkpointer.resume()
        for step in (1, 2, 3, 4, 3, 4):
            model(torch.ones(2)).backward()
            if step == 3:
                model.phase.fill_(1.0)
            log.text += str(step)
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            if checkpointer.steps_done == 4 and len(log.text) == 5004 and model.phase:
                checkpointer.rollback(2)
                assert model.phase == 0 and log.text.endswith("a12")
                log.text += "b"
        checkpointer.wait()
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    model, log, optimizer, checkpointer = begun(tmp_path / "killed")
    with checkpointer:
        assert checkpointer.resume() == 4
        assert model.phase == 1 and log.text.endswith("a12b34")


def test_many_rollbacks_leave_no_more_timelines_than_resumes(tmp_path):
    states, _ = reference(12, "")
    loop, checkpointer = start(tmp_path, "", base_every=2)
    with checkpointer:
        checkpointer.resume()
        for _ in range(8):
            go_on(loop, checkpointer, 3)
            checkpointer.rollback(1)
        for step in (10, 11, 12):
            go_on(loop, checkpointer, step)
            checkpointer.save()  # after which no base needs what was abandoned
        assert same(loop.state(), states[12])
    assert len(list((tmp_path / "timelines").iterdir())) <= 6
    assert [e["step"] for e in read_events(tmp_path / "events.jsonl") if e["event"] == "rollback"] == [1] * 8


def test_an_optimizer_with_attributes_of_its_own_goes_back(tmp_path):
    class Counting(torch.optim.SGD):
        count = 0

        def step(self, closure=None):
            self.count += 1
            for group in self.param_groups:
                group["lr"] = 0.1 / self.count
            super().step()

    loop = make(partial(Counting, lr=0.1))
    with Checkpointer(tmp_path, model=loop.model, optimizer=loop.optimizers) as checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 5)
        checkpointer.rollback(2)
        assert loop.optimizers[0].count == 2


def test_an_error_in_the_middle_is_final_and_loses_nothing(tmp_path, monkeypatch):
    states, _ = reference(7, "")
    loop, checkpointer = start(tmp_path, "", base_every=4)
    with pytest.raises(OSError, match="in the middle"), checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 7)

        def fail():
            raise OSError("in the middle")

        monkeypatch.setattr(failpoints, "armed", "after_timeline_opened")
        monkeypatch.setattr(failpoints, "action", fail)
        with pytest.raises(OSError, match="in the middle"):
            checkpointer.rollback(5)
        monkeypatch.setattr(failpoints, "armed", "")
        for call in (checkpointer.step, checkpointer.rollback):
            with pytest.raises(OSError, match="in the middle"):
                call()
        checkpointer.step()
    loop, checkpointer = start(tmp_path, "")
    with checkpointer:
        assert checkpointer.resume() == 5
        assert same(loop.state(), states[5])
        go_on(loop, checkpointer, 7)
        assert same(loop.state(), states[7])


# The place in the data


def numbers(limit=64):
    return [torch.tensor([float(i)]) for i in range(limit)]


def trainer(root, **options):
    torch.manual_seed(0)
    model, loader = nn.Linear(1, 1), holdfast.loader(numbers(), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    checkpointer = Checkpointer(root, model=model, optimizer=optimizer, loader=loader, **options)
    return model, optimizer, loader, checkpointer


def test_a_loop_over_the_loader_reads_again_after_a_rollback(tmp_path):
    model, optimizer, loader, checkpointer = trainer(tmp_path)
    seen, gone_back = [], False
    with checkpointer:
        checkpointer.resume()
        for batch in loader:
            seen.append(batch.flatten().tolist())
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            if checkpointer.steps_done == 5 and not gone_back:
                gone_back = bool(checkpointer.rollback(2))
            if checkpointer.steps_done == 6:
                break
    assert seen[5:8] == seen[2:5] and len(seen) == 9


def test_a_guard_passes_over_what_was_read(tmp_path):
    model, optimizer, loader, checkpointer = trainer(tmp_path)
    seen = []
    with checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard()
        for batch in loader:
            seen.append((checkpointer.steps_done, batch.flatten().tolist()))
            loss = model(batch).mean()
            if guard.check(loss * (math.nan if len(seen) == 4 else 1.0)):
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            if checkpointer.steps_done == 6:
                break
        place = loader.state_dict()
    assert [step for step, _ in seen] == [0, 1, 2, 3, 2, 3, 4, 5]
    assert len({tuple(batch) for _, batch in seen}) == len(seen)
    _, _, loader, checkpointer = trainer(tmp_path)
    with checkpointer:
        assert checkpointer.resume() == 6
        assert loader.state_dict() == place


# Refused, with nothing changed


def test_a_step_that_nothing_leads_to_is_refused(tmp_path):
    states, _ = reference(9, "")
    loop, checkpointer = start(tmp_path, "", base_every=2, keep=holdfast.Keep(last=1))
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 8)
        with pytest.raises(NoCommit, match="has nothing recorded that leads to step 1"):
            checkpointer.rollback(1)
        assert checkpointer.steps_done == 8 and same(loop.state(), states[8])
        go_on(loop, checkpointer, 9)
        assert same(loop.state(), states[9])


@pytest.mark.parametrize("step", [-1, 4, 1.0, True])
def test_a_step_that_was_not_done_is_refused(tmp_path, step):
    loop, checkpointer = start(tmp_path, "")
    with checkpointer:
        with pytest.raises(BadInput, match=r"call resume\(\) before"):
            checkpointer.rollback(0)
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        with pytest.raises(BadInput, match="from 0 to 3"):
            checkpointer.rollback(step)
    with pytest.raises(EngineFailed, match="is closed"):
        checkpointer.rollback(0)


def test_what_only_a_new_process_can_restore_is_refused(tmp_path):
    loop, checkpointer = start(tmp_path / "run", "", codec=TopK(0.1))
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 1)
        for call in (checkpointer.rollback, checkpointer.guard):
            with pytest.raises(BadInput, match="residuals"):
                call()


def test_a_step_before_a_group_came_is_refused(tmp_path):
    loop, checkpointer = start(tmp_path, "frozen")
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        late = loop.model.first.bias.requires_grad_()
        loop.optimizers[0].add_param_group({"params": [late]})
        go_on(loop, checkpointer, 5)
        before = loop.state()
        with pytest.raises(RunMismatch, match="1 parameter group, this one has 2"):
            checkpointer.rollback(2)
        assert checkpointer.steps_done == 5 and same(loop.state(), before)
        go_on(loop, checkpointer, 6)
        assert checkpointer.rollback(5) == 5 and same(loop.state(), before)


def test_a_guard_goes_to_the_base_that_a_new_group_has_made(tmp_path):
    """No step before it can be reached in this process."""
    loop, checkpointer = start(tmp_path, "frozen")
    with checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard()
        go_on(loop, checkpointer, 3)
        late = loop.model.first.bias.requires_grad_()
        loop.optimizers[0].add_param_group({"params": [late]})
        go_on(loop, checkpointer, 4)
        before = loop.state()
        assert guard.check(math.nan)
        assert checkpointer.steps_done == 4 and same(loop.state(), before)


class Restarted:
    """A loader whose place counts from the next ``iter`` on."""

    consumed = 0

    def __iter__(self):
        while True:
            self.consumed += 1
            yield torch.ones(1)

    def state_dict(self):
        return {"consumed": self.consumed}

    def load_state_dict(self, state):
        self.consumed = state["consumed"]


def test_a_loader_that_is_not_its_own_iterator_is_refused_without_a_guard(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, loader=Restarted()) as checkpointer:
        checkpointer.resume()
        with pytest.raises(BadInput, match="Restarted is not its own iterator"):
            checkpointer.rollback()
        assert checkpointer.guard().check(math.nan)


def test_a_rollback_inside_a_step_is_refused(tmp_path):
    loop, checkpointer = start(tmp_path, "")
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 2)
        loop.optimizers[0].register_step_pre_hook(lambda *_: checkpointer.rollback(1) and None)
        with pytest.raises(BadInput, match="inside step"):
            loop.iteration(2, checkpointer.step)


# The guard's rule


def test_values_within_the_band_are_good():
    values = GoodValues(64, loss_limit(20.0))
    noise = torch.Generator().manual_seed(1)
    for step in range(500):
        loss = 1 + 3 * math.exp(-step / 50) + 0.05 * float(torch.randn((), generator=noise))
        assert not values.is_bad(loss)
        values.add(step, loss)
    assert values.is_bad(values.limit() + 1e-6) and not values.is_bad(values.limit())
    assert values.limit() < 3.0 and values.is_bad(-math.inf) and values.is_bad(math.nan)


def test_few_values_make_no_band():
    values = GoodValues(16, loss_limit(1.0))
    for step in range(15):
        values.add(step, 1.0)
    assert not values.is_bad(1e30) and values.is_bad(math.inf)
    values.add(15, 1.0)
    assert values.is_bad(1.02)
    values.forget_after(3)
    assert not values.is_bad(1e30)


@pytest.mark.parametrize(
    "options", [{"max_rollbacks": 0}, {"spike": 0.0}, {"norm_spike": 1.0}, {"window": 15}, {"window": 20.5},
     {"copy_every": 1}],
)  # fmt: skip
def test_options_that_make_no_rule_are_refused(tmp_path, options):
    _, checkpointer = start(tmp_path, "")
    with checkpointer:
        checkpointer.resume()
        with pytest.raises(BadInput, match=f"{next(iter(options))} = "):
            checkpointer.guard(**options)


# The guard at work


class Regression:
    """A small network that is trained on noisy data by ``optimizer``."""

    def __init__(self, root, optimizer, **options):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = optimizer(self.model.parameters())
        self.data = torch.Generator().manual_seed(5)
        self.checkpointer = Checkpointer(
            root, model=self.model, optimizer=self.optimizer, base_every=20, **options
        )

    def batch(self, generator=None):
        x = torch.randn(64, 8, generator=generator or self.data)
        noise = torch.randn(64, generator=generator or self.data)
        return x, x.sin().sum(1) + 0.1 * noise

    def loss(self, batch):
        return (self.model(batch[0]).squeeze(1) - batch[1]).square().mean()

    def final_loss(self):
        data = torch.Generator().manual_seed(9)
        with torch.no_grad():
            return sum(float(self.loss(self.batch(data))) for _ in range(20)) / 20


KINDS = ("batch", "nan", "flip before", "flip after")


def damage(kind, model, generator):
    """Change one number of one gradient: to NaN, or by the highest bit of its exponent."""
    first = 2 if kind == "flip after" else 0  # a saturated tanh hides what its own weights are
    parameter = list(model.parameters())[int(torch.randint(first, 4, (), generator=generator))]
    place = int(torch.randint(0, parameter.numel(), (), generator=generator))
    if kind == "nan":
        parameter.grad.view(-1)[place] = math.nan
    elif kind.startswith("flip"):
        parameter.grad.view(-1).view(torch.int32)[place] ^= 1 << 30


def train(trained, faults, steps):
    """Train for ``steps``, with one of ``KINDS`` at the iteration of each of ``faults``. Returns the rollbacks."""
    chance, iteration, found = torch.Generator().manual_seed(11), 0, []
    with trained.checkpointer as checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard()
        while checkpointer.steps_done < steps:
            iteration += 1
            kind = faults.get(iteration, "")
            loss = trained.loss(trained.batch()) * (math.nan if kind == "batch" else 1.0)
            trained.optimizer.zero_grad()
            loss.backward()
            if kind and kind != "flip after":
                damage(kind, trained.model, chance)
            norm = nn.utils.clip_grad_norm_(trained.model.parameters(), 10.0)
            if guard.check(loss, norm):
                found.append(iteration)
                continue
            if kind == "flip after":
                damage(kind, trained.model, chance)
            trained.optimizer.step()
            checkpointer.step()
    return found


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.slow
def test_twenty_of_twenty_faults_are_undone(tmp_path, optimizer):
    """Those in a gradient that was judged already show in the next loss, so with SGD alone: Adam bounds updates."""
    make_optimizer = {
        "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "adamw": partial(torch.optim.AdamW, lr=0.01),
    }[optimizer]
    kinds = KINDS if optimizer == "sgd" else KINDS[:3]
    faults = {30 + 8 * i: kinds[i % len(kinds)] for i in range(20)}
    quiet = Regression(tmp_path / "quiet", make_optimizer)
    assert train(quiet, {}, 200) == []
    faulty = Regression(tmp_path / "faulty", make_optimizer)
    found = train(faulty, faults, 200)
    assert found == [at + (kind == "flip after") for at, kind in faults.items()]
    bare = Regression(tmp_path / "bare", make_optimizer)
    bare.checkpointer.close()
    assert all(p.isfinite().all() for p in faulty.model.parameters())
    assert faulty.final_loss() < 1.25 * quiet.final_loss() < 0.2 * bare.final_loss()


def test_a_loss_that_stays_bad_ends_the_training(tmp_path):
    loop, checkpointer = start(tmp_path, "", base_every=4, keep=holdfast.Keep(last=9))
    with checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard(max_rollbacks=3)
        go_on(loop, checkpointer, 10)
        reached = []
        with pytest.raises(Diverged, match="after 3 rollbacks in a row"):
            for _ in range(9):
                guard.check(math.nan)
                reached.append(checkpointer.steps_done)
        assert reached == [9, 7, 3] and guard.rollbacks == 3
        for _ in range(8):  # a good loss at a later step ends the row
            guard.check(1.0)
            loop.iteration(0, checkpointer.step)
        assert guard.check(math.nan) and checkpointer.steps_done == 10


@pytest.mark.parametrize("feature", ["batchnorm", "two"])
def test_a_copy_in_memory_brings_back_the_same_bits(tmp_path, monkeypatch, feature):
    states, _ = reference(12, feature)
    loop, checkpointer = start(tmp_path, feature, base_every=50)
    with checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard(copy_every=4)
        go_on(loop, checkpointer, 10)
        with monkeypatch.context() as patch:  # the copy serves, and not the records
            patch.setattr("holdfast.checkpoint.recording.recover", None)
            assert guard.check(math.nan)
        assert checkpointer.steps_done == 8 and same(loop.state(), states[8])
        assert guard.check(math.inf)  # at the copy's own step: further back, by the disk
        assert checkpointer.steps_done == 6 and same(loop.state(), states[6])
        go_on(loop, checkpointer, 12)
        assert same(loop.state(), states[12])
    loop, checkpointer = start(tmp_path, feature)
    with checkpointer:
        assert checkpointer.resume() == 12
        assert same(loop.state(), states[12])


def freezing(loop, checkpointer, steps, states=None):
    """Train on, with a parameter that is frozen from step 3 to 5 and keeps the optimizer state that it had."""
    for i in range(checkpointer.steps_done if checkpointer else 0, steps):
        loop.model.first.weight.requires_grad_(not 3 <= i < 6)
        loop.iteration(i, checkpointer.step if checkpointer else lambda: None)
        if states is not None:
            states.append(loop.state())


def test_a_copy_in_memory_leaves_a_frozen_parameter_its_optimizer_state(tmp_path, monkeypatch):
    states = [None]
    freezing(make(ADAMW), None, 9, states)
    loop, checkpointer = start(tmp_path, "", base_every=50)
    with checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard(copy_every=4)
        freezing(loop, checkpointer, 6)
        with monkeypatch.context() as patch:  # the copy serves, and not the records
            patch.setattr("holdfast.checkpoint.recording.recover", None)
            assert guard.check(math.nan)
        assert checkpointer.steps_done == 4 and same(loop.state(), states[4])
        freezing(loop, checkpointer, 9)
        assert same(loop.state(), states[9])


@pytest.mark.parametrize("change", ["script", "steps"])
@pytest.mark.filterwarnings("ignore:.*changed otherwise than by a step")
def test_a_copy_in_memory_is_not_used_once_what_it_lacks_has_changed(tmp_path, change):
    """A frozen parameter, by the script; or one that has trained since, and is frozen again."""
    loop, checkpointer = start(tmp_path, "", base_every=50)
    first, states = loop.model.first.weight, []
    with checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard(copy_every=4)
        for i in range(6):
            first.requires_grad_(i < 3 or (change == "steps" and i == 4))
            loop.iteration(i, checkpointer.step)
            states.append(loop.state())
            if i == 4 and change == "script":
                with torch.no_grad():
                    first.mul_(2)
        assert guard.check(math.nan)
        assert checkpointer.steps_done == 4 and same(loop.state(), states[3])


def test_a_copy_in_memory_is_that_of_a_base_that_the_script_asked_for(tmp_path):
    """After the step that both are of, the script has changed a parameter, which only the base would hold."""
    loop, checkpointer = start(tmp_path / "run", "", base_every=50)
    with checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard(copy_every=4)
        go_on(loop, checkpointer, 4)
        with torch.no_grad():
            loop.model.first.weight.mul_(2)
        checkpointer.save()
        saved = loop.state()
        go_on(loop, checkpointer, 5)
        assert guard.check(math.nan)
        assert checkpointer.steps_done == 4 and same(loop.state(), saved)
        go_on(loop, checkpointer, 7)
        checkpointer.wait()
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
        lived = loop.state()
    loop, checkpointer = start(tmp_path / "killed", "")
    with checkpointer:
        assert checkpointer.resume() == 7
        assert same(loop.state(), lived)


def test_a_guard_goes_no_further_than_the_oldest_base(tmp_path):
    loop, checkpointer = start(tmp_path, "", base_every=1, keep=holdfast.Keep(last=1))
    with checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard()
        go_on(loop, checkpointer, 4)
        checkpointer.save()
        assert guard.check(math.nan)
        assert checkpointer.steps_done == 4


@pytest.mark.parametrize("copy_every", [None, 4, 7])
def test_a_guard_without_records_goes_to_the_newest_base_before(tmp_path, copy_every):
    states, _ = reference(12, "")
    loop, checkpointer = start(tmp_path, "", every=4)
    with checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard(copy_every=copy_every)
        for step in (4, 8):
            go_on(loop, checkpointer, step)
            checkpointer.wait()
        go_on(loop, checkpointer, 10)
        assert guard.check(math.nan)
        assert checkpointer.steps_done == 8 and same(loop.state(), states[8])
        go_on(loop, checkpointer, 12)
        assert same(loop.state(), states[12])


# Certified bases


def steps_of(root):
    return [manifest.step for manifest in manifests(root)]


def test_the_newest_certified_base_stays_until_there_is_another(tmp_path):
    loop, checkpointer = start(tmp_path, "", base_every=100, keep=holdfast.Keep(last=1))
    with checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard()

        def train_on(checks):
            if checks:
                guard.check(1.0)
            loop.iteration(0, checkpointer.step)
            checkpointer.save()

        for checks in (True, True, True, False, False):
            train_on(checks)
        assert steps_of(tmp_path) == [5, 2]  # of step 2 a good loss is known
        train_on(True)
        assert steps_of(tmp_path) == [6, 5]
    certified = [e["step"] for e in read_events(tmp_path / "events.jsonl") if e["event"] == "certified"]
    assert certified == [0, 1, 2, 5]
    loop, checkpointer = start(tmp_path, "", base_every=100, keep=holdfast.Keep(last=1))
    with checkpointer:  # a new process knows it from the run
        checkpointer.resume()
        assert 5 in steps_of(tmp_path)


def test_pruning_keeps_the_newest_certified_base(tmp_path):
    loop, checkpointer = start(tmp_path, "", base_every=100, keep=holdfast.Keep(last=9))
    with checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard()
        for is_checked in (True, True, False, False):
            if is_checked:
                guard.check(1.0)
            loop.iteration(0, checkpointer.step)
            checkpointer.save()
    assert steps_of(tmp_path) == [4, 3, 2, 1, 0]
    prune(tmp_path, holdfast.Keep(last=1))
    assert steps_of(tmp_path) == [4, 1]


def test_a_loop_that_counts_by_itself_is_not_sent_back(tmp_path):
    class TrainersLoop:
        has_loop = True

        def state_dict(self):
            return {"batches": 0}

        def load_state_dict(self, state):
            pass

    _, checkpointer = start(tmp_path, "", loader=TrainersLoop())
    with checkpointer:
        checkpointer.resume()
        for refused in (checkpointer.guard, checkpointer.rollback):
            with pytest.raises(BadInput, match="trainer's loop"):
                refused()


def test_a_state_that_is_not_finite_is_not_certified(tmp_path):
    loop, checkpointer = start(tmp_path, "", base_every=100)
    with checkpointer:
        checkpointer.resume()
        guard = checkpointer.guard()
        go_on(loop, checkpointer, 1)
        slots = loop.optimizers[0].state[loop.model.first.weight]
        slots["exp_avg_sq"][0, 0] = math.inf
        checkpointer.save()
        guard.check(1.0)
        assert checkpointer._store.certified_step is None
        slots["exp_avg_sq"][0, 0] = 0.0
        checkpointer.save()
        guard.check(1.0)
        assert checkpointer._store.certified_step == 1


def test_without_a_guard_no_record_says_anything_of_one(tmp_path):
    for name, guarded in (("without", False), ("with", True)):
        loop, checkpointer = start(tmp_path / name, "")
        with checkpointer:
            checkpointer.resume()
            for _ in range(3):
                if guarded:
                    checkpointer.guard().check(1.0)
                loop.iteration(0, checkpointer.step)
            checkpointer.save()
    without, with_guard = (
        manifests(tmp_path / name)[0].progress_of("rank-00000") for name in ("without", "with")
    )
    assert with_guard.keys() - without.keys() == {"certified"}
    assert decode(without["random"]).keys() == decode(with_guard["random"]).keys()
