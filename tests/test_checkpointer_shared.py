"""The checkpointer with names that share memory: a kill at any step, and the resume has what a plain loop has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast
from checkpoint.loops import cut_small, manifests
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.checkpoint.replica import replica_process
from holdfast.errors import BadInput, RunMismatch
from holdfast.state.layout.overlaps import OverlappingMemory, overlaps, placed
from replica_run import Forked
from support.live_copy import copy_of_live_run

STEPS = 40


class Net(nn.Module):
    """Parameters ``one`` and ``end.two`` lie as ``how`` says, between others that go to units of their own."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.before, self.after = how, nn.Linear(16, 16), nn.Linear(16, 16)
        flat = torch.randn(512)
        first = flat[:256].view(16, 16)
        second = {
            "same": first, "transposed": first.t(), "partial": flat[64:320].view(16, 16),
            "apart": flat[256:].view(16, 16), "own": first.clone(), "frozen": first, "buffer": None, "rebound": None,
            "columns": flat.view(16, 32)[:, 16:],
        }[how]  # fmt: skip
        self.one = nn.Parameter(flat.view(16, 32)[:, :16] if how == "columns" else first)
        self.middle = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.end = nn.Module()
        if second is None:
            self.end.register_buffer(
                "two", self.one.data.t().clone() if how == "rebound" else self.one.data.t()
            )
        else:
            self.end.two = nn.Parameter(second, requires_grad=how != "frozen")

    def forward(self, x):
        if self.how == "rebound":
            self.end.two = self.one.data.t()
        x = torch.tanh(self.before(x) @ self.one)
        return self.after(torch.tanh(self.middle(x) @ self.end.two))


