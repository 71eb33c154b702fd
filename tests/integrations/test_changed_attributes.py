"""Attributes of hosts that are kept because they have changed."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import torch

from holdfast.integrations.shared.changed_attributes import ChangedAttributes


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
