"""Which tensor of a source is which of a model's, where a rank has some of it."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import Damaged, RunMismatch
from holdfast.formats.entry_matching import Allowed, ExpectedTensor, match
from holdfast.formats.load import refuse_unequal
from holdfast.formats.memory_source import InMemory
from holdfast.state.tensor_entries import TensorEntry


def test_a_stage_of_a_pipeline_leaves_what_others_hold_under_any_of_its_names():
    atoms = [
        (TensorEntry(name, "param", (2,), "F32"), torch.zeros(2)) for name in ("embed.weight", "block.weight")
    ]
    source = InMemory("there", "test", atoms, {})
    source.aliases["head.weight"] = "embed.weight"
    forms = [ExpectedTensor(("block.weight",), (2,), ("F32",))]
    found = match(forms, source, Allowed(), elsewhere={"embed.weight"})
    assert found.found.keys() == {"block.weight"} and not found.unused
    with pytest.raises(RunMismatch, match=r"nothing here wants its (embed|head)\.weight"):
        match(forms, source, Allowed())


def test_a_rank_without_tensors_of_its_own_takes_names_as_the_others_do():
    atoms = [(TensorEntry(f"module.{name}", "param", (2,), "F32"), torch.zeros(2)) for name in ("a", "b")]
    source = InMemory("there", "test", atoms, {})
    assert not match([], source, Allowed(), elsewhere={"a", "b"}).unused
    assert match([ExpectedTensor(("a",), (2,), ("F32",))], source, Allowed(), elsewhere={"b"}).names == {
        "a": "module.a"
    }


def tied_in(source_dtype, two):
    one = torch.ones(2)
    atoms = [
        (TensorEntry("there.one", "param", (2,), "F32"), one),
        (TensorEntry("there.two", "param", (2,), source_dtype), two),
    ]
    return InMemory("there", "test", atoms, {})


TIED, RENAMED = [ExpectedTensor(("one", "two"), (2,), ("F32",))], {"(.*)": r"there.\1"}


@pytest.mark.parametrize("partial", [False, True])
def test_both_names_of_a_tied_weight_are_compared_as_the_source_calls_them(partial):
    allowed = Allowed(rename=RENAMED, partial=partial)
    same, other = tied_in("F32", torch.ones(2)), tied_in("F32", torch.zeros(2))
    refuse_unequal(same, match(TIED, same, allowed).found["one"].values())
    with pytest.raises(Damaged, match=r"the copies of there\.one/param differ"):
        refuse_unequal(other, match(TIED, other, allowed).found["one"].values())


def test_another_name_of_a_tied_weight_that_is_of_another_type_is_no_copy_of_it():
    source = tied_in("BF16", torch.ones(2, dtype=torch.bfloat16))
    found = match(TIED, source, Allowed(rename=RENAMED, partial=True))
    assert not found.found["one"]["param"].copies and found.unused == ["there.two"]
    with pytest.raises(RunMismatch, match=r"nothing here wants its there\.two"):
        match(TIED, source, Allowed(rename=RENAMED))