class Odd(torch.optim.Optimizer):
    """Keeps tensors that are one memory: a count of all parameters, the parameter itself, a mean and its list."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]["params"]
        if not self.state:
            count = torch.zeros(())
            for p in group:
                mean = torch.zeros(2, *p.shape)
                flat = mean[1].view(-1)
                self.state[p] = {
                    "count": count,
                    "mean": mean,
                    "last": mean[1],
                    "all": [flat, (mean[0],)],
                    "self": p.data,
                }
        for p in group:
            slots = self.state[p]
            slots["count"] += 1
            slots["last"].lerp_(p.grad, 0.1)
            slots["all"][1][0].add_(slots["mean"][1])
            slots["self"].sub_(
                slots["all"][0].view_as(p) / slots["count"] + 0.01 * slots["mean"][0], alpha=0.05
            )


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def make(how, kind=adamw):
    model = Net(how)
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "two":
        others = [p for p in trained if p is not model.end.two]
        return model, [adamw(others), torch.optim.SGD([model.end.two], 0.05, momentum=0.9)]
    return model, [kind(trained)]


def iterate(model, optimizers, i):
    model(torch.randn(5, 16, generator=torch.Generator().manual_seed(i))).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(root, how, kind, steps, **options):
    """A checkpointer that has done ``steps``, and what it trains."""
    model, optimizers = make(how, kind)
    ckpt = holdfast.Checkpointer(root, model=model, optimizer=optimizers, **options)
    for i in range(ckpt.resume(), steps):
        iterate(model, optimizers, i)
        ckpt.step()
    ckpt.wait()
    return ckpt, model, optimizers


def plain(how, kind, steps):
    model, optimizers = make(how, kind)
    for i in range(steps):
        iterate(model, optimizers, i)
    return model, optimizers


def values(model, optimizers):
    held = [o.state[p] for o in optimizers for p in model.parameters() if p in o.state]
    slots = [of_one[name] for of_one in held for name in sorted(of_one)]
    flat = [
        t
        for slot in slots
        for t in (slot if isinstance(slot, list) else [slot])
        if isinstance(t, torch.Tensor)
    ]
    return [tensor.detach().clone() for tensor in (*model.state_dict().values(), *flat)]


def same(one, other):
    pairs = list(zip(values(*one), values(*other), strict=True))
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


CASES = [("same", adamw), ("transposed", adamw), ("partial", adamw), ("buffer", adamw), ("frozen", adamw),
         ("same", "two"), ("apart", "two"), ("partial", Odd), ("own", Odd), ("rebound", adamw),
         ("rebound", Odd)]  # fmt: skip


@pytest.mark.campaign(keep=7)
@pytest.mark.parametrize(("how", "kind"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_shared_memory_comes_back(tmp_path, monkeypatch, how, kind):
    cut_small(monkeypatch)
    ckpt, *live = train(tmp_path / "run", how, kind, STEPS, base_every=3)
    killed = copy_of_live_run(tmp_path / "run", tmp_path / "killed")
    ckpt.close(save=False)
    assert same(live, plain(how, kind, STEPS))
    bases = [base for base in manifests(killed) if base.step]
    assert bases and (kind is Odd or any(base.oldest_step < base.step for base in bases))
    ckpt, *live = train(killed, how, kind, STEPS + 3)
    ckpt.close()
    assert same(live, plain(how, kind, STEPS + 3))


@pytest.mark.parametrize("how", ["apart", "columns"])
def test_slices_of_one_storage_stay_apart(tmp_path, monkeypatch, how):
    cut_small(monkeypatch)
    ckpt, *live = train(tmp_path, how, adamw, STEPS, base_every=3)
    ckpt.close(save=False)
    steps = [{file.step for unit, file in base.files.items()} for base in manifests(tmp_path)]
    assert max(map(len, steps)) > 6  # each unit is of its own step
    other = make(how)
    with holdfast.Checkpointer(tmp_path, model=other[0], optimizer=other[1]) as ckpt:
        assert ckpt.resume() == STEPS
    assert same(other, live)


@pytest.mark.parametrize("how", ["same", "partial"])
def test_a_target_without_sharing_gets_all_values(tmp_path, monkeypatch, how):
    cut_small(monkeypatch)
    ckpt, *live = train(tmp_path, how, adamw, STEPS, base_every=3)
    ckpt.close(save=False)
    other = make("own")
    with holdfast.Checkpointer(tmp_path, model=other[0], optimizer=other[1]) as ckpt:
        with pytest.warns(UserWarning, match="end.two and one were one memory in the run and are not here"):
            assert ckpt.resume() == STEPS
        assert same(other, live)
        iterate(*other, STEPS)
        ckpt.step()
    again = make("own")
    with holdfast.Checkpointer(tmp_path, model=again[0], optimizer=again[1]) as ckpt:
        assert ckpt.resume() == STEPS + 1
    assert same(again, other) and not torch.equal(again[0].one, again[0].end.two)


@pytest.mark.parametrize(("there", "here"), [("own", "same"), ("transposed", "same"), ("same", "partial")])
def test_a_target_with_other_sharing_is_refused(tmp_path, there, here):
    ckpt, *_ = train(tmp_path, there, adamw, 2)
    ckpt.close()
    model, optimizers = make(here)
    before = values(model, optimizers)
    ckpt = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizers)
    with pytest.raises(RunMismatch, match=r"end.two and one are one memory here"):
        ckpt.resume()
    assert all(map(torch.equal, before, values(model, optimizers)))


def test_a_source_with_other_values_is_refused(tmp_path):
    for how in ("own", "same"):
        torch.save(plain(how, adamw, 2)[0].state_dict(), tmp_path / f"{how}.pt")
    model, optimizers = make("same")
    ckpt = holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizers)
    with pytest.raises(RunMismatch, match=r"one and end.two are one memory here, and .* has other values"):
        ckpt.resume(source=tmp_path / "own.pt")
    ckpt = holdfast.Checkpointer(tmp_path / "other", model=model, optimizer=optimizers)
    with ckpt, pytest.warns(UserWarning, match="beginning from"):
        ckpt.resume(source=tmp_path / "same.pt")
    assert torch.equal(model.end.two, plain("same", adamw, 2)[0].end.two)


def test_shared_memory_is_compacted(tmp_path, monkeypatch):
    cut_small(monkeypatch)
    ckpt, *live = train(tmp_path, "transposed", adamw, STEPS, base_every=100)
    ckpt.close(save=False)
    compact(tmp_path, STEPS - 2)
    other = make("transposed")
    with holdfast.Checkpointer(tmp_path, model=other[0], optimizer=other[1]) as ckpt:
        assert ckpt.resume() == STEPS
    assert same(other, live)


def test_a_replica_of_shared_memory_is_refused(tmp_path):
    model, optimizers = make("same")
    with pytest.raises(BadInput, match=r"one and end.two are one memory, and would not be in a replica"):
        holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizers, replica=True).resume()


def test_a_replica_takes_buffers_that_are_one(tmp_path, monkeypatch):
    """As one mask in several layers: records hold buffers by value."""
    monkeypatch.setattr(replica_process, "start_process", Forked)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mask = torch.ones(2)
    for layer in model:
        layer.register_buffer("mask", mask)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, replica=tmp_path) as ckpt:
        assert ckpt.resume() == 0


def test_overlap_is_found_by_bytes():
    flat = torch.zeros(128)
    columns = flat[:16].view(4, 4)
    held = {
        "left": columns[:, :2], "right": columns[:, 2:], "middle": columns[:, 1:3], "long": flat[16:30],
        "end": flat[29:31], "next": flat[31:33], "bytes": flat[32:33].view(torch.uint8)[3:], "copy": flat.clone(),
        "expanded": flat[40:50].expand(3, 10), "inside": flat[45], "nothing": flat[:0], "other": flat[50:],
    }  # fmt: skip
    found = overlaps({(name,): tensor for name, tensor in held.items()})
    assert [[key[0] for key in group] for group in found] == [
        ["left", "right", "middle"], ["long", "end"], ["next", "bytes"], ["expanded", "inside"],
    ]  # fmt: skip
    assert overlaps({(name,): held[name] for name in ("left", "right", "next")}) == []
    within = {("all",): flat[:10], ("first",): flat[2:4], ("second",): flat[5:8], ("after",): flat[10:12]}
    assert overlaps(within) == [[("all",), ("first",), ("second",)]]


def test_a_view_is_made_where_it_fits():
    flat = torch.arange(8.0)
    memory, pair = OverlappingMemory.around(flat[2:], 8), torch.tensor([10.0, 11.0])
    made = memory.view(16, [1], pair)
    assert made is memory.view(16, [1], pair) and flat.tolist() == [0, 1, 2, 3, 10, 11, 6, 7]
    assert memory.view(0, [0], torch.full((3,), 5.0)).tolist() == [5, 5, 5] and flat[0] == 5
    for offset, strides in (
        (-4, [1]),
        (28, [1]),
        (2, [1]),
        (16, [1, 1]),
    ):  # before, behind, askew, of another shape
        assert memory.view(offset, strides, pair) is None


def test_places_are_those_among_parameters():
    """State that lies before them changes nothing."""
    beside = [[["one", "param"], 16, [1]], [["two", "param"], 20, [1]], [["one", "mean"], 0, [1]]]
    alone = [[["one", "param"], 0, [1]], [["two", "param"], 4, [1]]]
    assert placed([beside]) == placed([alone]) != placed([[alone[0], [["two", "param"], 8, [1]]]])


class Parting(nn.Module):
    """Its three buffers are made in one memory, which forward passes exchange or change in place as ``how`` says."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.layer, zeros = how, nn.Linear(8, 8), torch.zeros(8)
        for name in ("mean", "var", "count"):
            self.register_buffer(name, zeros)

    def forward(self, i):
        x = self.layer(torch.randn(5, 8, generator=torch.Generator().manual_seed(i)))
        if self.how == "all" or (self.how == "at step 3" and i == 3):
            self.mean = self.mean * 0.9 + x.detach().mean(0)
            self.var = self.var * 0.9 + x.detach().var(0)
        elif self.how == "one":
            self.mean = self.mean * 0.9 + x.detach().mean(0)
            self.var.add_(1)
        self.count.add_(1)
        return (x - self.mean + self.var * self.count).square().mean()


def train_parting(root, how, until, save=False, step=None):
    model = Parting(how)
    optimizer = adamw(model.parameters())
    with holdfast.Checkpointer(root, model=model, optimizer=optimizer) as ckpt:
        done = ckpt.resume(step=step)
        for i in range(done, until):
            model(i).backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
        if save:
            ckpt.save()
    return done, model.state_dict()


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("how", ["all", "one", "at step 3", "none"])
def test_buffers_that_part_after_they_are_made_come_back(tmp_path, how, save):
    _, whole = train_parting(tmp_path / "whole", how, 8)
    _, five = train_parting(tmp_path / "run", how, 5, save)
    done, found = train_parting(tmp_path / "run", how, 5)
    assert done == 5 and all(torch.equal(found[name], five[name]) for name in five)
    done, found = train_parting(tmp_path / "run", how, 8)
    assert done == 5 and all(torch.equal(found[name], whole[name]) for name in whole)
    if not save:
        done, found = train_parting(tmp_path / "run", how, 8, step=2)
        assert done == 2 and all(torch.equal(found[name], whole[name]) for name in whole)
