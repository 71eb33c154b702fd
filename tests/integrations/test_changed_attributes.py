"""Attributes of hosts that are kept because they have changed."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from holdfast.integrations.shared import changed_attributes
from holdfast.integrations.shared.changed_attributes import ChangedAttributes
from holdfast.state.generators import generator_json


def test_tensors_are_kept_once_they_have_changed_and_those_of_inference_always():
    host = SimpleNamespace(same=torch.zeros(2), changed=torch.zeros(2))
    with torch.inference_mode():
        host.inferred = torch.zeros(2)
    attributes = ChangedAttributes({"host": host}, torch.nn.Linear(2, 2), {})
    host.changed.add_(1)
    with torch.inference_mode():
        host.inferred.add_(1)
    assert attributes.changed()["values"]["host"].keys() == {"changed", "inferred"}


def test_containers_come_back_with_what_training_has_put_into_them():
    """Metrics that TRL's CPO has not logged yet are in a ``defaultdict`` of another, by a function of its own."""

    def made():
        host = SimpleNamespace(order=OrderedDict(), count=Counter(), queue=deque(maxlen=2), seen=set())
        host.metrics = defaultdict(lambda: defaultdict(list))
        return host, ChangedAttributes({"host": host}, torch.nn.Linear(2, 2), {})

    trained, attributes = made()
    assert attributes.changed()["values"] == {}
    trained.metrics["train"]["loss"].append(0.5)
    trained.order["b"], trained.count["a"] = 1, 2
    trained.queue.append(3)
    trained.seen.add((4,))
    resumed, again = made()
    again.restore(json.loads(json.dumps(attributes.changed())))
    assert vars(resumed) == vars(trained)
    resumed.metrics["train"]["norm"].append(1.0)
    resumed.metrics["eval"]["loss"].append(1.0)
    assert resumed.queue.maxlen == 2


@pytest.mark.parametrize(
    "made", [lambda: torch.Generator().manual_seed(1), lambda: np.random.default_rng(1), lambda: random.Random(1),
             lambda: np.random.RandomState(1)],
)  # fmt: skip
def test_generators_come_back_in_place(made):
    """Also one that the script makes when it first draws."""

    def script():
        host = SimpleNamespace(early=made(), late=None)
        return host, ChangedAttributes({"host": host}, torch.nn.Linear(2, 2), {})

    trained, attributes = script()
    assert attributes.changed()["values"] == {}
    trained.late = made()
    for each in (trained.early, trained.late, trained.late):
        draw(each)
    resumed, again = script()
    held = resumed.early
    again.restore(json.loads(json.dumps(attributes.changed())))
    assert resumed.early is held
    assert [draw(resumed.early), draw(resumed.late)] == [draw(trained.early), draw(trained.late)]


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.randint(1 << 30, (), generator=generator).item()
    return generator.random()


class Bits(np.random.PCG64):
    pass


@pytest.mark.parametrize(
    "made", [lambda: np.random.RandomState(np.random.PCG64(1)), lambda: np.random.Generator(Bits(1))]
)
def test_generators_that_could_not_be_made_again_are_not_stored(made):
    host = SimpleNamespace(late=None)
    attributes = ChangedAttributes({"host": host}, torch.nn.Linear(2, 2), {})
    host.late = made()
    with pytest.warns(UserWarning, match=r"host\.late changes in training and cannot be kept"):
        assert attributes.changed()["values"] == {}


@pytest.mark.parametrize(
    "told, text",
    [
        ({"__generator__": "numpy", "state": {"bit_generator": "seed"}}, "of the kind numpy seed is known"),
        ({"__generator__": "code", "state": {}}, "of the kind code is known"),
        (generator_json(torch.Generator()) | {"device": "cuda:99"}, "was on cuda:99, which is not here"),
    ],
)
def test_generators_that_cannot_be_made_stay_with_a_warning(told, text):
    """A file of a run names one of a fixed list, and calls nothing else."""
    host = SimpleNamespace(late=None)
    attributes = ChangedAttributes({"host": host}, torch.nn.Linear(2, 2), {})
    with pytest.warns(UserWarning, match=f"host.late stays as the script makes it: .*{text}"):
        attributes.restore({"values": {"host": {"late": told}}})
    assert host.late is None


