"""Every step of a run comes back bit for bit from a base and records: all optimizers, habits of scripts and codecs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from checkpoint.loops import FEATURES, cut_small, make, same
from combined import one_in
from holdfast.checkpoint.compression.codecs import Exact
from holdfast.checkpoint.compression.lossy import Int8, TopK
from holdfast.checkpoint.log.log_records import FlatViews, fingerprint
from holdfast.checkpoint.recovery.run_recovery import recover
from holdfast.checkpoint.user_state import ScriptState
from holdfast.checkpointer import Checkpointer
from holdfast.distributed import Ranks
from holdfast.state.live_state import LiveState
from holdfast.store.commit.retention import Keep
from holdfast.store.log.chain import read_journal
from holdfast.store.run_store import LocalStore

STEPS = 11

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "sgd-fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, fused=True),
    "nesterov": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, foreach=False),
    "nesterov-foreach": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "adam": partial(torch.optim.Adam, lr=0.01, foreach=False),
    "adam-foreach": partial(torch.optim.Adam, lr=0.01, foreach=True),
    "adam-fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamw-fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True, foreach=True),
    "amsgrad-fused": partial(torch.optim.AdamW, lr=0.01, amsgrad=True, fused=True),
}

OTHERS = {
    "sgd-foreach": partial(torch.optim.SGD, lr=0.05, foreach=True),
    "sgd-plain-fused": partial(torch.optim.SGD, lr=0.05, fused=True),
    "nesterov-fused": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    "adamw-foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "amsgrad-loop": partial(torch.optim.AdamW, lr=0.01, amsgrad=True, foreach=False),
}
"""The rest of what torch has of these, with dense records alone."""

EVERY = OPTIMIZERS | OTHERS
FUSED = [name for name in EVERY if name.endswith("fused")]

CODECS = {
    "exact": None,
    "compressed": Exact(compress=True),
    "topk": TopK(0.2),
    "topk-lossy": TopK(0.05, error_feedback=False),
    "int8": Int8(block=16),
}


@pytest.fixture
def small_units(monkeypatch):
    """A base is of several units, one of them in each step."""
    cut_small(monkeypatch)


def trained(root, optimizer, feature, steps=STEPS, **options):
    """Train with a checkpointer; the states after each step, by the number of steps done."""
    loop = make(optimizer, feature)
    with Checkpointer(
        root, model=loop.model, optimizer=loop.optimizers, **loop.things, **options
    ) as checkpointer:
        assert checkpointer.resume() == 0
        states = {0: loop.state()}
        for i in range(steps):
            loop.iteration(i, checkpointer.step)
            states[checkpointer.steps_done] = loop.state()
    return states


def recovered(root, optimizer, feature, step):
    """The state at ``step``, in a loop that began otherwise."""
    loop = make(optimizer, feature, seed=1)
    things = {name: thing for name, thing in loop.things.items() if name in ("scheduler", "scaler")}
    averages = {"average": loop.things["averages"]} if "averages" in loop.things else {}
    update = loop.things.get("after_update")
    with LocalStore.open(root) as store:
        found = recover(
            store, LiveState(loop.model, loop.optimizers, averages), ScriptState(loop.optimizers, things),
            ranks=Ranks(), target=step, exact=True, after_update=update and (lambda steps_done: update()),
        )  # fmt: skip
    assert (found.point.step, found.problems) == (step, [])
    return loop.state()


@pytest.mark.campaign(keep=16)
@pytest.mark.parametrize(
    "feature, name, codec",
    one_in(2, ("", *FEATURES), EVERY, ["exact"])
    + one_in(6, ("", *FEATURES), OPTIMIZERS, [codec for codec in CODECS if codec != "exact"]),
)
def test_every_step_comes_back_bit_for_bit(tmp_path, small_units, name, feature, codec):
    states = trained(tmp_path, EVERY[name], feature, codec=CODECS[codec], base_every=4, keep=Keep(9))
    assert max(states) == STEPS
    for step, state in states.items():
        found = recovered(tmp_path, EVERY[name], feature, step)
        assert same(found, state), (step, [key for key in state if not same(found[key], state[key])])


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("codec", ["exact", "compressed", "topk-lossy"])
@pytest.mark.parametrize("name", FUSED)
def test_what_a_fused_optimizer_unscales_by_itself_comes_back(tmp_path, small_units, name, codec):
    """Steps that it leaves out, told by what it is handed, are among them."""
    states = trained(tmp_path, EVERY[name], "fused scaler", codec=CODECS[codec], base_every=4, keep=Keep(9))
    assert max(states) == STEPS and any(
        same(states[i]["model"], states[i + 1]["model"]) for i in range(STEPS)
    )
    for step, state in states.items():
        assert same(recovered(tmp_path, EVERY[name], "fused scaler", step), state), step
    with LocalStore.read(tmp_path) as reader:
        records = read_journal(reader, "rank-00000").records.values()
    consumed = [update["consumed"] for record in records for update in record.about["updates"]]
    assert {each["found_inf"] for each in consumed} == {0.0, 1.0} and len(consumed) == STEPS


class KeepsGradients(torch.optim.SGD):
    """The gradient of the step before is kept as it is, no copy, and this one's is changed out of torch's sight."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            grad, held = parameter.grad, self.state[parameter]
            grad.data.add_(parameter.data, alpha=0.1)
            parameter.data.add_(grad + held.get("last", 0), alpha=-0.01)
            held["last"] = grad


