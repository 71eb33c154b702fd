"""A script whose default device is one that is played: what the Checkpointer makes for itself is on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import named_optimizers
from checkpoint.loops import same
from holdfast.checkpoint.compression.lossy import Int8, TopK
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.checkpointer import Checkpointer
from holdfast.store.commit.retention import Keep
from played_device import played  # noqa: F401

pytestmark = pytest.mark.usefixtures("played")


@pytest.fixture(autouse=True)
def default_device(played):  # noqa: F811
    torch.set_default_device("played")
    yield
    torch.set_default_device(None)


class Script:
    """An embedding of which each step touches few rows, frozen parameters, and a tensor for a learning rate."""

    def __init__(self):
        with torch.device("cpu"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(600, 8), nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
        model[3].requires_grad_(False)
        self.model = model.to("played")
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=0.01, foreach=False
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def step(self, i):
        words = (torch.arange(5, device="cpu") * 7 + i).to("played")
        self.model(words).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def state(self):
        slots = self.optimizer.state_dict()["state"]
        held = {f"{n}/{s}": v for n, each in slots.items() for s, v in each.items()}
        return {k: v.detach().cpu().clone() for k, v in {**self.model.state_dict(), **held}.items()}

    def checkpointer(self, root, **options):
        return Checkpointer(
            root,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            keep=Keep(9),
            **options,
        )


@pytest.mark.parametrize("options", [{"base_every": 4}, {"base_every": 99}, {"every": 3}], ids=str)
def test_a_killed_script_goes_on_there(tmp_path, options):
    whole, states = Script(), [None]
    for i in range(8):
        whole.step(i)
        states.append(whole.state())
    for begin, until in ((0, 6), (6, 8)):
        script = Script()
        checkpointer = script.checkpointer(tmp_path, **options)
        assert checkpointer.resume() == begin
        assert not begin or same(script.state(), states[begin])
        guard = checkpointer.guard(copy_every=2)
        for i in range(begin, until):
            script.step(i)
            checkpointer.step()
            assert same(script.state(), states[i + 1])
            assert not guard.check(1.0)
        checkpointer.rollback(until) if "every" not in options else None
        assert same(script.state(), states[until])
        checkpointer.wait()
        checkpointer.close(save=False)


@pytest.mark.parametrize("codec", [TopK(0.2), Int8(16)], ids=str)
def test_compressed_records_come_back_there(tmp_path, codec):
    script = Script()
    with script.checkpointer(tmp_path, codec=codec, base_every=99) as checkpointer:
        checkpointer.resume()
        for i in range(4):
            script.step(i)
            checkpointer.step()
        checkpointer.wait()
        checkpointer.close(save=False)
    again = Script()
    with (
        again.checkpointer(tmp_path, codec=codec) as checkpointer,
        pytest.warns(UserWarning, match="state-exact"),
    ):
        assert checkpointer.resume() == 4 and same(again.state(), script.state())


def test_another_run_begins_from_what_was_compacted_there(tmp_path):
    script = Script()
    with script.checkpointer(tmp_path / "run", base_every=99) as checkpointer:
        checkpointer.resume()
        for i in range(4):
            script.step(i)
            checkpointer.step()
    assert compact(tmp_path / "run", None).base.step == 4
    again = Script()
    with again.checkpointer(tmp_path / "next") as checkpointer:
        checkpointer.resume(source=tmp_path / "run")
        assert same(again.state(), script.state())


@pytest.mark.parametrize("name", ["apollo", "grass", "grass, rows by chance", "adamw in bytes", "adafactor"])
def test_optimizers_draw_on_the_host(tmp_path, name):
    states, model = [], None
    for until in (3, 5):
        with torch.device("cpu"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(9, 12), nn.Linear(12, 5))
        model = model.to("played")
        optimizer = named_optimizers.OPTIMIZERS[name](model)
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, base_every=99) as checkpointer:
            assert checkpointer.resume() == len(states)
            for state in states[-1:]:
                assert same({k: v.cpu() for k, v in model.state_dict().items()}, state)
            while checkpointer.steps_done < until:
                x = torch.ones(2, 9, device="cpu").to("played") * (checkpointer.steps_done + 1)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
                states.append({k: v.detach().cpu().clone() for k, v in model.state_dict().items()})
            checkpointer.wait()
            checkpointer.close(save=False)
