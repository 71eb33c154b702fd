"""Tensors of a folder under the names of a model: what is made of what is part of what they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from holdfast.formats.memory_source import InMemory
from holdfast.formats.naming import Converted, Group
from holdfast.formats.source import places_of
from holdfast.state.tensor_entries import TensorEntry


class Stacks:
    """Stands for a conversion of transformers."""

    def __init__(self, dim):
        self.operations, self.given = [SimpleNamespace(dim=dim)], []

    def add_tensor(self, first, name, pattern, tensor):
        self.given.append(tensor)

    def convert(self, first, model, config):
        return {first: torch.stack(self.given, self.operations[0].dim)}


def converted(dim, names="ab"):
    source = InMemory("x", "hf", [(TensorEntry(n, "param", (2, 2), "F32"), torch.eye(2)) for n in "ab"], {})
    group = Group("whole", Stacks(dim), [(".", name) for name in names])
    return Converted(source, [group], SimpleNamespace(config=None))


@pytest.mark.parametrize("other", [{"dim": 1}, {"dim": 0, "names": "ba"}])
def test_another_conversion_to_the_same_names_and_shapes_is_another(other):
    one, two = converted(0), converted(**other)
    assert places_of(one.atoms.values()) == places_of(two.atoms.values())
    assert one.identity() != two.identity()
    assert one.identity() == converted(0).identity()


def test_a_converted_tensor_has_no_place_even_if_it_keeps_its_size():
    assert converted(0, names="a").place("whole") is None
    source = InMemory("x", "hf", [(TensorEntry("a", "param", (2, 2), "F32"), torch.eye(2))], {})
    renamed = Converted(source, [Group("whole", None, [("", "a")])], SimpleNamespace(config=None))
    assert renamed.place("whole") is source.parts[0]