@pytest.mark.parametrize("codec", ["exact", "topk"])
@pytest.mark.parametrize("optimizer", [KeepsGradients, torch.optim.Rprop])
def test_what_an_optimizer_does_with_the_memory_of_gradients_comes_back(
    tmp_path, small_units, optimizer, codec
):
    make_it = partial(optimizer, lr=0.01)
    for step, state in trained(
        tmp_path, make_it, "", codec=CODECS[codec], base_every=9, keep=Keep(9)
    ).items():
        assert same(recovered(tmp_path, make_it, "", step), state), step


@pytest.mark.parametrize("formats", ["-c-", "c-c", "--c", "cc-"])
def test_steps_come_back_whatever_the_memory_format(tmp_path, formats):
    """Of the run at its beginning, from the middle of it on, and of the scripts that resume it."""
    at_first, later, resumed = (
        torch.channels_last if each == "c" else torch.contiguous_format for each in formats
    )
    wanted = []
    for stop, first in ((8, at_first), (12, resumed), (12, resumed), (12, at_first)):
        torch.manual_seed(stop)
        model = nn.Conv2d(3, 8, 3).to(memory_format=first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, base_every=1000) as checkpointer:
            done = checkpointer.resume()
            assert [same(dict(model.state_dict()), each) for each in wanted[-1:]] == [True] * bool(done)
            told = nullcontext()
            for step in range(done, stop):
                if step == 4:
                    model.to(memory_format=later)
                    moved = at_first != later
                    told = pytest.warns(UserWarning, match="weight changed otherwise") if moved else told
                with told:
                    model(torch.randn(2, 3, 5, 5)).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    checkpointer.step()
                told = nullcontext()
        assert done == (0, 8, 12, 12)[len(wanted)]
        wanted.append({name: value.clone() for name, value in model.state_dict().items()})


def test_fingerprints_follow_parameters_to_other_memory():
    """Views of earlier steps are used where the memory is the same, and give the fingerprint of a fresh look."""
    model = nn.Linear(9, 33)
    state = LiveState(model, [torch.optim.SGD(model.parameters(), lr=1.0)])
    parameters, views = state.parameters, FlatViews()
    seen = {fingerprint(parameters, 1, views)}
    for change in (
        lambda: model.weight.data.add_(1),
        lambda: setattr(model.weight, "data", torch.randn(33, 9)),
        lambda: setattr(model.weight, "data", model.weight.data.t().contiguous().t()),
        lambda: setattr(model.bias, "data", torch.randn(66)[::2]),
        lambda: model.bias.data.add_(1),
        lambda: model.double(),
    ):
        change()
        now = fingerprint(parameters, 1, views)
        assert now == fingerprint(parameters, 1) and now not in seen
        seen.add(now)
