"""What a commit of MeZO says that its files lack is put to the test when it is opened."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from holdfast.errors import Damaged
from holdfast.formats.memory_source import InMemory
from holdfast.formats.pending_updates import PendingUpdates
from holdfast.optim.mezo import noise_digest
from holdfast.state.tensor_entries import TensorEntry

SLOTS = {"param": torch.zeros(3), "step": torch.tensor(0.0), "seed": torch.tensor(1)}
ATOMS = [
    (TensorEntry("w", slot, tuple(t.shape), "I64" if slot == "seed" else "F32"), t)
    for slot, t in SLOTS.items()
]
GROUPS = [{"lr": 0.1, "weight_decay": 0.0}]
SAID = {"mezo": {"slope": 0.5, "groups": GROUPS}, "group_parameters": [["w"]]}


def pending(**changes):
    source = InMemory("x", "holdfast", ATOMS, {})
    progress = {name: value for name, value in (SAID | changes).items() if value is not None}
    return PendingUpdates(progress, source.atoms, source.read, "run/commits/7"), progress


@pytest.mark.parametrize("slope", [0.5, None, float("inf")])
def test_an_update_is_taken_out_of_the_progress(slope):
    assert "mezo" not in pending(mezo={"slope": slope, "groups": GROUPS})[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"mezo": []},
        {"mezo": {"groups": GROUPS}},
        {"mezo": {"slope": 0.5}},
        {"mezo": {"slope": "0.5", "groups": GROUPS}},
        {"mezo": {"slope": 10**400, "groups": GROUPS}},
        {"mezo": {"slope": 0.5, "groups": []}},
        {"mezo": {"slope": 0.5, "groups": [{"lr": 0.1}]}},
        {"group_parameters": None},
        {"group_parameters": 3},
        {"group_parameters": [["another"]]},
    ],
)
def test_an_update_of_no_sense_is_refused_by_the_commit(changes):
    with pytest.raises(Damaged, match=r"run/commits/7 has an update of MeZO that does not read as one"):
        pending(**changes)


@pytest.mark.parametrize("slope, warns", [(0.5, True), (None, False)])
def test_an_update_that_another_processor_drew_is_said(slope, warns):
    told = {"slope": slope, "groups": GROUPS, "drawn": "of another"}
    with pytest.warns(UserWarning, match="run/commits/7: the last step of MeZO") if warns else nullcontext():
        pending(mezo=told)
    pending(mezo={**told, "drawn": noise_digest()})
