"""Which tensor of a source is which of a model's, where a rank has some of it."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import RunMismatch
from holdfast.state.atoms import Atom
from holdfast.universal.matching import Allowed, Form, match
from holdfast.universal.memory import InMemory


def test_a_stage_of_a_pipeline_leaves_what_others_hold_under_any_of_its_names():
    atoms = [(Atom(name, "param", (2,), "F32"), torch.zeros(2)) for name in ("embed.weight", "block.weight")]
    source = InMemory("there", "test", atoms, {})
    source.aliases["head.weight"] = "embed.weight"
    forms = [Form(("block.weight",), (2,), ("F32",))]
    found = match(forms, source, Allowed(), elsewhere={"embed.weight"})
    assert found.found.keys() == {"block.weight"} and not found.unused
    with pytest.raises(RunMismatch, match=r"nothing here wants its (embed|head)\.weight"):
        match(forms, source, Allowed())
