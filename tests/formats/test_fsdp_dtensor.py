"""What Megatron-FSDP saves is a source. The layout is written here as Megatron's code has it, which did not run."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from formats.test_saved import exact
from holdfast.checkpointer import Checkpointer
from holdfast.errors import Damaged, FileMissing
from holdfast.formats.foreign_formats import format_of, open_source

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:beginning from .* it has no random numbers"
)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.ModuleDict({"layer": nn.ModuleDict({
            "linear_fc1": nn.Linear(4, 6, bias=False), "linear_fc2": nn.Linear(3, 4),
        })})  # fmt: skip

    def forward(self, x):
        layer = self.decoder["layer"]
        gate, up = layer["linear_fc1"](x).chunk(2, -1)
        return layer["linear_fc2"](nn.functional.silu(gate) * up)


def trained(seed):
    torch.manual_seed(seed)
    model = Gated()
    weights = [p for p in model.parameters() if p.dim() > 1]
    groups = [
        {"params": weights, "weight_decay": 0.1 * seed},
        {"params": [model.decoder["layer"]["linear_fc2"].bias]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01 * seed)
    for _ in range(3):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def halves(name, value):
    """A gated layer in two; anything else as it is."""
    if not name.endswith("linear_fc1.weight"):
        return {name: value}
    one, other = value.chunk(2) if isinstance(value, torch.Tensor) else (value, value)
    return {f"{name}_w": one, f"{name}_v": other}


def save(folder, parts, lost=None):
    model, optimizer = parts
    names = {id(p): f"module.module.module.{name}" for name, p in model.named_parameters()}
    state = {"model": {}, "optimizer": {"state": {}, "param_to_group_meta": {}}}
    for group in optimizer.param_groups:
        told = {key: value for key, value in group.items() if key != "params"} | {"step": 3}
        for p in group["params"]:
            state["model"] |= halves(names[id(p)], p.detach())
            for slot in ("exp_avg", "exp_avg_sq"):
                for name, half in halves(names[id(p)], optimizer.state[p][slot]).items():
                    state["optimizer"]["state"].setdefault(name, {})[slot] = half
            state["optimizer"]["param_to_group_meta"] |= halves(names[id(p)], told)
    state["model"].pop(lost, None)
    beside = {"iteration": 3, "args": argparse.Namespace(swiglu=True), "checkpoint_version": 3.0}
    dcp.save(state | beside, checkpoint_id=folder / "iter_0000003", no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


@pytest.mark.parametrize("name", ["", "iter_0000003"])
def test_a_training_goes_on_from_what_megatron_fsdp_saved(tmp_path, name):
    there, here = trained(1), trained(2)
    folder = save(tmp_path / "theirs", there) / name
    assert format_of(folder) == "megatron"
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        assert checkpointer.resume(source=folder) == 3
    assert [exact(part.state_dict()) for part in here] == [exact(part.state_dict()) for part in there]


def test_a_lost_half_is_refused(tmp_path):
    lost = "module.module.module.decoder.layer.linear_fc1.weight_v"
    folder = save(tmp_path, trained(1), lost)
    with pytest.raises(Damaged, match="lacks its other half"):
        open_source(folder)


def test_an_unfinished_save_of_the_other_format_is_no_such_folder(tmp_path):
    dcp.save({"decoder.weight": torch.ones(3)}, checkpoint_id=tmp_path / "iter_0000003", no_dist=True)
    with pytest.raises(FileMissing, match=r"lacks metadata\.json and common\.pt"):
        open_source(tmp_path / "iter_0000003")
