"""State that an optimizer keeps elsewhere than under its parameters comes back, or is told at the step it changes."""

from __future__ import annotations

import random
import shutil
import warnings
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import BadInput

CHANGES_AT = 6
"""The step at which what comes later appears."""


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def next(self):
        self.count += 1
        return self.count


class Holding(torch.optim.Optimizer):
    """Descent whose rate depends on what ``keeps`` gives in each step."""

    def __init__(self, parameters, keeps):
        super().__init__(parameters, {"lr": 0.1})
        self.keeps, self.members = keeps, list(self.param_groups[0]["params"])
        self.moved = 1.0
        self.begin()

    def begin(self):
        {
            "number": lambda: setattr(self, "count", 0),
            "flag": lambda: setattr(self, "is_first", True),
            "namespace": lambda: setattr(self, "warmup", SimpleNamespace(deep=SimpleNamespace(steps=0))),
            "slots": lambda: setattr(self, "helper", Slotted()),
            "objects in a list": lambda: setattr(self, "helpers", [Slotted(), 3, {"more": Slotted()}]),
            "by parameter": lambda: setattr(self, "own", {}),
            "tensors": lambda: setattr(self, "means", [torch.zeros_like(p) for p in self.members]),
            "generator": lambda: setattr(self, "generator", torch.Generator()),
            "generator of numpy": lambda: setattr(self, "generator", np.random.default_rng(0)),
            "generator of python": lambda: setattr(self, "generator", random.Random(0)),
            "queue": lambda: setattr(self, "queue", deque(maxlen=3)),
            "array": lambda: setattr(self, "array", np.zeros(2)),
            "of no parameter": lambda: self.state.__setitem__("steps", 0),
        }.get(self.keeps, lambda: None)()

    def scale(self, k):
        if self.keeps == "number":
            self.count += 1
            return self.count
        if self.keeps == "flag":
            was, self.is_first = self.is_first, False
            return 5 if was else 1
        if self.keeps == "namespace":
            self.warmup.deep.steps += 1
            return self.warmup.deep.steps
        if self.keeps == "slots":
            return self.helper.next()
        if self.keeps == "objects in a list":
            return self.helpers[0].next() + self.helpers[2]["more"].next()
        if self.keeps.startswith("generator"):
            kind = type(self.generator)
            return (
                torch.rand((), generator=self.generator).item()
                if kind is torch.Generator
                else self.generator.random()
            )
        if self.keeps == "queue":
            self.queue.append(k)
            return sum(self.queue)
        if self.keeps == "array":
            self.array[0] += k
            return self.array[0]
        if self.keeps == "of no parameter":
            self.state["steps"] += 1
            return self.state["steps"]
        if self.keeps == "later of no parameter" and k >= CHANGES_AT:
            shared = self.state.setdefault("shared", {"scale": torch.zeros(()), "of": self.members[0]})
            shared["scale"] += 1
            return shared["scale"].item()
        if self.keeps == "later" and k >= CHANGES_AT:
            self.late = getattr(self, "late", 0) + 1
            return self.late
        return self.moved

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.members:
            k = self.state[parameter]["k"] = self.state[parameter].get("k", 0) + 1
            self.state[parameter].setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.5)
        scale = self.scale(k)
        for number, parameter in enumerate(self.members):
            update = self.state[parameter]["mean"]
            if self.keeps == "by parameter":
                own = self.own.setdefault(parameter, {"mean": torch.zeros_like(parameter)})
                update = own["mean"].lerp_(parameter.grad, 0.2)
            elif self.keeps == "tensors":
                update = self.means[number].lerp_(parameter.grad, 0.2)
            elif self.keeps == "of state":
                if k == 1:
                    self.cached = getattr(self, "cached", [])
                    self.cached.append(update)
                update = self.cached[number]
            parameter.sub_(update, alpha=0.01 * scale)


def begin(keeps):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    return model, Holding(model.parameters(), keeps)


def iterate(model, optimizer, i):
    model(torch.randn(4, 4, generator=torch.Generator().manual_seed(i))).square().mean().backward()
    if optimizer.keeps == "moved by the script" and i % 3 == 1:
        optimizer.moved *= 1.5
    optimizer.step()
    optimizer.zero_grad()


KEEPS = [
    "number", "flag", "namespace", "slots", "objects in a list", "by parameter", "tensors", "generator",
    "generator of numpy", "generator of python", "queue", "array", "of no parameter", "later of no parameter",
    "later", "of state", "moved by the script",
]  # fmt: skip


