"""Buffers that are not persistent and change are in the run from the step at which they do, or are told."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import holdfast

BEGINS_AT = 3


class Centred(nn.Module):
    """Subtracts a running mean, from the fourth step on, in a buffer that is not persistent."""

    def __init__(self, how):
        super().__init__()
        self.layer = nn.Linear(20, 3)
        self.how, self.count = how, 0
        self.register_buffer("mean", torch.zeros(20), persistent=False)
        self.first = self.mean  # no other one than the buffer, as it was made, and too large to be kept
        self.register_buffer("constant", torch.ones(20), persistent=False)

    def forward(self, i):
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(i))
        if i >= BEGINS_AT:
            self.count += 1
            if self.how == "in place":
                self.mean.lerp_(x.mean(0), 0.1)
            elif self.how == "exchanged":
                self.mean = self.mean * 0.9 + x.mean(0) * self.count + self.first
            else:
                self.mean = torch.cat([self.mean, x.mean(0)])
        return self.layer(x - self.mean[:20]).square().mean()


def train(root, how, until, **options):
    torch.manual_seed(0)
    model = Centred(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with holdfast.Checkpointer(root, model=model, optimizer=optimizer, **options) as ckpt:
        done = ckpt.resume()
        for i in range(done, until):
            model(i).backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
        ckpt.wait()
        shutil.copytree(root, root.with_name(f"{root.name} at {until}"))
    return done, model


@pytest.mark.parametrize("how", ["in place", "exchanged"])
def test_buffer_that_is_not_persistent_and_changes_comes_back(tmp_path, how):
    with pytest.warns(UserWarning, match="buffer mean is registered with persistent=False.*in the run"):
        _, whole = train(tmp_path / "whole", how, 12)
    with pytest.warns(UserWarning, match="buffer mean"):
        train(tmp_path / "run", how, 7)
    train(tmp_path / "run at 7", how, 9)
    done, model = train(tmp_path / "run at 7 at 9", how, 12)
    assert done == 9 and torch.equal(whole.layer.weight, model.layer.weight)
    assert torch.equal(whole.mean, model.mean) and whole.count == model.count
    assert torch.equal(whole.first, model.first)


def test_buffer_that_grows_is_told_at_its_step(tmp_path):
    torch.manual_seed(0)
    model = Centred("grows")
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        ckpt.resume()
        for i in range(6):
            model(i).backward()
            optimizer.step()
            if i == BEGINS_AT:
                with pytest.warns(
                    UserWarning, match="buffer mean.*not in the run, since its shape or type changes"
                ):
                    ckpt.step()
            else:
                ckpt.step()
    assert len(list((tmp_path / "commits").iterdir())) == 1


def test_model_that_lost_such_a_buffer_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="buffer mean"):
        train(tmp_path / "run", "in place", 5)
    model = nn.Module()
    model.layer = nn.Linear(20, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(holdfast.HoldfastError, match="mean/buffer"):
        holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer).resume()
