"""Attributes of hosts that are kept because they have changed."""

from __future__ import annotations

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