def begin_each():
    """A layer for each of ``KEEPS``, with an optimizer of its own."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(4, 3) for _ in KEEPS])
    return model, [Holding(layer.parameters(), keeps) for layer, keeps in zip(model, KEEPS, strict=True)]


@pytest.mark.slow
def test_own_state_of_optimizers_comes_back(tmp_path, recwarn):
    """From a base in the midst of the run and the records after it, twice, after kills."""

    def iterate_each(model, optimizers, i):
        for layer, optimizer in zip(model, optimizers, strict=True):
            iterate(layer, optimizer, i)

    whole, optimizers = begin_each()
    for i in range(14):
        iterate_each(whole, optimizers, i)
    root = tmp_path / "0"
    for number, until in enumerate((9, 11, 14)):
        model, optimizers = begin_each()
        ckpt = holdfast.Checkpointer(root, model=model, optimizer=optimizers, base_every=1000)
        with ckpt:
            done = ckpt.resume()
            assert done == (0, 9, 11)[number]
            for i in range(done, until):
                iterate_each(model, optimizers, i)
                ckpt.step()
                if i == 6:
                    ckpt.save()
            ckpt.wait()
            root = shutil.copytree(root, tmp_path / str(number + 1))
    for keeps, layer, other in zip(KEEPS, whole, model, strict=True):
        assert torch.equal(layer.weight, other.weight), keeps
    assert not recwarn, [str(w.message) for w in recwarn]


def test_resume_to_earlier_step_forgets_later_state(tmp_path):
    """What was made after that step is not there any more."""
    model, optimizer = begin("later of no parameter")
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        ckpt.resume()
        for i in range(8):
            iterate(model, optimizer, i)
            ckpt.step()
    model, optimizer = begin("later of no parameter")
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        assert ckpt.resume(step=3) == 3 and "shared" not in optimizer.state
    model, optimizer = begin("later of no parameter")
    optimizer.state["shared"] = {"scale": torch.ones(())}
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        assert ckpt.resume() == 3


class Projector:
    """An object that no base holds."""


class Growing(Holding):
    """Gets an object in a later step, under ``where``."""

    def __init__(self, parameters, where):
        super().__init__(parameters, "")
        self.where = where

    def scale(self, k):
        if k == CHANGES_AT:
            made = Projector()
            made.rank = 3
            if self.where == "attribute":
                self.projector = made
            elif self.where == "key":
                self.state[torch.zeros(2)] = {"mean": made}
            else:
                self.state[self.members[0]]["projector"] = {
                    "slot": made,
                    "list": [made],
                    "tensor": torch.ones(2).to_sparse(),
                }[self.where]
        return 1.0


def grow(run, where):
    """Steps that were done, and what was told at which of them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = Growing(model.parameters(), where)
    told = []
    with holdfast.Checkpointer(run, model=model, optimizer=optimizer) as ckpt:
        ckpt.resume()
        for i in range(9):
            iterate(model, optimizer, i)
            with warnings.catch_warnings(record=True) as each:
                warnings.simplefilter("always")
                ckpt.step()
            told += [(i + 1, str(warning.message)) for warning in each]
    return told


def test_object_that_no_base_holds_is_told_at_its_step(tmp_path):
    [(step, text)] = grow(tmp_path, "attribute")
    assert step == CHANGES_AT and "Growing.projector" in text


@pytest.mark.parametrize("where", ["slot", "list", "tensor", "key"])
def test_state_that_no_base_holds_is_refused_at_its_step(tmp_path, where):
    with pytest.raises(
        BadInput,
        match=r"Growing.state\[weight\]\['projector'\]|Growing keeps state of a tensor|weight/projector",
    ):
        grow(tmp_path, where)
    model, optimizer = begin("")
    optimizer.__class__ = type("Growing", (Holding,), {})
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        assert ckpt.resume() == CHANGES_AT - 1


def test_strides_of_state_come_back(tmp_path):
    """Of tensors in the state and in containers there: products with them have other last bits otherwise."""

    class Laid(Holding):
        def scale(self, k):
            held = self.state[self.members[0]]
            held["basis"] = torch.ones(5, 4).t() * k
            held["mean"] = held["mean"].t().contiguous().t()
            held["list"] = [torch.ones(6, 6)[:, :3], {"row": torch.empty_strided((1, 3), (7, 1)).fill_(k)}]
            held["count"] = torch.tensor(k, dtype=torch.int16)
            return 1.0

    def strides(optimizer):
        held = optimizer.state[optimizer.members[0]]
        inside = [held["list"][0], held["list"][1]["row"]]
        return [(t.stride(), t.dtype) for t in (held["basis"], held["mean"], held["count"], *inside)]

    found = []
    for until in (4, 4):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = Laid(model.parameters(), "")
        with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
            for i in range(ckpt.resume(), until):
                iterate(model, optimizer, i)
                ckpt.step()
            found.append(strides(optimizer))
            ckpt.save()
    assert found[0] == found[1] and found[0][0][0] == (1, 4)


class Decaying(torch.optim.Optimizer):
    """Descent along a mean, beside which ``odd`` gives what parameters of a later group have in their state."""

    def __init__(self, parameters, odd=None):
        super().__init__(parameters, {"lr": 0.1})
        self.odd = odd

    @torch.no_grad()
    def step(self, closure=None):
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                if self.odd is not None and number:
                    self.state[parameter]["odd"] = self.odd()
                parameter.sub_(mean.lerp_(parameter.grad, 0.5), alpha=group["lr"])


def train_growing(root, kind, grows_at, until):
    """The model gets a second layer before the step after ``grows_at``, or before ``resume`` if that was done."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = kind(model.parameters())

    def grow():
        torch.manual_seed(1)
        model.append(torch.nn.Linear(4, 4))
        optimizer.add_param_group({"params": list(model[-1].parameters())})

    if root.exists():
        grow()
    with holdfast.Checkpointer(root, model=model, optimizer=optimizer) as ckpt:
        done = ckpt.resume()
        for i in range(done, until):
            if i == grows_at:
                grow()
            model(torch.randn(4, 4, generator=torch.Generator().manual_seed(i))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
    return done, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("grows_at", [0, 3])
@pytest.mark.parametrize("kind", [Decaying, torch.optim.AdamW])
def test_model_that_grows_goes_on(tmp_path, kind, grows_at):
    _, whole = train_growing(tmp_path / "whole", kind, grows_at, 8)
    train_growing(tmp_path / "run", kind, grows_at, 6)
    done, found = train_growing(tmp_path / "run", kind, grows_at, 8)
    assert done == 6 and all(map(torch.equal, found, whole))


def test_odd_state_of_what_a_model_grew_by_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"Decaying.state\[1.weight\]\['odd'\]"):
        train_growing(tmp_path, lambda parameters: Decaying(parameters, lambda: [object()]), 3, 8)
