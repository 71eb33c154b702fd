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


class Cached(nn.Module):
    """Keeps a cache that is not persistent, made anew in each forward pass."""

    def __init__(self, cache):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, i):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        self.cache = x.mean(0)
        return self.layer(x).square().mean()


def train_cached(root, cache, until, empties=None):
    """The cache becomes None after step 5, just before ``step`` or ``save`` as ``empties`` says."""
    torch.manual_seed(0)
    model = Cached(cache)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with holdfast.Checkpointer(root, model=model, optimizer=optimizer) as ckpt:
        done = ckpt.resume()
        for i in range(done, until):
            model(i).backward()
            optimizer.step()
            optimizer.zero_grad()
            if empties == "step" and i == 5:
                model.cache = None
            ckpt.step()
            if empties == "save" and i == 5:
                model.cache = None
                ckpt.save()
            if empties == "look" and i == 5:  # is seen as a change that no record holds
                model.layer.weight.data = model.layer.weight.data.clone()
    return done, model


@pytest.mark.parametrize("empties", ["step", "save"])
def test_carried_buffer_that_becomes_none_is_told(tmp_path, empties):
    with pytest.warns(UserWarning) as told:
        train_cached(tmp_path / "run", torch.zeros(4), 8, empties)
    texts = [str(each.message) for each in told if "buffer cache" in str(each.message)]
    assert len(texts) == 3 and "It is None now" in texts[1] and "None at times" in texts[2]
    done, model = train_cached(tmp_path / "run", torch.zeros(4), 8)
    assert done == 8 and torch.equal(model.cache, torch.zeros(4))
    with pytest.warns(UserWarning, match="buffer cache"):
        _, model = train_cached(tmp_path / "run", torch.zeros(4), 10)
    with pytest.warns(UserWarning, match="buffer cache"):
        _, whole = train_cached(tmp_path / "whole", torch.zeros(4), 10)
    assert torch.equal(model.layer.weight, whole.layer.weight)


def test_buffer_that_the_model_is_made_without_is_not_carried(tmp_path):
    with pytest.warns(UserWarning) as told:
        train_cached(tmp_path, None, 8, "look")
    texts = [str(each.message) for each in told if "buffer cache" in str(each.message)]
    assert len(texts) == 1 and "since the model was made without it" in texts[0]
    done, model = train_cached(tmp_path, None, 8)
    assert done == 8 and model.cache is None


def test_carried_buffer_that_is_not_there_yet_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="buffer cache"):
        train_cached(tmp_path, torch.zeros(4), 4)
    with pytest.raises(holdfast.HoldfastError, match=r"cache/buffer.*run a forward pass before"):
        train_cached(tmp_path, None, 8)


class Changing(nn.Module):
    """Adds the sum of a small buffer, with a second name, that ``change`` changes."""

    def __init__(self, change, rate):
        super().__init__()
        self.layer, self.change, self.rate = nn.Linear(4, 2), change, rate
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.again = self.mean

    def forward(self, i):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        self.change(self, x, i)
        return self.layer(x + self.mean.sum()).square().mean()


def average(model, x, i):
    model.mean.lerp_(x.mean(0), model.rate)


def train_changing(root, change, until, rate=0.5):
    torch.manual_seed(0)
    model = Changing(change, rate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with holdfast.Checkpointer(root, model=model, optimizer=optimizer) as ckpt:
        done = ckpt.resume()
        for i in range(done, until):
            model(i).backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
    return done, model


def test_small_buffer_keeps_its_second_name(tmp_path):
    with pytest.warns(UserWarning, match="buffer mean"):
        _, before = train_changing(tmp_path, average, 5)
    done, model = train_changing(tmp_path, average, 5)
    assert done == 5 and model.again is model.mean and torch.equal(model.mean, before.mean)


def test_constants_beside_buffers_are_the_scripts(tmp_path):
    with pytest.warns(UserWarning, match="buffer mean"):
        train_changing(tmp_path, average, 5)
    assert train_changing(tmp_path, average, 5, rate=0.25)[1].rate == 0.25


def grow_late(model, x, i):
    if i < BEGINS_AT:
        model.mean.lerp_(x.mean(0), model.rate)
    else:
        model.mean = torch.cat([model.mean, x.mean(0)])


def become_sparse(model, x, i):
    model.mean = x.mean(0).to_sparse()


@pytest.mark.parametrize(
    ("change", "most_bytes", "why"),
    [
        (grow_late, 1 << 20, "its shape or type changes"),
        (become_sparse, 1 << 20, "it is of a kind that commits do not hold"),
        (average, 15, "such buffers have more than"),
    ],
    ids=["shape", "kind", "bytes"],
)
def test_buffer_that_cannot_be_carried_is_told(tmp_path, monkeypatch, change, most_bytes, why):
    monkeypatch.setattr("holdfast.checkpoint.capture.mutation_check.MOST_TRANSIENT_BYTES", most_bytes)
    with pytest.warns(UserWarning, match="buffer mean") as told:
        train_changing(tmp_path, change, 6)
    assert f"not in the run, since {why}" in str(told[-1].message)
    done, model = train_changing(tmp_path, change, 6)
    assert done == 6 and torch.equal(model.mean, torch.zeros(4))