def test_attributes_go_back_to_an_earlier_moment():
    host = SimpleNamespace(number=1, items=[1], nested=[[1]], tensor=torch.zeros(2), other=1)
    attributes = ChangedAttributes({"host": host}, torch.nn.Linear(2, 2), {})
    host.number, host.tensor = 2, torch.ones(2)
    before = attributes.values()
    host.number, host.new = 3, 4
    host.items.append(2)
    host.nested[0].append(2)
    attributes.go_back(json.loads(json.dumps(attributes.since(before))))
    assert (host.number, host.items, host.nested) == (2, [1], [[1]])
    assert not hasattr(host, "new")
    host.other = 5
    attributes.go_back(attributes.since(attributes.values()))
    assert host.other == 5 and torch.equal(host.tensor, torch.ones(2))


class Object:
    def __init__(self, **values):
        vars(self).update(values)


LARGE = 40_000
"""Elements of a tensor that is too large to be stored by value."""


@pytest.mark.parametrize(
    "made, change",
    [
        (lambda: torch.nn.Linear(2, 2), lambda each: each.weight.data.mul_(2)),
        (lambda: {"w": torch.ones(LARGE)}, lambda each: each["w"].mul_(2)),
        (lambda: Object(shadow=[torch.ones(2)]), lambda each: each.shadow[0].mul_(2)),
        (lambda: Object(shadow=[torch.ones(2)]), lambda each: each.shadow.__setitem__(0, torch.zeros(2))),
    ],
)
def test_tensors_that_cannot_be_kept_have_a_warning(made, change):
    model = torch.nn.Linear(2, 2)
    host = Object(average=made(), model=model, samples=[{"x": torch.ones(2)} for _ in range(5000)])
    attributes = ChangedAttributes({"host": host}, model, {})
    for _ in range(3):
        with torch.no_grad():
            model.weight.mul_(2)
            host.samples[0]["x"].mul_(2)  # of too many to look at
        attributes.changed()
    with torch.no_grad():
        change(host.average)
    with pytest.warns(UserWarning, match=r"host\.average changes in training and cannot be kept"):
        for _ in range(4):
            attributes.changed()


def test_tensors_of_an_object_that_saves_itself_have_no_warning():
    class Saves(Object):
        def state_dict(self):
            return {}

    host = Saves(average=torch.nn.Linear(2, 2))
    attributes = ChangedAttributes({"host": host}, torch.nn.Linear(2, 2), {})
    for _ in range(4):
        host.average.weight.data.mul_(2)
        attributes.changed()


def test_large_data_is_not_made_json_to_be_measured(monkeypatch):
    """A dataset may hold gigabytes, nested."""

    def fails(*_, **__):
        raise AssertionError("made JSON of it")

    monkeypatch.setattr(changed_attributes, "encode", fails)
    rows = [[0] * 2000 for _ in range(100)]
    host = SimpleNamespace(rows=rows, arrays={"x": np.zeros(100_000)}, tensors=(torch.zeros(100_000), [1]))
    host.bytes, host.texts = [b"x" * 100_000, None], [["x" * 100_000]]
    attributes = ChangedAttributes({"host": host}, torch.nn.Linear(2, 2), {})
    rows[0][0] = 1
    assert attributes.values() == {}


def test_who_saves_an_object_is_asked_once(monkeypatch):
    """A model has thousands of modules, and each step looks at all objects."""
    asked = []
    monkeypatch.setattr(changed_attributes, "_saves_itself", lambda thing: bool(asked.append(thing)))
    host, model = Object(average=[torch.ones(2)]), torch.nn.Sequential(torch.nn.Linear(2, 2))
    objects = {"host": host, **changed_attributes.modules_of(model, "Net")}
    attributes = ChangedAttributes(objects, model, {torch.nn.Module: changed_attributes.OF_MODULES})
    for _ in range(3):
        attributes.changed()
    assert asked == [host, model]
